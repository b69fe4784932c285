"""From scores of tokens to scores of branches and pairs: sums, length desensitising, WPO weights.

Branches of a preference tree come as chosen 0, rejected 0, chosen 1, rejected 1, ...; B counts branches, P pairs here.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from preftune.types import PairScores, TokenScores


def ld_weights(scores: TokenScores, ld_alpha: float) -> Float[Tensor, " T"]:
    """Length-desensitised token weights (LD-DPO, arXiv:2409.06411): 1 up to the shorter length of the pair, then alpha.

    Args:
        scores: Of a preference tree; lengths and positions count its scored tokens.
        ld_alpha: In [0, 1]; 1 is plain DPO, 0 compares the first min(n_chosen, n_rejected) tokens only.

    Raises:
        ValueError: an odd number of branches.

    One fact to check: lengths 2 and 3 with alpha 0.5 give 1 1 | 1 1 0.5.
    """
    _require_pairs(scores.num_branches)
    branch_T = scores.branch_index
    length_B = branch_T.new_zeros(scores.num_branches).index_add(0, branch_T, torch.ones_like(branch_T))
    first_B = length_B.cumsum(0) - length_B
    position_T = torch.arange(branch_T.shape[0], device=branch_T.device) - first_B[branch_T]
    shorter_P = torch.minimum(length_B[0::2], length_B[1::2])
    in_both_T = position_T < shorter_P[branch_T // 2]
    one = scores.logps.new_ones(())
    return torch.where(in_both_T, one, ld_alpha * one).detach()


def ld_branch_logps(scores: TokenScores, ld_alpha: float | None) -> Float[Tensor, " B"]:
    """Summed log-probability of each branch, tokens weighted by `ld_weights`; None: the plain sum, any tree.

    Raises:
        ValueError: `ld_alpha` given and an odd number of branches.

    One fact to check: `ld_alpha=1` equals None.
    """
    if ld_alpha is None:
        return scores.branch_logps
    return scores.branch_sum(ld_weights(scores, ld_alpha) * scores.logps)


def pair_scores(
    scores: TokenScores, *, ld_alpha: float | None = None, mean_chosen_length: Tensor | float | None = None
) -> PairScores:
    """What the pair losses read, from the token scores of a preference tree.

    Args:
        scores: Of a tree with branches chosen 0, rejected 0, chosen 1, ...
        ld_alpha: See `ld_weights`; weighs the log-probabilities, never `chosen_nll`.
        mean_chosen_length: Scored chosen tokens per pair over the whole optimizer step; None: over these pairs.

    Raises:
        ValueError: an odd number of branches.

    One fact to check: without `ld_alpha`, `chosen_nll == -chosen_logps`.
    """
    _require_pairs(scores.num_branches)
    logps_B = ld_branch_logps(scores, ld_alpha)
    length_B = scores.branch_lengths
    if mean_chosen_length is None:
        mean_chosen_length = length_B[0::2].sum().clamp(min=1) / max(length_B[0::2].shape[0], 1)
    return PairScores(
        chosen_logps=logps_B[0::2],
        rejected_logps=logps_B[1::2],
        chosen_lengths=length_B[0::2].clamp(min=1),
        rejected_lengths=length_B[1::2].clamp(min=1),
        chosen_nll=-scores.branch_logps[0::2],
        mean_chosen_length=torch.as_tensor(mean_chosen_length, dtype=torch.float32, device=length_B.device),
    )


def reference_pair_scores(
    branch_logps_B: Float[Tensor, " B"], policy: PairScores, *, ld_alpha: float | None = None
) -> PairScores:
    """The reference's side of `policy`: its summed log-probabilities with the lengths of the same pairs; detached.

    With `ld_alpha` the plain sum of the chosen tokens is not known here: `chosen_nll` is then NaN, not a wrong number.

    Raises:
        ValueError: `branch_logps_B` does not hold two branches for every pair of `policy`.
    """
    num_pairs = policy.chosen_logps.shape[0]
    if branch_logps_B.shape != (2 * num_pairs,):
        raise ValueError(f"got reference log-probabilities {tuple(branch_logps_B.shape)}; wanted ({2 * num_pairs},)")
    logps_B = branch_logps_B.detach()
    chosen_P = logps_B[0::2]
    nll_P = -chosen_P if ld_alpha is None else torch.full_like(chosen_P, float("nan"))
    return dataclasses.replace(policy, chosen_logps=chosen_P, rejected_logps=logps_B[1::2], chosen_nll=nll_P)


def wpo_weights(scores: TokenScores) -> Float[Tensor, " B"]:
    """WPO weight of each branch (arXiv:2406.11827, sampled alignment): how on-policy it is. Above 0, detached.

    exp( 1/n sum_t [log p(y_t) - log sum_v p(v)^2] ), over the n scored tokens. A branch without any has weight 1.

    Raises:
        ValueError: `scores` without `log_sum_sq_probs`.

    One fact to check: 1 for whatever completion of a model with uniform predictions.
    """
    if scores.log_sum_sq_probs is None:
        raise ValueError("WPO needs the output 'log_sum_sq_probs' of token_scores; these scores do not have it")
    excess_T = scores.logps.detach() - scores.log_sum_sq_probs.detach()
    return (scores.branch_sum(excess_T) / scores.branch_lengths.clamp(min=1)).exp()


def wpo_pair_weights(scores: TokenScores) -> Float[Tensor, " P"]:
    """What multiplies the loss of each pair under WPO: the weights of both its completions. Above 0, detached.

    Raises:
        ValueError: `scores` without `log_sum_sq_probs`, or an odd number of branches.
    """
    _require_pairs(scores.num_branches)
    weight_B = wpo_weights(scores)
    return weight_B[0::2] * weight_B[1::2]


def _require_pairs(num_branches: int) -> None:
    if num_branches % 2:
        raise ValueError(f"got {num_branches} branches; wanted an even number: chosen 0, rejected 0, chosen 1, ...")
