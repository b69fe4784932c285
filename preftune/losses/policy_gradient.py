"""Losses of online training, a plain function each, and `POLICY_LOSSES` that names them: per token, not reduced.

In the equations l is a token's log-probability, A the advantage, w the ratio p / p_old (`importance.ratio`), sg a
stop-gradient. Metrics are `[B, T]` (to be averaged over scored tokens) or `[B]` (over rows); a name that ends in `_min`
or `_max` asks for that extreme over rows. How a loss is averaged is the other half of its name: `aggregate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from preftune.losses.importance import as_columns, bounded_exp, log_ratio, masked_mean, ratio
from preftune.losses.kl import MAX_LOG_RATIO, k3
from preftune.losses.log_ratios import at_least_float32
from preftune.losses.names import POLICY_LOSS_NAMES, unknown_name
from preftune.types import LossOutput

# (SurrogateInputs, **hyper) -> LossOutput with `[B, T]` losses.
PolicyLoss = Callable[..., LossOutput]

# ScaleRL (arXiv:2510.13786) finds 4 to 8 alike; the ratio's cap itself, not a distance from 1.
CISPO_CAP = 5.0
# VESPO's floor of a ratio.
_LEAST_RATIO = 1e-8


@dataclass(frozen=True)
class SurrogateInputs:
    """What every surrogate is made of.

    Attributes:
        logps_BT: l in float32 or more, with gradient.
        log_w_BT: log of each token's ratio, 0 outside the mask; not bounded yet.
        A: `[B, 1]` or `[B, T]` advantages, constants.
        mask_BT: 1 at tokens that count.
        level: "token" or "sequence": whose ratio `w` is.
    """

    logps_BT: Tensor
    log_w_BT: Tensor
    A: Tensor
    mask_BT: Tensor
    level: str

    @cached_property
    def w(self) -> Tensor:
        """`[B, T]`, or `[B, 1]` at level "sequence"."""
        return ratio(self.log_w_BT, self.mask_BT, self.level)


def clipped(
    given: SurrogateInputs,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    **_: Any,
) -> LossOutput:
    """-min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A): PPO's surrogate as in GRPO (arXiv:2402.03300, eq. 3).

    `epsilon_high` is `epsilon` where not given (DAPO sets it apart, arXiv:2503.20783 keeps one). With `delta`, w itself
    is capped by it, which also bounds the loss of tokens with A < 0 (two-sided clip, arXiv:2505.07291). With level
    "sequence" it is GSPO's (arXiv:2507.18071).

    One fact to check: on-policy the value is -A and the gradient -A times that of l, whatever the bounds.
    """
    loss, metrics = _clip(given.w, given.A, given.mask_BT, epsilon, epsilon_high, delta)
    return LossOutput(_scored(loss, given.mask_BT), metrics)


def cispo(
    given: SurrogateInputs,
    *,
    epsilon_high: float | None = None,
    **_: Any,
) -> LossOutput:
    """-sg(min(w, epsilon_high)) A l: REINFORCE with a capped weight, every token learns (arXiv:2506.13585, eq. 4).

    `epsilon_high` is the cap itself, `CISPO_CAP` where not given. Below 1 it would shrink every update.

    One fact to check: on-policy the gradient is -A times that of l.
    """
    cap = CISPO_CAP if epsilon_high is None else epsilon_high
    w, A, mask_BT = given.w.detach(), given.A, given.mask_BT
    loss_BT = -w.clamp(max=cap) * A * given.logps_BT
    is_capped = ((w > cap) & (A > 0)).float()
    return LossOutput(_scored(loss_BT, mask_BT), {"cispo_clip_ratio": _per_token_or_row(is_capped, mask_BT)})


def sapo(
    given: SurrogateInputs,
    *,
    sapo_temperature_neg: float = 1.05,
    sapo_temperature_pos: float = 1.0,
    **_: Any,
) -> LossOutput:
    """-(4 / tau) sigmoid(tau (w - 1)) A: a soft gate in place of the clip (arXiv:2511.20347).

    tau is `sapo_temperature_pos` where A > 0 and `sapo_temperature_neg` elsewhere; larger closes faster.

    One fact to check: on-policy the value is -2 A / tau and the gradient -A times that of l.
    """
    A = given.A
    tau = torch.full_like(A, sapo_temperature_neg).masked_fill(A > 0, sapo_temperature_pos)
    return LossOutput(_scored(-(4 / tau) * torch.sigmoid(tau * (given.w - 1)) * A, given.mask_BT))


def vespo(
    given: SurrogateInputs,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    sampler_ratio: Tensor | None = None,
    **_: Any,
) -> LossOutput:
    """-sg(phi) A l, phi = W^k exp(lambda (1 - W)) with W = prod_t w_t of the whole sequence (arXiv:2602.10693).

    (k, lambda) is the `pos` pair where A >= 0, else the `neg` pair. A sampler correction (`sampler_ratio`) enters W
    instead of multiplying the loss. Log-ratios of tokens end at +-20, log W at ln 1e-8 and 20, log phi at 20.

    One fact to check: on-policy phi is 1, and the gradient -A times that of l.
    """
    A, mask_BT = given.A, given.mask_BT
    log_W_B1 = given.log_w_BT.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).sum(-1, keepdim=True)
    if sampler_ratio is not None:
        log_rho = sampler_ratio.clamp(min=_LEAST_RATIO).log().clamp(max=MAX_LOG_RATIO)
        is_per_token = log_rho.shape == mask_BT.shape
        log_W_B1 = log_W_B1 + (log_rho.where(mask_BT > 0, 0.0).sum(-1, keepdim=True) if is_per_token else log_rho)
    log_W_B1 = log_W_B1.clamp(math.log(_LEAST_RATIO), MAX_LOG_RATIO)
    is_bad = A < 0
    k = torch.full_like(A, vespo_k_pos).masked_fill(is_bad, vespo_k_neg)
    lam = torch.full_like(A, vespo_lambda_pos).masked_fill(is_bad, vespo_lambda_neg).clamp(min=1e-4)
    phi = bounded_exp(k * log_W_B1 - lam * torch.expm1(log_W_B1))
    loss_BT = -phi * A * given.logps_BT
    return LossOutput(
        _scored(loss_BT, mask_BT), {"vespo/phi_seq_mean": masked_mean(phi.expand_as(mask_BT), mask_BT)[:, 0]}
    )


# The clipping ones differ in how the tokens are averaged (`aggregate.REDUCTION_OF`), not here.
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": clipped,
    "bnpo": clipped,
    "dr_grpo": clipped,
    "dapo": clipped,
    "cispo": cispo,
    "sapo": sapo,
    "luspo": clipped,
    "vespo": vespo,
}


def policy_loss(
    logps_BT: Float[Tensor, "B T"],
    old_logps_BT: Float[Tensor, "B T"] | None,
    ref_logps_BT: Float[Tensor, "B T"] | None,
    advantages_B: Float[Tensor, " B"],
    mask_BT: Float[Tensor, "B T"],
    *,
    loss_type: str = "dapo",
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    importance_sampling_level: str = "token",
    keep: Tensor | None = None,
    sampler_ratio: Tensor | None = None,
    **hyper: Any,
) -> LossOutput:
    """The whole loss of each token: a surrogate of `POLICY_LOSSES`, masked and corrected, plus beta times the KL.

    Args:
        logps_BT: Of the policy, with gradient. Values outside the mask do not matter.
        old_logps_BT: Of the policy that sampled; None where that is this one still (then nothing can be clipped).
        ref_logps_BT: Of the reference; needed where `beta` is not 0.
        advantages_B: `[B]`, or `[B, T]`. Taken as constants.
        mask_BT: 1 at tokens that count; 0 at padding and tool results.
        keep: Broadcasts to `[B, T]`, 0 where the surrogate (not the KL) is switched off: the off-policy rows times the
            tokens of low entropy.
        sampler_ratio: `importance.sampler_ratio`, broadcasts to `[B, T]`; multiplies the surrogate (VESPO: see there).
        hyper: Passed on to the surrogate.

    Returns:
        Losses `[B, T]`, 0 outside the mask, and metrics; neither mask nor `keep` changes a denominator.

    Raises:
        ConfigError: unknown `loss_type` or level. ValueError: `beta` without a reference.

    One fact to check: with beta 0 and one token a completion, levels "token" and "sequence" agree.
    """
    if loss_type not in POLICY_LOSSES:
        raise unknown_name("loss_type", loss_type, POLICY_LOSS_NAMES)
    given = SurrogateInputs(
        at_least_float32(logps_BT),
        log_ratio(logps_BT, old_logps_BT, mask_BT),
        as_columns(advantages_B, logps_BT),
        mask_BT,
        importance_sampling_level,
    )
    output = POLICY_LOSSES[loss_type](given, sampler_ratio=sampler_ratio, **hyper)
    loss_BT = output.loss
    if keep is not None:
        loss_BT = loss_BT * keep
    if sampler_ratio is not None and loss_type != "vespo":
        loss_BT = loss_BT * sampler_ratio
    if beta == 0:
        return LossOutput(loss_BT, output.metrics)
    if ref_logps_BT is None:
        raise ValueError(f"beta={beta} weighs the distance from a reference, but ref_logps_BT is None")
    kl_BT = kl_penalty(logps_BT, ref_logps_BT, mask_BT, given.w if use_bias_correction_kl else 1.0)
    return LossOutput(loss_BT + beta * kl_BT, {**output.metrics, "kl": kl_BT.detach()})


def kl_penalty(
    logps_BT: Float[Tensor, "B T"],
    ref_logps_BT: Float[Tensor, "B T"],
    mask_BT: Float[Tensor, "B T"],
    weight: Tensor | float = 1.0,
) -> Float[Tensor, "B T"]:
    """`weight` times k3 of each scored token, 0 elsewhere.

    With the ratio w as weight (not detached), the gradient's mean under the old policy is that of KL(p || p_ref)
    (DeepSeek-V3.2, arXiv:2512.02556, 3.1); with 1 it is not, even on-policy.
    """
    is_scored_BT = mask_BT > 0
    # Both 0 outside the mask: the gradient of a sequence's weight would multiply whatever stands there.
    logps_BT, ref_logps_BT = logps_BT.where(is_scored_BT, 0.0), ref_logps_BT.detach().where(is_scored_BT, 0.0)
    return k3(logps_BT, ref_logps_BT) * weight


def rloo(
    logps_BT: Float[Tensor, "B T"],
    old_logps_BT: Float[Tensor, "B T"] | None,
    advantages_B: Float[Tensor, " B"],
    mask_BT: Float[Tensor, "B T"],
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    **_: Any,
) -> LossOutput:
    """RLOO's loss of each completion, `[B]`: the clipped surrogate with the ratio of whole sequences.

    -min(W A, clip(W, 1 - epsilon, 1 + epsilon_high) A), W = exp(sum_t (l - l_old)) (arXiv:2402.14740, clip of PPO).
    The KL penalty is in the reward (`advantages.shaped_rewards`), so no reference appears here. The loss of a step is
    the mean over completions.

    One fact to check: on-policy the gradient is -A times that of the completion's log-probability.
    """
    W_B1 = bounded_exp(log_ratio(logps_BT, old_logps_BT, mask_BT).sum(-1, keepdim=True))
    loss_B1, metrics = _clip(W_B1, as_columns(advantages_B, logps_BT), mask_BT, epsilon, epsilon_high)
    return LossOutput(loss_B1[:, 0], metrics)


def _clip(
    ratio: Tensor, A: Tensor, mask_BT: Tensor, epsilon: float, epsilon_high: float | None, delta: float | None = None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """-min(w A, clip(w) A), in the unclipped part with w held below `delta`, and where the clip acts."""
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    capped = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(capped * A, ratio.clamp(low, high) * A)
    return loss, clip_metrics(ratio, A, mask_BT, low=low, high=high)


def clip_metrics(
    ratio: Tensor, advantages_B1: Tensor, mask_BT: Tensor, *, low: float, high: float
) -> Mapping[str, Tensor]:
    """Where the clip acts: shares of tokens (of rows, for a ratio `[B, 1]`), and their extremes over rows.

    Below `low` it acts on negative advantages, above `high` on positive ones; `region` is either.
    """
    ratio = ratio.detach()
    is_low = ((ratio < low) & (advantages_B1 < 0)).float()
    is_high = ((ratio > high) & (advantages_B1 > 0)).float()
    shares = {"low": is_low, "high": is_high, "region": is_low + is_high}
    metrics = {f"clip_ratio/{name}_mean": _per_token_or_row(share, mask_BT) for name, share in shares.items()}
    metrics["clip_ratio/low_min"] = _per_row(is_low, mask_BT)
    metrics["clip_ratio/high_max"] = _per_row(is_high, mask_BT)
    return metrics


def _scored(loss: Tensor, mask_BT: Tensor) -> Tensor:
    """`[B, T]`, 0 outside the mask."""
    return loss.expand(mask_BT.shape).where(mask_BT > 0, 0.0)


def _per_token_or_row(share: Tensor, mask_BT: Tensor) -> Tensor:
    return share[:, 0] if share.shape[-1] == 1 != mask_BT.shape[-1] else share


def _per_row(share: Tensor, mask_BT: Tensor) -> Tensor:
    return masked_mean(share.expand(mask_BT.shape), mask_BT)[:, 0]
