"""The checks that a config makes when it is built: what is refused, what the message says, and that no torch is loaded.

Every refusal names the option, the value and a way out.
"""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from preftune.errors import ConfigError
from preftune.losses.names import (
    PAIR_HYPER,
    PAIR_LOSS_NAMES,
    TOKEN_LOSS_NAMES,
    check_token_loss,
    is_import_path,
    validate_pair_losses,
)


def my_loss(policy, ref, *, beta, **_):
    raise AssertionError("only named here")


def test_defaults_are_fine_for_every_loss_alone():
    for name in PAIR_LOSS_NAMES:
        eps = 1e-3 if name == "exo_pair" else 0.0
        assert validate_pair_losses(name, label_smoothing=eps) == ([name], [1.0])


def test_names_become_a_list_with_weights():
    assert validate_pair_losses(["sigmoid", "sft"], [0.8, 1]) == (["sigmoid", "sft"], [0.8, 1.0])
    assert validate_pair_losses([my_loss, "pkg.mod:loss"]) == ([my_loss, "pkg.mod:loss"], [1.0, 1.0])
    assert validate_pair_losses(my_loss)[0] == [my_loss]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"names": "sigmod"}, ["loss_type='sigmod'", "Did you mean 'sigmoid'?", "'aot_unpaired'"]),
        ({"names": "IPO"}, ["Did you mean 'ipo'?"]),
        ({"names": ["sigmoid", "zzz"]}, ["loss_type='zzz'", "package.module:function"]),
        ({"names": []}, ["loss_type is empty"]),
        ({"names": [3]}, ["got 3 of type int"]),
        ({"names": "my_module:"}, ["my_module:"]),
        ({"weights": [1.0, 2.0]}, ["loss_weights has 2 values, loss_type has 1"]),
        ({"weights": [float("nan")]}, ["loss_weights", "nan"]),
        ({"weights": [-1.0]}, ["loss_weights", "-1.0"]),
        ({"beta": 0.0}, ["beta must be above 0", "0.0"]),
        ({"beta": float("inf")}, ["beta must be a finite number"]),
        ({"beta": "0.1"}, ["beta must be a finite number; got '0.1'"]),
        ({"label_smoothing": 1.5}, ["label_smoothing", "[0, 1]", "1.5"]),
        ({"names": "exo_pair"}, ["'exo_pair'", "(0, 1)", "got 0.0"]),
        ({"names": ["sft", "exo_pair"], "label_smoothing": 1.0}, ["'exo_pair'", "got 1.0"]),
        ({"names": "robust", "label_smoothing": 0.5}, ["'robust'", "[0, 0.5)", "got 0.5"]),
        ({"names": "robust", "label_smoothing": -0.1}, ["label_smoothing", "got -0.1"]),
        ({"names": "hinge", "label_smoothing": 0.1}, ["would change nothing", "['hinge']", "'sigmoid'"]),
        ({"f_divergence_type": "forwardkl"}, ["f_divergence_type='forwardkl'", "Did you mean 'forward_kl'?"]),
        ({"names": my_loss, "f_divergence_type": "kl"}, ["f_divergence_type='kl'", "'js_divergence'"]),
        ({"names": "apo_zero", "f_divergence_type": "forward_kl"}, ["'apo_zero'", "'forward_kl'", "'sigmoid'"]),
        ({"names": ["sigmoid", "aot"], "f_divergence_type": "js_divergence"}, ["'aot'", "'js_divergence'"]),
        ({"names": "sft", "f_divergence_type": "js_divergence"}, ["would change nothing", "no reference"]),
        ({"f_alpha_divergence_coef": float("nan")}, ["f_alpha_divergence_coef must be a finite number"]),
        ({"discopop_tau": 0.0}, ["discopop_tau must be above 0"]),
        ({"ld_alpha": 1.01}, ["ld_alpha must be None or in [0, 1]", "1.01"]),
        ({"ld_alpha": -0.1}, ["ld_alpha"]),
        ({"names": "aot", "use_weighting": True}, ["use_weighting=True", "'aot'"]),
        ({"names": ["sigmoid", "aot_unpaired"], "use_weighting": True}, ["use_weighting=True", "'aot_unpaired'"]),
    ],
)
def test_refused(given, said):
    with pytest.raises(ConfigError) as refusal:
        validate_pair_losses(**{"names": "sigmoid", **given})
    for part in said:
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    "given",
    [
        {"names": "sigmoid", "label_smoothing": 0.9},
        {"names": ["hinge", "sigmoid"], "label_smoothing": 0.1},
        {"names": "robust", "label_smoothing": 0.49},
        {"names": ["sigmoid", "sft"], "f_divergence_type": "forward_kl", "use_weighting": True, "ld_alpha": 0.0},
        {"names": ["hinge", my_loss], "label_smoothing": 0.1},
        {"names": "sft", "beta": 0.0},
        {"names": "sigmoid", "ld_alpha": 1, "weights": [0]},
        {"names": "sigmoid", "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    ],
)
def test_accepted(given):
    validate_pair_losses(**given)


def test_token_losses():
    for name in TOKEN_LOSS_NAMES:
        check_token_loss(name)
    with pytest.raises(ConfigError, match="Did you mean 'nll'"):
        check_token_loss("NLL")
    with pytest.raises(ConfigError, match="Allowed: 'nll', 'dft'"):
        check_token_loss("sigmoid")


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("a:b", True),
        ("a.b_1.c:d.e", True),
        ("a:", False),
        (":b", False),
        ("a", False),
        ("a b:c", False),
        ("C:/x", False),
    ],
)
def test_import_path_form(name, fits):
    assert is_import_path(name) is fits


def test_loads_no_torch():
    code = "import sys, preftune.losses.names, preftune.losses.importing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_offered_is_what_is_checked():
    """Every keyword offered to a loss is an argument of the check, under the same name."""
    assert set(PAIR_HYPER) <= set(inspect.signature(validate_pair_losses).parameters)
