"""`RewardRunner`: calls every reward function on a round of completions and gives back one checked table.

Whatever functions do (draw random numbers, hang, raise, return nonsense), training sees numbers or one clear error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from preftune.errors import ConfigError, RewardError
from preftune.models import structure
from preftune.models.random_state import forked_random_states
from preftune.rewards.calling import ARGUMENTS, Signature, is_async, name_of, unique_names
from preftune.rewards.checks import reward_list, reward_value
from preftune.rewards.dispatch import Dispatcher, Result, Reward
from preftune.rewards.model import RewardModel
from preftune.rewards.records import ExtraColumns, mean_metrics, shortened
from preftune.rewards.registry import resolve_reward

if TYPE_CHECKING:
    from transformers import TrainerState

logger = logging.getLogger(__name__)

RewardFunc = str | nn.Module | Callable[..., Any]
OnError = Literal["raise", "none"]

_DROPPED = ("prompt", "completion", "completion_ids")
_RESERVED = tuple(name for name in ARGUMENTS if name not in _DROPPED)


@dataclass(frozen=True)
class RewardTable:
    """The rewards of N completions under K functions.

    Attributes:
        values: `[N, K]` float64; NaN where a function gave None: it does not apply to that row.
        names: K names, all different.
        columns: What functions handed to `log_extra`: N values by column.
        metrics: Means of what functions handed to `log_metric`; `rewards/<name>/seconds_per_sample` of each function;
            `rewards/<name>/truncated` of reward models; `rewards/<name>/failed` where errors do not end the run.
        seconds: Wall-clock seconds by function.
    """

    values: np.ndarray
    names: list[str]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def unrewarded(self) -> list[int]:
        """Rows to which no function applies."""
        return np.flatnonzero(np.isnan(self.values).all(axis=1)).tolist()


class RewardRunner:
    """Calls reward functions: plain and async ones, partials, callable objects, reward models.

    Each is called with keyword arguments `prompts`, `completions`, `completion_ids`, every dataset column,
    `trainer_state`, `log_extra(column, values)` and `log_metric(name, value)`, as far as its signature takes them, and
    returns one number or None per completion. Async ones run together, beside the others; the others one after another
    in the order given. Global random states are left as found.

    Args:
        reward_funcs: One or several. A text names a built-in, a function ("package.module:function") or a reward model.
        names: For metrics; None takes `name_of`. Equal names are made different.
        timeout: Seconds that one call may take. A plain function then runs in a thread, which cannot be killed: past
            its limit it is left behind and its result thrown away. None: no limit.
        on_error: What follows an error, a hang, or something that is no reward: "raise" a RewardError, or "none": the
            rows count as None, with one warning per function.
        processes: Plain functions run in this many worker processes, each whole call in one of them, and are killed at
            their limit. They must be defined in a module. 0: none.
        processing_classes: Tokenizers of reward models, one per function (None at other places).
        model_options: Keyword arguments of `RewardModel` for those that are given by name or as modules.

    Raises:
        ConfigError: no function, something that is none, a wrong option.
    """

    def __init__(
        self,
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        *,
        names: Sequence[str] | None = None,
        timeout: float | None = None,
        on_error: OnError = "raise",
        processes: int = 0,
        processing_classes: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        _check_options(functions, names, timeout, on_error, processes)
        functions = [resolve_reward(one) if isinstance(one, str) else one for one in functions]
        self.on_error = on_error
        own_names = [name_of(function) for function in functions] if names is None else list(names)
        self.names = unique_names(own_names)
        if self.names != own_names:
            logger.warning("reward functions share a name, so they are called %s", ", ".join(self.names))
        classes = _one_each(processing_classes, functions)
        self._rewards = [
            _prepare(name, function, processing_class, model_options or {})
            for name, function, processing_class in zip(self.names, functions, classes)
        ]
        self._dispatcher = Dispatcher(self._rewards, timeout, processes)
        self._extra = ExtraColumns()
        self._warned: set[str] = set()

    @property
    def models(self) -> list[RewardModel]:
        """The reward models among the functions, whose modules the trainer places."""
        return [reward.function for reward in self._rewards if reward.kind == "model"]

    def check_columns(self, columns: Iterable[str]) -> None:
        """Says before training what `run` would say of these dataset columns.

        Raises:
            ConfigError: a column is named like an argument of the runner, or a function needs one that is not there.
        """
        columns = list(columns)
        clashing = [column for column in columns if column in _RESERVED]
        if clashing:
            raise ConfigError(
                f"dataset column {clashing[0]!r} is named like an argument that every reward function gets "
                f"({', '.join(_RESERVED)}). Rename it: dataset.rename_column({clashing[0]!r}, 'my_{clashing[0]}')."
            )
        for reward in self._rewards:
            reward.signature.check(reward.name, [column for column in columns if column not in _DROPPED])

    def run(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]] | None = None,
        trainer_state: TrainerState | None = None,
        seed: int | None = None,
        meanwhile: Callable[[], object] = bool,
    ) -> RewardTable:
        """Rewards of N completions; all lists are as long.

        Args:
            prompts: Texts, or lists of messages.
            completions: Texts, or lists of messages, as the prompts are.
            completion_ids: Their token ids, without padding.
            columns: Dataset columns, and whatever else the rollout brings, by name.
            trainer_state: Handed on.
            seed: Of the random states that functions see (give the round's). None: those of training, not moved.
            meanwhile: Called once, when async functions have begun and before any other: work that needs no reward.

        Raises:
            RewardError: a function failed and `on_error` is "raise".
            ConfigError: what `check_columns` says.
        """
        columns = {name: values for name, values in (columns or {}).items() if name not in _DROPPED}
        self.check_columns(columns)
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        rows = len(completions)
        for name, values in given.items():
            if len(values) != rows:
                raise RewardError(f"{name!r} has {len(values)} values for {rows} completions; wanted one for each.")
        if rows == 0:
            meanwhile()
            return RewardTable(np.zeros((0, len(self.names))), self.names, self._extra.merged([], 0))
        with forked_random_states(seed), torch.no_grad():
            results = self._dispatcher.call_all(given, rows, trainer_state, meanwhile)
        return self._table(results, given, rows)

    def close(self) -> None:
        """Ends the event loop and the worker processes; the next `run` starts them again."""
        self._dispatcher.close()

    def _table(self, results: list[Result], given: Mapping[str, Sequence[Any]], rows: int) -> RewardTable:
        values = np.full((rows, len(results)), np.nan)
        metrics: dict[str, float] = {}
        for k, (name, result) in enumerate(zip(self.names, results)):
            values[:, k], failed = self._checked(name, result, rows)
            metrics[f"rewards/{name}/seconds_per_sample"] = result.seconds / rows
            if self.on_error == "none":
                metrics[f"rewards/{name}/failed"] = failed / rows
        records = [result.records for result in results]
        table = RewardTable(
            values=values,
            names=self.names,
            columns=self._extra.merged(records, rows),
            metrics=mean_metrics(records) | metrics,
            seconds={name: result.seconds for name, result in zip(self.names, results)},
        )
        if table.unrewarded:
            row = table.unrewarded[0]
            shown = ", ".join(f"{name}={shortened(column[row])}" for name, column in given.items())
            self._warn_once(
                "", f"no reward function applies to {len(table.unrewarded)} of {rows} rows, such as: {shown}"
            )
        return table

    def _checked(self, name: str, result: Result, rows: int) -> tuple[list[float], int]:
        """The column of a function, and in how many rows it failed."""
        if result.error is not None:
            if self.on_error == "raise":
                raise result.error
            self._warn_once(name, f"{result.error} Its rewards count as None.")
            return [float("nan")] * rows, rows
        column, failed = [float("nan")] * rows, 0
        try:
            returned = reward_list(result.returned, name, rows)
        except RewardError as error:
            result.error = error
            return self._checked(name, result, rows)
        for row, value in enumerate(returned):
            try:
                column[row] = reward_value(value, name, row)
            except RewardError as error:
                if self.on_error == "raise":
                    raise
                failed += 1
                self._warn_once(name, f"{error} It counts as None.")
        return column, failed

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("%s", message)


def _check_options(
    functions: list[Any], names: Sequence[str] | None, timeout: float | None, on_error: str, processes: int
) -> None:
    if not functions:
        raise ConfigError("reward_funcs is empty; wanted at least one reward function or reward model.")
    for place, function in enumerate(functions):
        if isinstance(function, type) or not (isinstance(function, str) or callable(function)):
            what = "the class " + function.__name__ if isinstance(function, type) else f"a {type(function).__name__}"
            remedy = " Pass an instance of it." if isinstance(function, type) else ""
            raise ConfigError(
                f"reward_funcs[{place}] is {what}; wanted a function, a callable object, the name of a reward or of a "
                f"reward model, or a model.{remedy}"
            )
    if names is not None and len(names) != len(functions):
        raise ConfigError(f"{len(names)} names are given for {len(functions)} reward functions; wanted one for each.")
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"reward_timeout={timeout!r}; wanted seconds above 0, or None for no limit.")
    if on_error not in ("raise", "none"):
        raise ConfigError(f"on_reward_error={on_error!r}; wanted 'raise' or 'none'.")
    if processes < 0:
        raise ConfigError(f"reward_processes={processes!r}; wanted 0 (none) or a number of processes.")


def _one_each(processing_classes: Any, functions: list[Any]) -> list[Any]:
    if processing_classes is None:
        return [None] * len(functions)
    given = list(processing_classes) if isinstance(processing_classes, list | tuple) else [processing_classes]
    if len(given) != len(functions):
        raise ConfigError(
            f"{len(given)} reward_processing_classes are given for {len(functions)} reward_funcs; they must match in "
            "number, with None beside a function that is no reward model."
        )
    return given


def _prepare(name: str, function: Any, processing_class: Any, options: Mapping[str, Any]) -> Reward:
    if isinstance(function, str) or (isinstance(function, nn.Module) and structure.value_head(function) is not None):
        function = RewardModel(function, processing_class, name=name, **options)
    if isinstance(function, PreTrainedModel):
        raise ConfigError(
            f"reward {name!r} is a {type(function).__name__}, which has no scalar head. Load a reward model with "
            "AutoModelForSequenceClassification and num_labels=1."
        )
    if isinstance(function, RewardModel):
        return Reward(name, function, Signature.of(function), "model")
    return Reward(name, function, Signature.of(function), "async" if is_async(function) else "sync")
