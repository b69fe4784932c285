"""Adapters saved with PEFT, given by name where a model is expected: their base model, and the adapter on it to train.

transformers would load such a folder as a plain model whose adapter is frozen and whose base is trained.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers.utils.peft_utils import find_adapter_config_file

from preftune.errors import ConfigError


def is_saved_adapter(name: str) -> bool:
    """Whether `name` is a folder with an adapter and no whole model, or a repository of the hub with an adapter."""
    if os.path.isdir(name):
        files = os.listdir(name)
        return "adapter_config.json" in files and "config.json" not in files
    try:
        return find_adapter_config_file(name) is not None
    except OSError:
        return False


def base_model_name(name: str) -> str:
    """The base model of a saved adapter.

    Raises:
        ConfigError: the adapter does not say.
    """
    from peft import PeftConfig

    base = PeftConfig.from_pretrained(name).base_model_name_or_path
    if not base:
        raise ConfigError(
            f"the adapter {name!r} does not name its base model. Load both and pass the model: "
            "PeftModel.from_pretrained(base, adapter, is_trainable=True)."
        )
    return base


def load_with_adapter(name: str, auto_class: Any, init_kwargs: dict[str, Any]) -> nn.Module:
    """The base model of a saved adapter with the adapter on it, ready to be trained further.

    Raises:
        ConfigError: virtual tokens, which PEFT cannot train further.
        OSError: the base model cannot be loaded.
    """
    from peft import PeftConfig, PeftModel

    if PeftConfig.from_pretrained(name).is_prompt_learning:
        raise ConfigError(
            f"{name!r} holds virtual tokens (prompt, prefix or p-tuning), and PEFT cannot go on training saved ones. "
            "Start from the base model with peft_config, or resume the run with resume_from_checkpoint."
        )
    base = auto_class.from_pretrained(base_model_name(name), **init_kwargs)
    return PeftModel.from_pretrained(base, name, is_trainable=True)
