"""Reward models: classifiers with one label, loaded, checked, told how they are padded, adapted with their head.

The value of a row is read at its last token that is not padding, so model and tokenizer must agree on what padding is.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from preftune.errors import ConfigError
from preftune.models import structure
from preftune.models.load import is_peft_model, load_model

logger = logging.getLogger(__name__)

# PEFT trains and saves these by itself for the task SEQ_CLS.
_HEADS = ("score", "classifier")


def load_reward_model(
    model: str | nn.Module,
    *,
    init_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    seed: int = 0,
) -> nn.Module:
    """Loads a reward model by name, or checks the one given.

    A causal language model's checkpoint has no score head: it gets one drawn from `seed`, which is said in one line.
    The global random state stays as it was.

    Raises:
        ConfigError: no model with a `score` head, or one with more than one label.
    """
    if not isinstance(model, str):
        loaded = load_model(model, auto_class=None, init_kwargs=init_kwargs, quantization_config=quantization_config)
        check_reward_model(loaded)
        return loaded
    init_kwargs = dict(init_kwargs or {})
    if init_kwargs.setdefault("num_labels", 1) != 1:
        raise ConfigError(
            f"model_init_kwargs has num_labels={init_kwargs['num_labels']}, and reward models require `num_labels=1`. "
            "Leave it out."
        )
    with torch.random.fork_rng(), _held_reports() as reports:
        torch.manual_seed(seed)
        try:
            result: Any = load_model(
                model,
                auto_class=AutoModelForSequenceClassification,
                init_kwargs=init_kwargs | {"output_loading_info": True},
                trust_remote_code=trust_remote_code,
                quantization_config=quantization_config,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"model {model!r} does not fit a reward model (reward models require `num_labels=1`): "
                f"{' '.join(reports) or error}"
            ) from error
    loaded, info = result
    _say_what_is_new(model, info, reports)
    check_reward_model(loaded)
    return loaded


def check_reward_model(model: nn.Module) -> None:
    """Refuses what gives no scalar.

    Raises:
        ConfigError: the model has no `score` head, or more than one label.
    """
    kind = type(structure.unwrap(model)).__name__
    if structure.value_head(model) is None:
        raise ConfigError(
            f"the model is a {kind}, which has no `score` head. Pass its name or folder (the head is then added), or "
            "load it with AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)."
        )
    labels = structure.num_labels(model)
    if labels != 1:
        raise ConfigError(
            f"the {kind} has {labels} labels; reward models require `num_labels=1`. Load it with "
            "AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)."
        )


def agree_on_padding(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the tokenizer's padding token into the model's config, where the model and all its users look it up.

    Raises:
        ConfigError: the model has no embedding for it.
    """
    pad, known = tokenizer.pad_token_id, structure.vocabulary_size(model)
    assert isinstance(pad, int), "the tokenizer was given a padding token"
    if pad >= known:
        raise ConfigError(
            f"the padding token {tokenizer.pad_token!r} has id {pad}, and the model knows ids below {known}. Use a "
            "token that it knows (tokenizer.pad_token = tokenizer.eos_token), or call model.resize_token_embeddings."
        )
    structure.text_config(model).pad_token_id = pad


def with_score_head(peft_config: Any) -> Any:
    """A copy of the adapter's config for the task SEQ_CLS, so that the score head is trained and saved with it.

    Under any other task the head, random where the base is a causal checkpoint, would be frozen and left out of what is
    saved. None, and what is no PEFT config, come back as they are.
    """
    if peft_config is None:
        return None
    from peft import PeftConfig, TaskType

    if not isinstance(peft_config, PeftConfig):
        return peft_config
    config = copy.deepcopy(peft_config)
    named = vars(config).get("modules_to_save") or []
    if config.task_type != TaskType.SEQ_CLS:
        logger.log(
            logging.INFO if "score" in named else logging.WARNING,
            "the adapter's task_type is %s; it becomes SEQ_CLS, so that the score head is trained and saved with the "
            "adapter (modules_to_save=['score'])",
            config.task_type,
        )
        config.task_type = TaskType.SEQ_CLS
    if "modules_to_save" in vars(config):
        vars(config)["modules_to_save"] = [name for name in named if name not in _HEADS] or None
    return config


def warn_of_frozen_head(model: nn.Module) -> None:
    """Says where an adapter leaves the score head as it is, which is right for a trained reward model alone."""
    head = structure.value_head(model)
    if head is not None and is_peft_model(model) and not any(p.requires_grad for p in head.parameters()):
        logger.warning(
            "the score head is not trained, and is not saved with the adapter: right only where the base model is a "
            "reward model already. Else make the adapter with task_type='SEQ_CLS', or pass peft_config=."
        )


def _say_what_is_new(name: str, info: dict[str, Any], reports: list[str]) -> None:
    new = {key for key in info["missing_keys"] if key.split(".")[0] == "score"}
    unused = {key for key in info["unexpected_keys"] if not key.startswith("lm_head.")}
    if info["missing_keys"] - new or unused or info["mismatched_keys"]:
        for report in reports:
            logger.warning("%s", report)
    if new:
        logger.warning("the score head of %s is new and random: the checkpoint is not that of a reward model", name)


@contextmanager
def _held_reports() -> Iterator[list[str]]:
    """Keeps back the table of missing and unexpected weights that transformers logs while it loads a model."""
    held: list[str] = []

    def hold(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "LOAD REPORT" not in message:
            return True
        held.append(message)
        return False

    source = logging.getLogger("transformers.modeling_utils")
    source.addFilter(hold)
    try:
        yield held
    finally:
        source.removeFilter(hold)
