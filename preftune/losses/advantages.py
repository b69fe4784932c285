"""Rewards to advantages: who did better than its siblings, and by how much. All in float64; NaN is "no reward".

A row without a reward gets the advantage 0 and enters no mean and no deviation. Statistics over the batch mean the
whole generation round of all ranks: gather the rewards first.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from preftune.losses.names import REWARD_SCALES, unknown_name

# Sums of the same rewards in another order differ by a few units in the last place; such rewards are equal.
_ROUNDING = 8 * torch.finfo(torch.float64).eps


def combine_rewards(rewards_PGK: Float[Tensor, "P G K"], weights_K: Float[Tensor, " K"]) -> Float[Tensor, "P G"]:
    """The weighted sum over reward functions; NaN where none of them gave a reward.

    Where a function applies to some completions of a group only, the others are counted with its mean over those of
    the group that it does apply to: the function then says nothing for or against them. (Left out of the sum, they
    would compare as if it had given them 0.) A function that applies to none of a group adds nothing to it.

    One fact to check: with rewards 5 and 7 of one function and none for the third sibling, that one counts as 6.
    """
    has_reward_PGK = ~rewards_PGK.isnan()
    filled_PGK = _filled(rewards_PGK.double(), has_reward_PGK)
    weights_K = weights_K.to(filled_PGK)
    total_PG = torch.zeros_like(filled_PGK[..., 0])
    for k, weight in enumerate(weights_K):  # one order of addition for every row: equal rewards stay equal
        total_PG = total_PG + weight * filled_PGK[..., k]
    return total_PG.where(has_reward_PGK.any(-1), torch.nan)


def group_advantages(
    rewards_PG: Float[Tensor, "P G"], *, scale: str = "group", eps: float = 1e-4
) -> Float[Tensor, "P G"]:
    """GRPO: each reward less its group's mean, divided by a standard deviation plus `eps` (arXiv:2402.03300, 4.1.2).

    `scale` says which: "group" (the paper), "batch" (one for all groups, arXiv:2508.08221) or "none" (Dr. GRPO,
    arXiv:2503.20783). Deviations are sample ones, over n - 1. Sums to zero in each group; equal rewards give exactly 0.

    Raises:
        ConfigError: unknown `scale`.

    One fact to check: rewards 0 and 1 give -+0.5 / (sqrt(1/2) + eps).
    """
    if scale not in REWARD_SCALES:
        raise unknown_name("scale_rewards", scale, REWARD_SCALES)
    centred_PG = _centred(rewards_PG)
    if scale == "none":
        return centred_PG
    return _scaled(centred_PG, _deviation(rewards_PG if scale == "group" else rewards_PG.reshape(1, -1)), eps)


def gdpo_advantages(
    rewards_PGK: Float[Tensor, "P G K"], weights_K: Float[Tensor, " K"], *, eps: float = 1e-4
) -> Float[Tensor, "P G"]:
    """GDPO, normalise then sum: every function is scaled in its group before they are added (arXiv:2601.05242).

    A = s / (std_batch(s) + eps), s = sum_k w_k (R_k - mean_group R_k) / (std_group R_k + eps). The mean of s is 0 in
    each group, so none is subtracted again. A function that gives no reward to a row adds 0 to it.

    One fact to check: with one function, the order within a group is that of `group_advantages`.
    """
    weights_K = weights_K.to(rewards_PGK.double())
    total_PG = torch.zeros_like(rewards_PGK[..., 0], dtype=torch.float64)
    for k, weight in enumerate(weights_K):
        total_PG = total_PG + weight * group_advantages(rewards_PGK[..., k], scale="group", eps=eps)
    scored_PG = total_PG.where(~rewards_PGK.isnan().all(-1), torch.nan)
    return _scaled(total_PG, _deviation(scored_PG.reshape(1, -1)), eps)


def leave_one_out(rewards_PG: Float[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """RLOO: each reward less the mean of the group's others (arXiv:2402.14740, eq. 8). Sums to zero in each group.

    Equal to n / (n - 1) times the reward less the mean of all n, which is how it is computed. A group with one reward
    gives 0.

    One fact to check: rewards 1, 2, 6 give 1 - 4, 2 - 3.5, 6 - 1.5.
    """
    count_P1 = (~rewards_PG.isnan()).sum(-1, keepdim=True).double()
    return _centred(rewards_PG) * count_P1 / (count_P1 - 1).clamp(min=1)


def whiten(
    advantages_PG: Float[Tensor, "P G"], scored_PG: Bool[Tensor, "P G"] | None = None, *, eps: float = 1e-4
) -> Float[Tensor, "P G"]:
    """Advantages of the whole round less their mean, over their sample standard deviation plus `eps`.

    `scored_PG` is False where a completion had no reward: it is left out of both and stays 0.

    One fact to check: advantages -3 and 3 give -+3 / (sqrt(18) + eps).
    """
    if scored_PG is not None:
        advantages_PG = advantages_PG.where(scored_PG, torch.nan)
    return group_advantages(advantages_PG.reshape(1, -1), eps=eps).reshape(advantages_PG.shape)


def shaped_rewards(
    rewards_PG: Float[Tensor, "P G"],
    kl_PG: Float[Tensor, "P G"] | None = None,
    *,
    beta: float = 0.0,
    reward_clip_range: tuple[float, float] | list[float] | None = None,
) -> Float[Tensor, "P G"]:
    """RLOO's reward: clipped first, then less beta times the summed k1 = log p_old - log p_ref of the completion.

    NaN stays NaN.

    One fact to check: reward 7 with clip range (-1, 2), KL 3 and beta 0.5 gives 2 - 1.5.
    """
    shaped_PG = rewards_PG.double()
    if reward_clip_range is not None:
        low, high = reward_clip_range
        shaped_PG = shaped_PG.clamp(low, high)
    return shaped_PG if kl_PG is None else shaped_PG - beta * kl_PG.double()


def is_flat(rewards_PG: Float[Tensor, "P G"]) -> Bool[Tensor, " P"]:
    """Groups without signal: at most one reward, or all equal to rounding. Their advantages are exactly 0.

    One fact to check: 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1, which differ in the last place, are equal.
    """
    low_P, high_P = _extremes(rewards_PG.double())
    return high_P - low_P <= _ROUNDING * torch.maximum(low_P.abs(), high_P.abs())


def _extremes(values_PG: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each group; 0 and 0 where there is none."""
    missing_PG = values_PG.isnan()
    low_P = values_PG.masked_fill(missing_PG, torch.inf).amin(-1)
    high_P = values_PG.masked_fill(missing_PG, -torch.inf).amax(-1)
    is_empty_P = missing_PG.all(-1)
    return low_P.masked_fill(is_empty_P, 0), high_P.masked_fill(is_empty_P, 0)


