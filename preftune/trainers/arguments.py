"""The config that a trainer works with: the one given, its default, or one made of transformers' own arguments.

A config of another trainer is refused: its options would be ignored, or missing.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainingArguments

from preftune.configs.base import BaseConfig
from preftune.models.load import model_name


def default_output_dir(model: Any, name: str) -> str:
    return f"{os.path.basename(model_name(model)) or 'model'}-{name}"


def own_config(config_class: type[BaseConfig], args: Any, model: Any, name: str) -> BaseConfig:
    """`args` where it is of the trainer's class; None and a plain `TrainingArguments` become one.

    Raises:
        TypeError: the config of another trainer, or none at all.
    """
    if args is None:
        return config_class(output_dir=default_output_dir(model, name))
    if isinstance(args, config_class):
        return args
    if isinstance(args, TrainingArguments) and not isinstance(args, BaseConfig):
        return config_class.from_training_arguments(args)
    raise TypeError(f"args is a {type(args).__name__}; a {name} trainer takes a {config_class.__name__}.")
