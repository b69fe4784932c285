"""Turns option values into what JSON can hold, in a form that builds an equal config again.

A function becomes `"package.module:name"`, an enumeration its value, a dtype its name.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import torch
from accelerate import ParallelismConfig
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from preftune.errors import ConfigError


def plain(value: Any, name: str) -> Any:
    """A copy of `value` made of JSON's types only; the argument is left as it was.

    Raises:
        ConfigError: A value has no such form (named by `name`).
    """
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, name) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, ParallelismConfig):
        return _parallelism(value)
    if isinstance(value, (AcceleratorConfig, QuantizationConfigMixin)):
        return plain(value.to_dict(), name)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(vars(value)[field.name], f"{name}.{field.name}") for field in fields(value)}
    if callable(value):
        return function_path(value, name)
    raise ConfigError(f"{name}={value!r} is a {type(value).__name__}, which cannot be written as JSON.")


def function_path(function: Any, name: str) -> str:
    """`"package.module:name"` of a function or class that can be found again under that name.

    Raises:
        ConfigError: It is a lambda, a local function or a partial: it has no such name.
    """
    module, _, qualified = "", "", ""
    if isinstance(function, type) or type(function).__name__ in ("function", "builtin_function_or_method"):
        module, qualified = function.__module__, function.__qualname__
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if found is not None and part.isidentifier() else None
    if found is not function:
        raise ConfigError(
            f"{name}={function!r} has no importable name. Define it at the top level of a module and pass it, or "
            "write it as 'package.module:name'."
        )
    return f"{module}:{qualified}"


def _parallelism(config: ParallelismConfig) -> dict[str, Any]:
    """The sizes and back-ends only: device meshes and handlers are rebuilt by accelerate."""
    return {
        field.name: vars(config)[field.name]
        for field in fields(config)
        if field.init and isinstance(vars(config)[field.name], (int, str))
    }
