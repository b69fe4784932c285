"""Names of the losses and the checks that need no tensor: which values and combinations make sense.

Loads no torch, so that a config fails when it is built; the functions themselves are in `preference` and `supervised`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from preftune.errors import ConfigError

PAIR_LOSS_NAMES: tuple[str, ...] = (
    "sigmoid",
    "hinge",
    "ipo",
    "sigmoid_norm",
    "exo_pair",
    "robust",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
)
TOKEN_LOSS_NAMES: tuple[str, ...] = ("nll", "dft")
UNPAIRED_LOSS_NAMES: tuple[str, ...] = ("kto", "apo_zero_unpaired")
POLICY_LOSS_NAMES: tuple[str, ...] = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
IMPORTANCE_LEVELS: tuple[str, ...] = ("token", "sequence")
REWARD_SCALES: tuple[str, ...] = ("group", "batch", "none")
REWARD_AGGREGATIONS: tuple[str, ...] = ("sum_then_normalize", "normalize_then_sum")
SAMPLER_CORRECTIONS: tuple[str, ...] = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
DISTILLATION_MODES: tuple[str, ...] = ("full_logits", "topk_logits", "sampled_token")
TEACHER_KINDS: tuple[str, ...] = ("live", "base", "ema")
DIVERGENCES: tuple[str, ...] = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")

# What every pair loss is offered by keyword.
PAIR_HYPER: tuple[str, ...] = (
    "beta",
    "label_smoothing",
    "f_divergence_type",
    "f_alpha_divergence_coef",
    "discopop_tau",
)

# Row values depend on the other rows of the batch, through their ranks.
BATCH_COUPLED: frozenset[str] = frozenset({"aot", "aot_unpaired"})
# Defined on plain log-ratios: these refuse a divergence other than reverse KL.
IGNORES_F_DIVERGENCE: frozenset[str] = BATCH_COUPLED | {"nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down"}
USES_LABEL_SMOOTHING: frozenset[str] = BATCH_COUPLED | {"sigmoid", "exo_pair", "robust"}
# Rewards are measured from a baseline, the KL estimate of mismatched completions.
NEEDS_BASELINE: frozenset[str] = frozenset({"kto"})
# `sft` looks at the chosen completion under the policy alone.
REFERENCE_FREE: frozenset[str] = frozenset({"sft"})

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_import_path(name: str) -> bool:
    """Whether `name` has the form "package.module:function"; says nothing of whether it can be imported."""
    return _IMPORT_PATH.fullmatch(name) is not None


def unknown_name(option: str, given: Any, allowed: Sequence[str], also: str = "") -> ConfigError:
    """The error for a name that is not in `allowed`: says what was given, the nearest name and all allowed ones."""
    near = difflib.get_close_matches(str(given).lower(), allowed, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{option}={given!r} is not known.{hint} Allowed: {', '.join(map(repr, allowed))}{also}.")


def check_pair_loss_name(name: str) -> None:
    """Accepts a built-in name and the form "package.module:function".

    Raises:
        ConfigError: anything else, with the nearest name.
    """
    if name not in PAIR_LOSS_NAMES and not is_import_path(name):
        raise unknown_name("loss_type", name, PAIR_LOSS_NAMES, ', or your own function as "package.module:function"')


def check_token_loss(name: str) -> None:
    """Accepts `nll` and `dft`.

    Raises:
        ConfigError: anything else, with the nearest name.
    """
    if name not in TOKEN_LOSS_NAMES:
        raise unknown_name("loss_type", name, TOKEN_LOSS_NAMES)


def check_label_smoothing(loss: str, label_smoothing: float) -> None:
    """Label smoothing is the share of flipped labels assumed: [0, 1]; exo_pair (0, 1); robust [0, 0.5).

    Raises:
        ConfigError: outside the range of `loss`, where its formula has a pole or changes sign.
    """
    if loss == "exo_pair":
        fits, wanted = 0 < label_smoothing < 1, "in (0, 1), for example 1e-3: its formula has log(label_smoothing)"
    elif loss == "robust":
        fits, wanted = 0 <= label_smoothing < 0.5, "in [0, 0.5): its formula divides by 1 - 2 * label_smoothing"
    else:
        fits, wanted = 0 <= label_smoothing <= 1, "in [0, 1]"
    if not fits:
        raise ConfigError(f"loss {loss!r} takes label_smoothing {wanted}; got {label_smoothing!r}.")


def check_divergence(loss: str, f_divergence_type: str) -> None:
    """The divergence exists, and `loss` makes use of it (or it is the default, reverse KL).

    Raises:
        ConfigError: unknown divergence, or one that `loss` would ignore.
    """
    if f_divergence_type not in DIVERGENCES:
        raise unknown_name("f_divergence_type", f_divergence_type, DIVERGENCES)
    if f_divergence_type != "reverse_kl" and loss in IGNORES_F_DIVERGENCE:
        takes = [n for n in PAIR_LOSS_NAMES if n not in IGNORES_F_DIVERGENCE and n not in REFERENCE_FREE]
        raise ConfigError(
            f"loss {loss!r} is defined on plain log-ratios and would ignore f_divergence_type={f_divergence_type!r}; "
            f"use 'reverse_kl', or one of {', '.join(map(repr, takes))}."
        )


def validate_pair_losses(
    names: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
    weights: Sequence[float] | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
) -> tuple[list[str | Callable[..., Any]], list[float]]:
    """Checks a choice of pair losses and everything they are offered, before any model exists.

    A function of the user's own (callable or import path) is taken to use whatever is set; it is imported later, by
    `preference.resolve_pair_loss`.

    Returns:
        The names as a list, and one weight for each (1.0 where `weights` is None).

    Raises:
        ConfigError: unknown name, wrong value, or an option that nothing in `names` would use; with allowed values.
    """
    chosen = _as_list(names)
    builtin = [name for name in chosen if isinstance(name, str) and name in PAIR_LOSS_NAMES]
    _check_numbers(beta, label_smoothing, f_alpha_divergence_coef, discopop_tau, ld_alpha)
    if beta <= 0 and any(name not in REFERENCE_FREE for name in builtin):
        raise ConfigError(f"beta must be above 0 (0.1 is usual); got {beta!r}.")
    for name in builtin or ["a loss of your own"]:
        check_divergence(name, f_divergence_type)
        if name in USES_LABEL_SMOOTHING:
            check_label_smoothing(name, label_smoothing)
    if len(builtin) == len(chosen):
        _refuse_unused(builtin, label_smoothing, f_divergence_type)
    coupled = [name for name in builtin if name in BATCH_COUPLED]
    if use_weighting and coupled:
        raise ConfigError(
            f"use_weighting=True (WPO) weighs single pairs, but loss {coupled[0]!r} matches completions of different "
            "pairs; set use_weighting=False or choose another loss."
        )
    return chosen, _checked_weights(weights, chosen)


def _as_list(names: str | Callable[..., Any] | Sequence[str | Callable[..., Any]]) -> list[str | Callable[..., Any]]:
    chosen = [names] if isinstance(names, str) or callable(names) else list(names)
    if not chosen:
        raise ConfigError(f"loss_type is empty; name at least one of {', '.join(map(repr, PAIR_LOSS_NAMES))}.")
    for name in chosen:
        if isinstance(name, str):
            check_pair_loss_name(name)
        elif not callable(name):
            raise ConfigError(f"loss_type takes names or functions; got {name!r} of type {type(name).__name__}.")
    return chosen


def _check_numbers(
    beta: float, label_smoothing: float, f_alpha_divergence_coef: float, discopop_tau: float, ld_alpha: float | None
) -> None:
    given = {
        "beta": beta,
        "label_smoothing": label_smoothing,
        "f_alpha_divergence_coef": f_alpha_divergence_coef,
        "discopop_tau": discopop_tau,
    }
    for option, value in given.items():
        if not _is_finite(value):
            raise ConfigError(f"{option} must be a finite number; got {value!r}.")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing is a probability, in [0, 1]; got {label_smoothing!r}.")
    if discopop_tau <= 0:
        raise ConfigError(f"discopop_tau must be above 0 (0.05 in the paper); got {discopop_tau!r}.")
    if ld_alpha is not None and not (_is_finite(ld_alpha) and 0 <= ld_alpha <= 1):
        raise ConfigError(f"ld_alpha must be None or in [0, 1] (1 is plain DPO); got {ld_alpha!r}.")


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_unused(builtin: list[str], label_smoothing: float, f_divergence_type: str) -> None:
    if label_smoothing and not USES_LABEL_SMOOTHING.intersection(builtin):
        uses = [name for name in PAIR_LOSS_NAMES if name in USES_LABEL_SMOOTHING]
        raise ConfigError(
            f"label_smoothing={label_smoothing!r} would change nothing: loss_type={builtin!r} does not use it. "
            f"Set it to 0, or use one of {', '.join(map(repr, uses))}."
        )
    if f_divergence_type != "reverse_kl" and REFERENCE_FREE.issuperset(builtin):
        raise ConfigError(
            f"f_divergence_type={f_divergence_type!r} would change nothing: loss_type={builtin!r} has no reference. "
            "Leave it at 'reverse_kl', or add a loss that compares with the reference, such as 'sigmoid'."
        )


def _checked_weights(weights: Sequence[float] | None, chosen: Sequence[Any]) -> list[float]:
    if weights is None:
        return [1.0] * len(chosen)
    if len(weights) != len(chosen):
        raise ConfigError(
            f"loss_weights has {len(weights)} values, loss_type has {len(chosen)} names; give one weight a loss, "
            "or None for 1.0 each."
        )
    for weight in weights:
        if not _is_finite(weight) or weight < 0:
            raise ConfigError(f"loss_weights must be finite and at least 0; got {weight!r} in {list(weights)!r}.")
    return [float(weight) for weight in weights]
