"""Turns "package.module:function" into the function, with an error that names what is missing.

Also looks in the current folder, which an installed command does not have on its path. Loads no torch by itself.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from functools import reduce
from types import ModuleType
from typing import Any

from preftune.errors import ConfigError
from preftune.losses.names import is_import_path


def import_callable(spec: str, *, option: str) -> Callable[..., Any]:
    """The function that `spec` ("package.module:function", dots allowed after the colon too) points to.

    Args:
        spec: What the user wrote.
        option: The option it was written for, named in errors.

    Raises:
        ConfigError: wrong form, module not found or failing while imported, no such name in it, or not callable.

    One fact to check: `import_callable("math:hypot", option="x") is math.hypot`.
    """
    if not is_import_path(spec):
        raise ConfigError(f'{option}={spec!r} does not have the form "package.module:function".')
    module_name, _, path = spec.partition(":")
    module = _import(module_name, spec, option)
    try:
        found = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        near = difflib.get_close_matches(path, vars(module), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{option}={spec!r}: module {module_name!r} has no {path!r}.{hint}") from error
    if not callable(found):
        raise ConfigError(f"{option}={spec!r} is a {type(found).__name__}, not a function.")
    return found


def _import(module_name: str, spec: str, option: str) -> ModuleType:
    try:
        return _import_also_from_here(module_name)
    except Exception as error:
        if _is_absent(error, module_name):
            raise ConfigError(
                f"{option}={spec!r}: there is no module {module_name!r} (looked on the Python path and in "
                f"{os.getcwd()}). Install it, or start where its file or folder is."
            ) from error
        # Anything may go wrong in a module of the user's; the cause stays attached.
        raise ConfigError(
            f"{option}={spec!r}: importing module {module_name!r} failed with {type(error).__name__}: {error}"
        ) from error


def _import_also_from_here(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        here = os.getcwd()
        if not _is_absent(error, module_name) or here in sys.path:
            raise
    # Last, so that nothing is shadowed; kept once it has served, for imports that the module makes later.
    sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except BaseException:
        sys.path.remove(here)
        raise


def _is_absent(error: Exception, module_name: str) -> bool:
    """Whether `module_name` itself (or a package above it) was not found, rather than something it imports."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return f"{module_name}.".startswith(f"{error.name}.")
