"""Averages of weights: the exponential moving average and its bias-corrected form, as pure formulas.

Nothing here knows a model, a step counter or a schedule; what calls it says when and where the result goes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def ema(average: Float[Tensor, "*n"], value: Float[Tensor, "*n"], weight: float) -> Float[Tensor, "*n"]:
    """(1 - weight) * average + weight * value.

    Exact at both ends: weight 0 gives the bits of `average`, weight 1 those of `value`.
    """
    return torch.lerp(average, value, weight)


def bema(
    average: Float[Tensor, "*n"], theta: Float[Tensor, "*n"], theta_0: Float[Tensor, "*n"], alpha: float
) -> Float[Tensor, "*n"]:
    """BEMA (arXiv:2508.00180): average + alpha * (theta - theta_0).

    The moving average lags behind by a bias towards the start; this puts a share `alpha` of the way gone back on.
    """
    return torch.add(average, theta - theta_0, alpha=alpha)


def ema_weight(step: int, *, power: float, lag: float, multiplier: float, minimum: float = 0.0) -> float:
    """beta_t = max((lag + multiplier * t) ^ -power, minimum), the weight of the newest value at optimizer step t.

    In (0, 1] while `lag + multiplier * t` is at least 1. Power 0 gives 1: the average is then the newest value.
    """
    return max((lag + multiplier * step) ** -power, minimum)


def bias_weight(step: int, *, power: float, lag: float, multiplier: float) -> float:
    """alpha_t = (lag + multiplier * t) ^ -power, the share of bias correction at optimizer step t.

    Power 0 gives 1, the full correction for ever; a large power comes near 0, the plain moving average. A negative
    power, for which the formula would grow without bound, is the switch: no correction, 0.
    """
    return (lag + multiplier * step) ** -power if power >= 0 else 0.0
