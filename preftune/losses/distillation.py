"""How far a student is from a teacher at each token, by their distributions or by the token that was drawn.

S is the student's distribution (with gradient), T the teacher's (a constant). Nothing here knows where they come from:
distributions may be given in chunks of tokens, for no value looks at another token.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from preftune.losses.importance import bounded_exp, log_ratio
from preftune.losses.log_ratios import at_least_float32

# Stands for log 0: a token that is impossible adds 0 instead of NaN.
_LEAST = -1e4
# Of a log-probability of 1 by rounding, whose complement would be log 0.
_ROUNDING = 1e-7


def alpha_divergence(
    student_logps_TV: Float[Tensor, "T V"], teacher_logps_TV: Float[Tensor, "T V"], *, alpha: float
) -> Float[Tensor, " T"]:
    """D_alpha(S, T) of each token, at least 0; half-precision input is computed in float32.

    ```text
    alpha = 0      KL(T || S)
    alpha = 1      KL(S || T)
    between them   (1 - alpha) KL(S || M) + alpha KL(T || M), M = (1 - alpha) S + alpha T
    ```

    Between them it is bounded by log 2 and goes to 0 at both ends, where the limit is not the value.

    Args:
        student_logps_TV, teacher_logps_TV: Log-probabilities over the same V tokens, each summing to 1.

    Raises:
        ValueError: alpha outside [0, 1].

    One fact to check: alpha 1/2 is the Jensen-Shannon divergence: log 2 for distributions that have no token in common.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; wanted a number in [0, 1]")
    S = at_least_float32(student_logps_TV).clamp(min=_LEAST)
    T = at_least_float32(teacher_logps_TV).detach().clamp(min=_LEAST)
    if alpha == 0:
        return _kl(T, S)
    if alpha == 1:
        return _kl(S, T)
    M = torch.logaddexp(S + math.log1p(-alpha), T + math.log(alpha))
    return (1 - alpha) * _kl(S, M) + alpha * _kl(T, M)


def on_support(logps_Tk: Float[Tensor, "T k"], *, add_tail: bool) -> Float[Tensor, "T k_or_more"]:
    """A distribution over k tokens: theirs made to sum to 1, or, with `add_tail`, one more value for all others.

    One fact to check: probabilities 0.3 and 0.2 become 0.6 and 0.4, or 0.3, 0.2 and 0.5.
    """
    logps_Tk = at_least_float32(logps_Tk)
    log_mass_T1 = logps_Tk.logsumexp(-1, keepdim=True)
    if not add_tail:
        return logps_Tk - log_mass_T1
    tail_T1 = torch.log(-torch.expm1(log_mass_T1.clamp(max=-_ROUNDING)))
    return torch.cat([logps_Tk, tail_T1], dim=-1)


def topk_divergence(
    student_logps_Tk: Float[Tensor, "T k"],
    teacher_logps_Tk: Float[Tensor, "T k"],
    *,
    alpha: float,
    add_tail: bool = False,
) -> Float[Tensor, " T"]:
    """D_alpha over the student's k most probable tokens (both given at the same tokens), see `on_support`.

    One fact to check: with k = V it is `alpha_divergence`.
    """
    student, teacher = (on_support(logps, add_tail=add_tail) for logps in (student_logps_Tk, teacher_logps_Tk))
    return alpha_divergence(student, teacher, alpha=alpha)


def sampled_token(
    logps_T: Float[Tensor, "*shape"], teacher_logps_T: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """KL(S || T) from the token that was drawn from S alone: r = log S - log T, with the gradient of sg(r) log S.

    Of either sign. The mean of the value is the divergence, and the mean of the gradient is the divergence's.

    One fact to check: where both agree, value and gradient are exactly 0.
    """
    logps_T = at_least_float32(logps_T)
    r_T = (logps_T - at_least_float32(teacher_logps_T)).detach()
    return r_T * (1 + logps_T - logps_T.detach())


def importance_weight(
    logps_BT: Float[Tensor, "B T"],
    old_logps_BT: Float[Tensor, "B T"] | None,
    mask_BT: Float[Tensor, "B T"],
    *,
    clip: float | None,
) -> Float[Tensor, "B T"]:
    """min(p / p_old, clip) of each token, without gradient: completions are those of an older student.

    1 where `old_logps_BT` or `clip` is None.

    One fact to check: a token twice as probable as when it was drawn weighs 2, or `clip` where that is less.
    """
    if old_logps_BT is None or clip is None:
        return torch.ones_like(mask_BT)
    return bounded_exp(log_ratio(logps_BT.detach(), old_logps_BT, mask_BT)).clamp(max=clip)


def _kl(P: Tensor, Q: Tensor) -> Tensor:
    return (P.exp() * (P - Q)).sum(-1)
