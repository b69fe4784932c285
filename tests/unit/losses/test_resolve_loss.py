"""Losses by name, by import path and as callables; every way in which an import can fail says what is wrong.

Modules are written into a temporary current folder, which is not on the Python path.
"""

from __future__ import annotations

import math
import sys
from functools import partial

import pytest

from preftune.errors import ConfigError
from preftune.losses.importing import import_callable
from preftune.losses.preference import PAIR_LOSSES, resolve_pair_loss
from preftune.types import LossOutput

MODULE = """
from preftune.types import LossOutput
CONSTANT = 3
class Losses:
    @staticmethod
    def nested(policy, ref, *, beta, **_):
        return LossOutput(policy.chosen_logps)
def narrow(policy, ref, *, beta):
    return LossOutput(policy.chosen_logps)
def wide(policy, ref, *, beta, **_):
    return LossOutput(beta * policy.chosen_logps)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with modules of a user; what they leave in `sys` is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    before = set(sys.modules)
    (tmp_path / "users_losses.py").write_text(MODULE)
    (tmp_path / "users_broken.py").write_text("import no_such_library_xyz\n")
    (tmp_path / "users_raising.py").write_text("raise RuntimeError('at import')\n")
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "__init__.py").write_text("")
    (tmp_path / "users_package" / "inner.py").write_text(MODULE)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


def test_names_and_callables():
    for name, function in PAIR_LOSSES.items():
        assert resolve_pair_loss(name) is function

    def own(policy, ref, *, beta, **_):
        return LossOutput(policy.chosen_logps)

    assert resolve_pair_loss(own) is own
    bound = partial(own, beta=2.0)
    assert resolve_pair_loss(bound) is bound


def test_import_callable_takes_any_option():
    assert import_callable("math:hypot", option="reward_funcs") is math.hypot


def test_found_in_the_current_folder(here):
    assert resolve_pair_loss("users_losses:wide").__name__ == "wide"
    assert resolve_pair_loss("users_losses:Losses.nested").__name__ == "nested"
    assert resolve_pair_loss("users_package.inner:wide").__module__ == "users_package.inner"
    assert sys.path[-1] == str(here)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("users_absent:wide", ["no module 'users_absent'", "Python path"]),
        ("users_package.absent:wide", ["no module 'users_package.absent'"]),
        ("users_losses:wyde", ["no 'wyde'", "Did you mean 'wide'?"]),
        ("users_losses:CONSTANT", ["is a int, not a function"]),
        ("users_broken:wide", ["importing module 'users_broken' failed", "no_such_library_xyz"]),
        ("users_raising:wide", ["'users_raising' failed with RuntimeError: at import"]),
        ("users_losses:narrow", ["narrow", "label_smoothing", "**_"]),
        ("sigmod", ["Did you mean 'sigmoid'?"]),
        ("users losses:wide", ["is not known"]),
    ],
)
def test_failures_are_named(here, spec, said):
    with pytest.raises(ConfigError) as failure:
        resolve_pair_loss(spec)
    for part in said:
        assert part in str(failure.value)


def test_a_failed_import_leaves_the_path_alone(here):
    before = list(sys.path)
    with pytest.raises(ConfigError):
        resolve_pair_loss("users_absent:wide")
    assert sys.path == before


def test_no_function_at_all():
    with pytest.raises(ConfigError, match="got 3 of type int"):
        resolve_pair_loss(3)  # pyright: ignore[reportArgumentType]
