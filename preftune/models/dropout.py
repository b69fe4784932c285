"""Dropout that is really off: modules, and the probabilities that forwards read from themselves or from a config.

A model trained with `disable_dropout` then computes the same in train and in eval mode; adapters keep their own.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig, PreTrainedModel

from preftune.models.adapters import adapter_modules

_NAMES = ("dropout", "pdrop", "layerdrop")


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout of the base model to 0; what belongs to an adapter (LoRA dropout) stays as the user set it.

    The model's config is left as it is. Modules whose code reads a probability from the config at each call get a copy
    of it with zeros.
    """
    kept = adapter_modules(model)
    copies: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        if module in kept:
            continue
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name in _probabilities(vars(module)):
            vars(module)[name] = 0.0
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and _reads_dropout_from(config, module):
            vars(module)["config"] = copies.setdefault(id(config), _without_dropout(config))


def _probabilities(values: dict[str, Any]) -> list[str]:
    """Names of attributes that are dropout probabilities above 0."""
    return [
        name
        for name, value in values.items()
        if any(part in name for part in _NAMES) and type(value) in (int, float) and 0 < value <= 1
    ]


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    config = copy.copy(config)
    for name in _probabilities(vars(config)):
        setattr(config, name, 0.0)
    return config


def _reads_dropout_from(config: PreTrainedConfig, module: nn.Module) -> bool:
    """Whether the code of the module names one of them; models keep their config, which is saved with them."""
    names = _probabilities(vars(config))
    if not names or isinstance(module, PreTrainedModel):
        return False
    try:
        source = inspect.getsource(type(module))
    except (OSError, TypeError):  # code without a source file
        return True
    return any(f"config.{name}" in source for name in names)
