"""What the pair losses are made of: log-ratios and their scores, the smoothed logistic loss, partners by rank.

Computed in float32 at least; float64 stays. None of these reduces over the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from preftune.losses.divergence import MAX_EXPONENT, f_score
from preftune.losses.names import check_divergence
from preftune.types import PairScores


def at_least_float32(values_B: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Half precision becomes float32; float32 and float64 stay."""
    return values_B.to(torch.promote_types(values_B.dtype, torch.float32))


def require_reference(ref: PairScores | None) -> PairScores:
    """`ref` itself.

    Raises:
        ValueError: it is None.
    """
    if ref is None:
        raise ValueError("this loss compares with a reference, but ref is None; of the built-in losses only 'sft' can")
    return ref


def log_ratios(policy: PairScores, ref: PairScores | None) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """r = l - l_ref of the chosen and the rejected completions, in nats.

    Raises:
        ValueError: no reference.
    """
    ref = require_reference(ref)
    chosen_B = at_least_float32(policy.chosen_logps) - at_least_float32(ref.chosen_logps)
    rejected_B = at_least_float32(policy.rejected_logps) - at_least_float32(ref.rejected_logps)
    return chosen_B, rejected_B


def scores(
    policy: PairScores,
    ref: PairScores | None,
    *,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    max_exponent: float = MAX_EXPONENT,
    **_: Any,
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """g = `f_score(r)` of the chosen and the rejected completions; further keywords are ignored.

    Raises:
        ConfigError: unknown divergence. ValueError: no reference.
    """
    chosen_B, rejected_B = (
        f_score(
            log_ratio_B,
            f_divergence_type=f_divergence_type,
            f_alpha_divergence_coef=f_alpha_divergence_coef,
            max_exponent=max_exponent,
        )
        for log_ratio_B in log_ratios(policy, ref)
    )
    return chosen_B, rejected_B


def score_gap(policy: PairScores, ref: PairScores | None, **divergence: Any) -> Float[Tensor, " B"]:
    """d = g_c - g_rj, DPO's margin before beta; keywords and errors as `scores`."""
    chosen_B, rejected_B = scores(policy, ref, **divergence)
    return chosen_B - rejected_B


def rewards(
    loss: str, policy: PairScores, ref: PairScores | None, beta: float, f_divergence_type: str
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """beta r of both completions, for a loss that is defined on nothing else.

    Raises:
        ConfigError: `loss` would ignore the divergence. ValueError: no reference.
    """
    check_divergence(loss, f_divergence_type)
    chosen_B, rejected_B = log_ratios(policy, ref)
    return beta * chosen_B, beta * rejected_B


def smoothed_logistic(z_B: Float[Tensor, " B"], label_smoothing: float) -> Float[Tensor, " B"]:
    """-(1 - eps) log s(z) - eps log s(-z).

    One fact to check: the same at -z under 1 - eps.
    """
    return -(1 - label_smoothing) * logsigmoid(z_B) - label_smoothing * logsigmoid(-z_B)


def partner_by_rank(values_B: Float[Tensor, " B"], others_B: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """For each of `values_B`, the one of `others_B` that has the same rank in its own batch.

    One fact to check: values 5 1 3 with others 20 30 10 have partners 30 10 20.
    """
    rank_B = values_B.argsort(stable=True).argsort(stable=True)
    return others_B.sort().values[rank_B]
