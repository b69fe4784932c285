"""Scores g(r) of a log-ratio r = log(policy / ref) under the four f-divergences of f-DPO (arXiv:2309.16240).

g(r) is f'(e^r) shifted to g(0) = 0; the shift cancels between chosen and rejected. Every g rises with r.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from preftune.losses.names import DIVERGENCES, unknown_name

# e^80 is 5.5e34; float32 ends at 3.4e38.
MAX_EXPONENT = 80.0


def f_score(
    log_ratio_B: Float[Tensor, " B"],
    *,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    max_exponent: float = MAX_EXPONENT,
) -> Float[Tensor, " B"]:
    """Score of a log-ratio under a divergence; half-precision input is computed in float32.

    ```text
    reverse_kl         r
    forward_kl         1 - e^(-r)
    js_divergence      log 2 + log sigmoid(r)
    alpha_divergence   (e^((a-1) r) - 1) / (a - 1), a = f_alpha_divergence_coef; r where |a - 1| < 1e-6
    ```

    The paper's alpha is 1 - a. Exponents end at `max_exponent`: beyond it the score is constant, its gradient zero.

    Raises:
        ConfigError: unknown `f_divergence_type`.

    One fact to check: a = 0 is forward KL and a -> 1 is reverse KL, to the last digit (`expm1` loses none).
    """
    r_B = log_ratio_B.to(torch.promote_types(log_ratio_B.dtype, torch.float32))
    if f_divergence_type == "reverse_kl":
        return r_B
    if f_divergence_type == "forward_kl":
        return -torch.expm1((-r_B).clamp(max=max_exponent))
    if f_divergence_type == "js_divergence":
        return math.log(2) + torch.nn.functional.logsigmoid(r_B)
    if f_divergence_type == "alpha_divergence":
        return _alpha_score(r_B, f_alpha_divergence_coef - 1, max_exponent)
    raise unknown_name("f_divergence_type", f_divergence_type, DIVERGENCES)


def _alpha_score(r_B: Tensor, slope: float, max_exponent: float) -> Tensor:
    if abs(slope) < 1e-6:
        return r_B
    return torch.expm1((slope * r_B).clamp(max=max_exponent)) / slope
