"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens, one value a token.

With r = log p - log p_ref at a token drawn from the policy: k1 = r, k2 = r^2 / 2, k3 = e^(-r) + r - 1.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from preftune.losses.log_ratios import at_least_float32

# e^20 is 4.9e8: such a ratio is trouble already, and its square still fits into float32.
MAX_LOG_RATIO = 20.0


def k1(logps_BT: Float[Tensor, "*shape"], ref_logps_BT: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log p - log p_ref: unbiased, of either sign, with a high variance.

    One fact to check: its mean under the policy is the KL divergence; the mean of its gradient is 0.
    """
    return at_least_float32(logps_BT) - at_least_float32(ref_logps_BT)


def k2(logps_BT: Float[Tensor, "*shape"], ref_logps_BT: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Half the squared log-ratio: at least 0, biased, but its gradient is unbiased.

    One fact to check: the mean under the policy of its gradient is the gradient of the KL divergence.
    """
    return k1(logps_BT, ref_logps_BT).square() / 2


def k3(logps_BT: Float[Tensor, "*shape"], ref_logps_BT: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """p_ref/p - log(p_ref/p) - 1: unbiased, at least 0, low variance (arXiv:2402.03300, eq. 4).

    Constant, without gradient, where p_ref/p is above e^`MAX_LOG_RATIO`, so that no single token overflows.

    One fact to check: its mean under the policy is the KL divergence exactly; 0 where the two agree.
    """
    log_r_BT = (-k1(logps_BT, ref_logps_BT)).clamp(max=MAX_LOG_RATIO)
    # At |log r| < 1e-4, exp(x) - x - 1 in float32 is nothing but rounding.
    return torch.expm1(log_r_BT) - log_r_BT
