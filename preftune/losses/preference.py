"""Losses of preference pairs, a plain function each, and `PAIR_LOSSES` that names them: one value a pair, not reduced.

In the equations l is a summed log-probability under the policy, r = l - l_ref, g = `f_score(r)` (g = r for reverse KL),
n a length in tokens, c chosen, rj rejected, d = g_c - g_rj, z = beta d, s the logistic function, eps label smoothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from preftune.errors import ConfigError
from preftune.losses.divergence import MAX_EXPONENT
from preftune.losses.importing import import_callable
from preftune.losses.log_ratios import (
    at_least_float32,
    log_ratios,
    partner_by_rank,
    require_reference,
    rewards,
    score_gap,
    scores,
    smoothed_logistic,
)
from preftune.losses.names import PAIR_HYPER, check_divergence, check_label_smoothing, check_pair_loss_name
from preftune.types import LossOutput, PairScores

# (policy: PairScores, ref: PairScores | None, *, beta, ...) -> LossOutput; offered all of PAIR_HYPER by keyword.
PairLoss = Callable[..., LossOutput]

# IPO squares its scores: e^32 squared is 6e27, which float32 holds; e^80 squared it does not.
_MAX_EXPONENT_SQUARED = 32.0


def sigmoid(
    policy: PairScores, ref: PairScores | None, *, beta: float, label_smoothing: float = 0.0, **divergence: Any
) -> LossOutput:
    """DPO, -log s(z) (arXiv:2305.18290); with eps > 0 conservative DPO, -(1 - eps) log s(z) - eps log s(-z). Above 0.

    Raises:
        ConfigError: `label_smoothing` outside [0, 1], unknown divergence. ValueError: no reference.

    One fact to check: log 2 where policy and reference agree, for every beta and eps.
    """
    check_label_smoothing("sigmoid", label_smoothing)
    return LossOutput(smoothed_logistic(beta * score_gap(policy, ref, **divergence), label_smoothing))


def hinge(policy: PairScores, ref: PairScores | None, *, beta: float, **divergence: Any) -> LossOutput:
    """Hinge on the DPO margin, max(0, 1 - z) (RSO, arXiv:2309.06657; after SLiC-HF, arXiv:2305.10425). At least 0.

    One fact to check: 1 where policy and reference agree; 0, with no gradient, from d = 1 / beta on.
    """
    return LossOutput(torch.relu(1 - beta * score_gap(policy, ref, **divergence)))


def ipo(policy: PairScores, ref: PairScores | None, *, beta: float, **divergence: Any) -> LossOutput:
    """IPO, (g_c / n_c - g_rj / n_rj - 1 / (2 beta))^2 (arXiv:2310.12036; beta is its tau). At least 0.

    Log-ratios are averaged over tokens, as the authors advised (trl#1677), so beta means the same at every length.

    One fact to check: tokens at -1.0 against -1.5 in both completions, whatever their lengths, beta 0.1: 25.
    """
    chosen_B, rejected_B = scores(policy, ref, max_exponent=_MAX_EXPONENT_SQUARED, **divergence)
    gap_B = chosen_B / policy.chosen_lengths - rejected_B / policy.rejected_lengths
    return LossOutput((gap_B - 1 / (2 * beta)) ** 2)


def sigmoid_norm(policy: PairScores, ref: PairScores | None, *, beta: float, **divergence: Any) -> LossOutput:
    """Length-normalised DPO, -log s(beta (g_c / n_c - g_rj / n_rj)) (Tulu 3, arXiv:2411.15124). Above 0.

    One fact to check: equals `sigmoid` at beta / n where both completions have n tokens.
    """
    chosen_B, rejected_B = scores(policy, ref, **divergence)
    gap_B = chosen_B / policy.chosen_lengths - rejected_B / policy.rejected_lengths
    return LossOutput(-logsigmoid(beta * gap_B))


def exo_pair(
    policy: PairScores, ref: PairScores | None, *, beta: float, label_smoothing: float, **divergence: Any
) -> LossOutput:
    """EXO on pairs, s(z) (log s(z) - log(1 - eps)) + s(-z) (log s(-z) - log eps) (arXiv:2402.00856).

    It is KL(Bernoulli(s(z)) || Bernoulli(1 - eps)): at least 0.

    Raises:
        ConfigError: `label_smoothing` outside (0, 1), unknown divergence. ValueError: no reference.

    One fact to check: 0 exactly where s(z) = 1 - eps.
    """
    check_label_smoothing("exo_pair", label_smoothing)
    z_B = beta * score_gap(policy, ref, **divergence)
    chosen_B = z_B.sigmoid() * (logsigmoid(z_B) - math.log1p(-label_smoothing))
    rejected_B = (-z_B).sigmoid() * (logsigmoid(-z_B) - math.log(label_smoothing))
    return LossOutput(chosen_B + rejected_B)


def robust(
    policy: PairScores, ref: PairScores | None, *, beta: float, label_smoothing: float = 0.0, **divergence: Any
) -> LossOutput:
    """Robust DPO, [-(1 - eps) log s(z) + eps log s(-z)] / (1 - 2 eps) (arXiv:2403.00409). Can be below 0.

    Raises:
        ConfigError: `label_smoothing` outside [0, 0.5), unknown divergence. ValueError: no reference.

    One fact to check: where labels are flipped with probability eps, its mean over the flip is DPO on the true label.
    """
    check_label_smoothing("robust", label_smoothing)
    z_B = beta * score_gap(policy, ref, **divergence)
    noisy_B = -(1 - label_smoothing) * logsigmoid(z_B) + label_smoothing * logsigmoid(-z_B)
    return LossOutput(noisy_B / (1 - 2 * label_smoothing))


def nca_pair(
    policy: PairScores, ref: PairScores | None, *, beta: float, f_divergence_type: str = "reverse_kl", **_: Any
) -> LossOutput:
    """NCA, -log s(beta r_c) - 1/2 log s(-beta r_c) - 1/2 log s(-beta r_rj) (arXiv:2402.05369). Above 0.

    Raises:
        ConfigError: a divergence other than reverse KL. ValueError: no reference.

    One fact to check: 2 log 2 where policy and reference agree.
    """
    chosen_B, rejected_B = rewards("nca_pair", policy, ref, beta, f_divergence_type)
    return LossOutput(-logsigmoid(chosen_B) - 0.5 * logsigmoid(-chosen_B) - 0.5 * logsigmoid(-rejected_B))


def bco_pair(
    policy: PairScores, ref: PairScores | None, *, beta: float, f_divergence_type: str = "reverse_kl", **_: Any
) -> LossOutput:
    """BCO on pairs, -log s(beta r_c) - log s(-beta r_rj), without the running baseline of arXiv:2404.04656. Above 0.

    Raises:
        ConfigError: a divergence other than reverse KL. ValueError: no reference.

    One fact to check: 2 log 2 where policy and reference agree.
    """
    chosen_B, rejected_B = rewards("bco_pair", policy, ref, beta, f_divergence_type)
    return LossOutput(-logsigmoid(chosen_B) - logsigmoid(-rejected_B))


def sppo_hard(
    policy: PairScores, ref: PairScores | None, *, beta: float, f_divergence_type: str = "reverse_kl", **_: Any
) -> LossOutput:
    """SPPO with hard labels, (r_c - 1 / (2 beta))^2 + (r_rj + 1 / (2 beta))^2 (arXiv:2405.00675). At least 0.

    Raises:
        ConfigError: a divergence other than reverse KL. ValueError: no reference.

    One fact to check: 1 / (2 beta^2) where policy and reference agree.
    """
    chosen_B, rejected_B = rewards("sppo_hard", policy, ref, 1.0, f_divergence_type)
    return LossOutput((chosen_B - 1 / (2 * beta)) ** 2 + (rejected_B + 1 / (2 * beta)) ** 2)


def aot(
    policy: PairScores,
    ref: PairScores | None,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    **_: Any,
) -> LossOutput:
    """AOT, paired: DPO's logistic loss on sort(l_c - l_rj) - sort(lref_c - lref_rj) (arXiv:2406.05882). Above 0.

    The sort is over the batch given. Each value stands in the row whose policy margin has that rank, so only the
    reference couples rows: a slice of a larger batch has the gradient of its own rows, and all of it.

    Raises:
        ConfigError: `label_smoothing` outside [0, 1], a divergence other than reverse KL. ValueError: no reference.

    One fact to check: equals `sigmoid` for a single pair.
    """
    check_label_smoothing("aot", label_smoothing)
    check_divergence("aot", f_divergence_type)
    ref = require_reference(ref)
    margin_B = at_least_float32(policy.chosen_logps) - at_least_float32(policy.rejected_logps)
    ref_margin_B = at_least_float32(ref.chosen_logps) - at_least_float32(ref.rejected_logps)
    gap_B = margin_B - partner_by_rank(margin_B, ref_margin_B)
    return LossOutput(smoothed_logistic(beta * gap_B, label_smoothing))


def aot_unpaired(
    policy: PairScores,
    ref: PairScores | None,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    **_: Any,
) -> LossOutput:
    """AOT, unpaired: DPO's logistic loss on sort(r_c) - sort(r_rj) (arXiv:2406.05882). Above 0.

    The sort is over the batch given. Each value stands in the row whose chosen log-ratio has that rank; the gradient
    of a row is that of its own two completions, so that slices of a larger batch add up to the whole.

    Raises:
        ConfigError: `label_smoothing` outside [0, 1], a divergence other than reverse KL. ValueError: no reference.

    One fact to check: equals `sigmoid` for a single pair, and does not change when rejected completions trade places.
    """
    check_label_smoothing("aot_unpaired", label_smoothing)
    chosen_B, rejected_B = rewards("aot_unpaired", policy, ref, beta, f_divergence_type)
    of_chosen_B = smoothed_logistic(chosen_B - partner_by_rank(chosen_B, rejected_B).detach(), label_smoothing)
    of_rejected_B = smoothed_logistic(partner_by_rank(rejected_B, chosen_B).detach() - rejected_B, label_smoothing)
    # The same values seen from the other side: they add the gradient of the rejected completions, and nothing else.
    return LossOutput(of_chosen_B + (of_rejected_B - of_rejected_B.detach()))


def apo_zero(
    policy: PairScores, ref: PairScores | None, *, beta: float, f_divergence_type: str = "reverse_kl", **_: Any
) -> LossOutput:
    """APO-zero, 1 - s(beta r_c) + s(beta r_rj) (arXiv:2408.06266): for chosen better than the policy. In (0, 2).

    Raises:
        ConfigError: a divergence other than reverse KL. ValueError: no reference.

    One fact to check: 1 where policy and reference agree.
    """
    chosen_B, rejected_B = rewards("apo_zero", policy, ref, beta, f_divergence_type)
    return LossOutput((-chosen_B).sigmoid() + rejected_B.sigmoid())


def apo_down(
    policy: PairScores, ref: PairScores | None, *, beta: float, f_divergence_type: str = "reverse_kl", **_: Any
) -> LossOutput:
    """APO-down, s(beta r_c) + 1 - s(beta (r_c - r_rj)) (arXiv:2408.06266): for a policy better than chosen. In (0, 2).

    Raises:
        ConfigError: a divergence other than reverse KL. ValueError: no reference.

    One fact to check: 1 where policy and reference agree.
    """
    chosen_B, rejected_B = rewards("apo_down", policy, ref, beta, f_divergence_type)
    return LossOutput(chosen_B.sigmoid() + (rejected_B - chosen_B).sigmoid())


def discopop(
    policy: PairScores, ref: PairScores | None, *, beta: float, discopop_tau: float = 0.05, **divergence: Any
) -> LossOutput:
    """DiscoPOP, (1 - k)(-log s(z)) + k e^(-z) with k = s(z / tau) (arXiv:2406.08414). Above 0.

    k e^(-z) is one exponential, finite for every z where tau < 1.

    One fact to check: (log 2 + 1) / 2 where policy and reference agree.
    """
    z_B = beta * score_gap(policy, ref, **divergence)
    logistic_B = (-z_B / discopop_tau).sigmoid() * -logsigmoid(z_B)
    exponential_B = (logsigmoid(z_B / discopop_tau) - z_B).clamp(max=MAX_EXPONENT).exp()
    return LossOutput(logistic_B + exponential_B)


def sft(policy: PairScores, ref: PairScores | None, **_: Any) -> LossOutput:
    """Likelihood of the chosen completion, as in RPO (arXiv:2404.19733): -sum_t log p / mean chosen length. At least 0.

    `policy.mean_chosen_length` spans the whole optimizer step, so the mean over pairs is the mean over all chosen
    tokens: divided by length once. Needs no reference.

    One fact to check: the mean over pairs equals the token mean of `supervised.nll` on the chosen completions.
    """
    return LossOutput(at_least_float32(policy.chosen_nll) / policy.mean_chosen_length)


PAIR_LOSSES: dict[str, PairLoss] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "sigmoid_norm": sigmoid_norm,
    "exo_pair": exo_pair,
    "robust": robust,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "sft": sft,
}


def implicit_rewards(
    policy: PairScores, ref: PairScores | None, beta: float
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """beta r of the chosen and the rejected completions: the reward that DPO's policy is optimal for, up to a constant.

    Always the plain log-ratio, whatever the divergence. Without a reference, beta l (a constant reference).

    One fact to check: 0 where policy and reference agree.
    """
    if ref is None:
        return beta * at_least_float32(policy.chosen_logps), beta * at_least_float32(policy.rejected_logps)
    chosen_B, rejected_B = log_ratios(policy, ref)
    return beta * chosen_B, beta * rejected_B


def weighted_pair_loss(
    losses: Sequence[tuple[PairLoss, float]],
    policy: PairScores,
    ref: PairScores | None,
    *,
    pair_weights_B: Float[Tensor, " B"] | None = None,
    **hyper: Any,
) -> LossOutput:
    """sum_k w_k loss_k per pair, times `pair_weights_B` (WPO; no gradient flows into it). Metrics are joined.

    Args:
        losses: (function, weight) each.
        policy: Scores with gradient.
        ref: Scores without, or None.
        pair_weights_B: From `reduce.wpo_pair_weights`, or None.
        **hyper: All of `names.PAIR_HYPER`.

    Raises:
        ConfigError: a loss that does not return a `LossOutput` with one value per pair.
    """
    total_B = torch.zeros_like(policy.chosen_logps)
    metrics: dict[str, Tensor] = {}
    for loss, weight in losses:
        output = loss(policy, ref, **hyper)
        _check_output(output, loss, policy)
        total_B = total_B + weight * output.loss
        metrics.update(output.metrics)
    if pair_weights_B is not None:
        total_B = pair_weights_B.detach() * total_B
    return LossOutput(total_B, metrics)


def resolve_pair_loss(spec: str | PairLoss) -> PairLoss:
    """The function that a name, an import path "package.module:function" or a callable stands for.

    Raises:
        ConfigError: unknown name, failing import, or a function that cannot take what the trainer passes.
    """
    if isinstance(spec, str):
        check_pair_loss_name(spec)
        if spec in PAIR_LOSSES:
            return PAIR_LOSSES[spec]
        spec = import_callable(spec, option="loss_type")
    if not callable(spec):
        raise ConfigError(f"a pair loss is a name or a function; got {spec!r} of type {type(spec).__name__}.")
    _check_signature(spec)
    return spec


def _check_signature(loss: PairLoss) -> None:
    try:
        signature = inspect.signature(loss)
    except ValueError:  # built-in code without one: the first call will tell
        return
    try:
        signature.bind(None, None, **dict.fromkeys(PAIR_HYPER))
    except TypeError as error:
        raise ConfigError(
            f"pair loss {loss!r} has signature {signature}, but is called as loss(policy, ref, "
            f"{', '.join(f'{name}=...' for name in PAIR_HYPER)}): {error}. Write it as "
            "`def loss(policy, ref, *, beta, **_) -> LossOutput`."
        ) from error


def _check_output(output: Any, loss: PairLoss, policy: PairScores) -> None:
    if not isinstance(output, LossOutput):
        raise ConfigError(f"pair loss {loss!r} returned a {type(output).__name__}; wanted a preftune.types.LossOutput.")
    if output.loss.shape != policy.chosen_logps.shape:
        raise ConfigError(
            f"pair loss {loss!r} returned shape {tuple(output.loss.shape)}; wanted one value per pair, "
            f"{tuple(policy.chosen_logps.shape)}. Do not reduce: the trainer divides by the pairs of the whole step."
        )