def _centred(values_PG: Tensor) -> Tensor:
    """Values less their group's mean; 0 where missing, and all over a flat group.

    Distances from the smallest value are exact where the offset is large beside the differences; their mean is not
    blurred by it.
    """
    values_PG = values_PG.double()
    has_value_PG = ~values_PG.isnan()
    low_P, _ = _extremes(values_PG)
    above_low_PG = (values_PG - low_P[:, None]).where(has_value_PG, 0.0)
    count_P1 = has_value_PG.sum(-1, keepdim=True).clamp(min=1)
    centred_PG = above_low_PG - above_low_PG.sum(-1, keepdim=True) / count_P1
    return centred_PG.where(has_value_PG & ~is_flat(values_PG)[:, None], 0.0)


def _deviation(values_PG: Tensor) -> Tensor:
    """`[P, 1]` sample standard deviation of each group over n - 1; 0 with fewer than two values."""
    count_P1 = (~values_PG.isnan()).sum(-1, keepdim=True)
    return (_centred(values_PG).square().sum(-1, keepdim=True) / (count_P1 - 1).clamp(min=1)).sqrt()


def _scaled(centred_PG: Tensor, deviation_P1: Tensor, eps: float) -> Tensor:
    """Divided by deviation + eps; what has no deviation is 0 already, also with eps 0."""
    return centred_PG / (deviation_P1 + eps).where(deviation_P1 > 0, 1.0)


def _filled(values_PGK: Tensor, has_value_PGK: Tensor) -> Tensor:
    """Missing values become the mean of their function over the group; 0 where it has none in the group."""
    flat_QG = values_PGK.movedim(-1, 1).flatten(0, 1)
    low_Q, _ = _extremes(flat_QG)
    count_Q = (~flat_QG.isnan()).sum(-1).clamp(min=1)
    mean_Q = low_Q + (flat_QG - low_Q[:, None]).nan_to_num(nan=0.0).sum(-1) / count_Q
    mean_PK = mean_Q.unflatten(0, (values_PGK.shape[0], values_PGK.shape[2]))
    return values_PGK.where(has_value_PGK, mean_PK[:, None, :])
