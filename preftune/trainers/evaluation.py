"""Around an evaluation: it leaves no trace in training, and mistakes are named before a model has run.

A trace would be a moved random state, another mode of a module, or training metrics that the log of an evaluation ate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from preftune.errors import ConfigError, DataFormatError
from preftune.models.isolation import isolated

if TYPE_CHECKING:
    from preftune.trainers.base import BaseTrainer


@contextmanager
def untraced(trainer: BaseTrainer) -> Iterator[None]:
    """Whatever is evaluated inside, training goes on as if it had not been.

    A dataloader draws its seed from torch's global state, so that without this dropout would differ afterwards.
    """
    before, trainer.is_evaluating = trainer.is_evaluating, True
    try:
        with isolated(trainer.model):
            yield
    finally:
        trainer.is_evaluating = before


def check_split_name(name: str, eval_dataset: Any) -> None:
    """`name` is one of the eval sets that the constructor got.

    Raises:
        ConfigError: it is not; a single set has no name.
    """
    if not isinstance(eval_dataset, Mapping):
        held = "one set without a name" if eval_dataset is not None else "none"
        raise ConfigError(
            f"evaluate({name!r}) asks for an eval set by name, and this trainer has {held}. Give the constructor "
            f"eval_dataset={{{name!r}: rows}}, or pass the rows to evaluate()."
        )
    if name not in eval_dataset:
        raise ConfigError(f"there is no eval set {name!r}; this trainer has {', '.join(map(repr, eval_dataset))}.")


def check_best_metric(args: Any, eval_dataset: Any) -> None:
    """With a dict of eval sets, the metric of the best model must be that of one of them: `eval_{name}_...`.

    Raises:
        ConfigError: it is of none, which the first evaluation would find out after hours.
    """
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no" or not isinstance(eval_dataset, Mapping):
        return
    key = metric if metric.startswith("eval_") else f"eval_{metric}"
    if not any(key.startswith(f"eval_{name}_") for name in eval_dataset):
        first = next(iter(eval_dataset), "name")
        raise ConfigError(
            f"metric_for_best_model={metric!r} is a metric of no eval set: there are several "
            f"({', '.join(map(repr, eval_dataset))}), and their metrics are called eval_{{name}}_... Choose one, for "
            f"instance metric_for_best_model='eval_{first}_loss'."
        )


def check_evaluated(metrics: Mapping[str, float], prefix: str) -> None:
    """Some row was evaluated.

    Raises:
        DataFormatError: none was, so that there is no loss.
    """
    if f"{prefix}_loss" not in metrics:
        raise DataFormatError(
            f"the {prefix} set gave no row that could be evaluated. Check the split and the filters that made it; a "
            "stream must begin anew each time that it is read, and its rows must fit max_length."
        )
