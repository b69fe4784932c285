"""From what a user writes to a reward: the name of a built-in, the import path of a function, or a reward model.

Reward models stay names here, so that reading a command line loads no model.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable
from typing import Any

from preftune.errors import ConfigError
from preftune.losses.importing import import_callable
from preftune.losses.names import is_import_path

# Names of `preftune.rewards` and, of a factory, the arguments that a name alone stands for.
_BUILT_IN: dict[str, tuple[Any, ...] | None] = {
    "accuracy_reward": None,
    "reasoning_accuracy_reward": None,
    "exact_match_reward": None,
    "numeric_match_reward": None,
    "think_format_reward": None,
    "get_repetition_penalty_reward": (),
    "get_soft_overlong_punishment": (1280, 256),
}


def reward_names() -> list[str]:
    """Names that `resolve_reward` knows as built-ins."""
    return list(_BUILT_IN)


def resolve_reward(name: str) -> Callable[..., Any] | str:
    """A reward function, or the name itself where it names a reward model (a folder, or "owner/model" on the hub).

    `get_soft_overlong_punishment` stands for `get_soft_overlong_punishment(1280, 256)`, other factories for their
    defaults. A function is written "package.module:function" or "package.module.function".

    Raises:
        ConfigError: it names nothing, with the nearest built-in; or a function that cannot be imported.
    """
    if name in _BUILT_IN:
        function, arguments = getattr(importlib.import_module("preftune.rewards"), name), _BUILT_IN[name]
        return function if arguments is None else function(*arguments)
    if is_import_path(name):
        return import_callable(name, option="reward_funcs")
    if os.path.isdir(name) or ("/" in name and not name.startswith(("/", "./", "../", "~"))):
        return name
    module, _, function_name = name.rpartition(".")
    if is_import_path(f"{module}:{function_name}"):
        return import_callable(f"{module}:{function_name}", option="reward_funcs")
    near = difflib.get_close_matches(name, _BUILT_IN, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"reward_funcs={name!r} names nothing.{hint} Wanted a built-in ({', '.join(_BUILT_IN)}), a function "
        "('package.module:function'), or a reward model: a folder that is there, or 'owner/model' on the hub."
    )
