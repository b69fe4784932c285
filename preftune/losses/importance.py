"""Importance ratios: of the policy to the policy that sampled, and of that one to the engine that drew the tokens.

Log-ratios are 0 outside the mask and end at +-`MAX_LOG_RATIO`, so that no ratio, and no gradient of one, overflows.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from preftune.losses.kl import MAX_LOG_RATIO
from preftune.losses.log_ratios import at_least_float32
from preftune.losses.names import IMPORTANCE_LEVELS, SAMPLER_CORRECTIONS, unknown_name


def log_ratio(
    logps_BT: Float[Tensor, "B T"], old_logps_BT: Float[Tensor, "B T"] | None, mask_BT: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """log p - log p_old of each scored token, 0 elsewhere; not bounded yet.

    `old_logps_BT` None says that nothing was learnt since sampling: p_old is p itself, without gradient, and every
    ratio is exactly 1.

    One fact to check: with None the values are 0 and the gradient of their sum is the mask.
    """
    logps_BT = at_least_float32(logps_BT)
    old_logps_BT = logps_BT.detach() if old_logps_BT is None else at_least_float32(old_logps_BT).detach()
    return (logps_BT - old_logps_BT).where(mask_BT > 0, 0.0)


def masked_mean(values_BT: Float[Tensor, "B T"], mask_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B 1"]:
    """Mean over the scored tokens of each row; 0 for a row without any."""
    is_scored_BT = mask_BT > 0
    return values_BT.where(is_scored_BT, 0.0).sum(-1, keepdim=True) / is_scored_BT.sum(-1, keepdim=True).clamp(min=1)


def as_columns(advantages: Float[Tensor, "*shape"], logps_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B X"]:
    """Advantages as they stand beside `[B, T]`: a column where there is one a row, `[B, T]` as given; constants."""
    advantages = advantages.detach().to(torch.promote_types(logps_BT.dtype, torch.float32))
    return advantages[:, None] if advantages.ndim == 1 else advantages


def ratio(
    log_ratio_BT: Float[Tensor, "B T"], mask_BT: Float[Tensor, "B T"], level: str
) -> Float[Tensor, "B T"] | Float[Tensor, "B 1"]:
    """p / p_old: of each token, or `[B, 1]` of each sequence as the geometric mean over its tokens (arXiv:2507.18071).

    Raises:
        ConfigError: a level other than "token" and "sequence".

    One fact to check: for completions of one token both levels agree.
    """
    if level not in IMPORTANCE_LEVELS:
        raise unknown_name("importance_sampling_level", level, IMPORTANCE_LEVELS)
    if level == "sequence":
        log_ratio_BT = masked_mean(log_ratio_BT, mask_BT)
    return bounded_exp(log_ratio_BT)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """e^x with x held within +-`MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sampler_gap(
    old_logps_BT: Float[Tensor, "B T"], sampler_logps_BT: Float[Tensor, "B T"], mask_BT: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """log p_old (as the trainer computes it) less the engine's log-probability of the same token.

    0 outside the mask and where the engine gave none (NaN).
    """
    gap_BT = at_least_float32(old_logps_BT).detach() - at_least_float32(sampler_logps_BT).detach()
    return gap_BT.where((mask_BT > 0) & ~gap_BT.isnan(), 0.0)


def sampler_ratio(
    gap_BT: Float[Tensor, "B T"], *, mode: str, clip_min: float | None = None, clip_max: float | None = None
) -> Float[Tensor, "B T"] | Float[Tensor, "B 1"]:
    """What corrects the loss for an engine that samples from slightly other probabilities than the trainer's.

    `token_*`: e^gap of each token; `sequence_*`: e^(sum of gaps), `[B, 1]`. `*_truncate` holds it within the bounds,
    `*_mask` makes it 0 outside of them. The sum grows with length: for long completions widen the bounds or use a token
    mode, and watch the share of zeros.

    Raises:
        ConfigError: unknown mode.

    One fact to check: equal log-probabilities give 1 in every mode.
    """
    if mode not in SAMPLER_CORRECTIONS:
        raise unknown_name("vllm_importance_sampling_mode", mode, SAMPLER_CORRECTIONS)
    level, _, treatment = mode.partition("_")
    ratio_BX = bounded_exp(gap_BT if level == "token" else gap_BT.sum(-1, keepdim=True))
    if treatment == "truncate":
        return ratio_BX if clip_min is None and clip_max is None else ratio_BX.clamp(clip_min, clip_max)
    low, high = 0.0 if clip_min is None else clip_min, torch.inf if clip_max is None else clip_max
    return ratio_BX.where((ratio_BX >= low) & (ratio_BX <= high), 0.0)


def off_policy_keep(
    logps_BT: Float[Tensor, "B T"],
    sampler_logps_BT: Float[Tensor, "B T"],
    advantages_B: Float[Tensor, " B"],
    mask_BT: Float[Tensor, "B T"],
    *,
    threshold: float,
) -> Bool[Tensor, "B X"]:
    """Rows that stay in the loss: all but those with a negative advantage that the policy has moved far away from.

    Far: the mean over tokens of log p_sampler - log p is above `threshold` (DeepSeek-V3.2, arXiv:2512.02556, eq. 9).
    `sampler_logps_BT` are the engine's where there are any, else the old policy's. NaN counts as no distance.

    One fact to check: a row with advantage 0 or more always stays.
    """
    distance_BT = -sampler_gap(logps_BT, sampler_logps_BT, mask_BT)
    return (as_columns(advantages_B, logps_BT) >= 0) | (masked_mean(distance_BT, mask_BT) <= threshold)
