"""Token scores to pair scores: hand examples for `ld_alpha`, loops over a three-token vocabulary for WPO.

Trees here are lists of branches, each a list of token log-probabilities; branches are chosen 0, rejected 0, ...
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.preference import PAIR_LOSSES, weighted_pair_loss
from preftune.losses.reduce import (
    ld_branch_logps,
    ld_weights,
    pair_scores,
    reference_pair_scores,
    wpo_pair_weights,
    wpo_weights,
)
from preftune.losses.supervised import nll
from preftune.types import TokenScores


def token_scores(branches: list[list[float]], log_sum_sq: list[list[float]] | None = None) -> TokenScores:
    flat = [value for branch in branches for value in branch]
    owner = [b for b, branch in enumerate(branches) for _ in branch]
    squares = None if log_sum_sq is None else torch.tensor([v for b in log_sum_sq for v in b], dtype=torch.float64)
    return TokenScores(
        logps=torch.tensor(flat, dtype=torch.float64),
        branch_index=torch.tensor(owner, dtype=torch.long),
        num_branches=len(branches),
        log_sum_sq_probs=squares,
    )


def test_ld_hand_example():
    """Lengths 2 and 3, alpha 1/2: the third rejected token counts half; -1-2 = -3 and -1-2-4/2 = -5."""
    scores = token_scores([[-1.0, -2.0], [-1.0, -2.0, -4.0]])
    assert ld_weights(scores, 0.5).tolist() == [1, 1, 1, 1, 0.5]
    assert ld_branch_logps(scores, 0.5).tolist() == [-3.0, -5.0]
    assert ld_branch_logps(scores, 0.0).tolist() == [-3.0, -3.0]
    assert ld_branch_logps(scores, None).tolist() == [-3.0, -7.0]


def test_ld_longer_side_may_be_either_and_pairs_do_not_mix():
    """Pair 0: lengths 3 and 1. Pair 1: 1 and 2. A branch without tokens in pair 2 leaves the other with tail only."""
    scores = token_scores([[-1.0, -1.0, -1.0], [-2.0], [-3.0], [-4.0, -4.0], [], [-5.0, -5.0]])
    assert ld_weights(scores, 0.25).tolist() == [1, 0.25, 0.25, 1, 1, 1, 0.25, 0.25, 0.25]
    assert ld_branch_logps(scores, 0.25).tolist() == [-1.5, -2.0, -3.0, -5.0, 0.0, -2.5]


branch = st.lists(st.floats(-9, 0), max_size=6)


@given(pairs=st.lists(st.tuples(branch, branch), min_size=1, max_size=4), alpha=st.floats(0, 1))
def test_ld_equals_a_loop(pairs, alpha):
    want = []
    for chosen, rejected in pairs:
        shorter = min(len(chosen), len(rejected))
        want += [sum(b[:shorter]) + alpha * sum(b[shorter:]) for b in (chosen, rejected)]
    scores = token_scores([b for pair in pairs for b in pair])
    assert ld_branch_logps(scores, alpha).tolist() == pytest.approx(want, abs=1e-12)
    assert ld_branch_logps(scores, 1.0).tolist() == pytest.approx(ld_branch_logps(scores, None).tolist(), abs=1e-12)


def test_ld_gradient_is_the_weight():
    logps = torch.tensor([-1.0, -2.0, -1.0, -2.0, -4.0], requires_grad=True)
    scores = TokenScores(logps, torch.tensor([0, 0, 1, 1, 1]), 2)
    ld_branch_logps(scores, 0.5).sum().backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == [1, 1, 1, 1, 0.5]


def test_pair_scores_by_hand():
    """Two pairs with lengths (2, 3) and (1, 0): sums, lengths at least 1, likelihood without alpha, mean length 1.5."""
    scores = token_scores([[-1.0, -2.0], [-1.0, -2.0, -4.0], [-8.0], []])
    got = pair_scores(scores, ld_alpha=0.5)
    assert got.chosen_logps.tolist() == [-3.0, -4.0]  # the second: nothing in common, all of it is tail
    assert got.rejected_logps.tolist() == [-5.0, 0.0]
    assert got.chosen_lengths.tolist() == [2, 1]
    assert got.rejected_lengths.tolist() == [3, 1]
    assert got.chosen_nll.tolist() == [3.0, 8.0]
    assert got.mean_chosen_length.item() == 1.5
    assert pair_scores(scores, mean_chosen_length=4.0).mean_chosen_length.item() == 4.0
    assert pair_scores(scores, mean_chosen_length=torch.tensor(4.0)).mean_chosen_length.item() == 4.0


def test_no_chosen_token_at_all_is_no_division_by_zero():
    scores = pair_scores(token_scores([[], [-1.0]]))
    assert PAIR_LOSSES["sft"](scores, None).loss.tolist() == [0.0]


def test_reference_pair_scores():
    """The sums of the reference, the lengths of the pairs; the likelihood is unknown under ld_alpha and says so."""
    policy = pair_scores(token_scores([[-1.0, -2.0], [-1.0]]))
    logps = torch.tensor([-5.0, -6.0], requires_grad=True)
    ref = reference_pair_scores(logps, policy)
    assert ref.chosen_logps.tolist() == [-5.0]
    assert ref.rejected_logps.tolist() == [-6.0]
    assert ref.chosen_lengths.tolist() == [2]
    assert ref.chosen_nll.tolist() == [5.0]
    assert not ref.chosen_logps.requires_grad
    assert math.isnan(reference_pair_scores(logps, policy, ld_alpha=0.5).chosen_nll.item())
    with pytest.raises(ValueError, match=r"\(2,\)"):
        reference_pair_scores(torch.zeros(3), policy)


@pytest.mark.parametrize("call", [lambda s: ld_weights(s, 0.5), pair_scores, wpo_pair_weights])
def test_odd_number_of_branches_is_refused(call):
    with pytest.raises(ValueError, match="3 branches"):
        call(token_scores([[-1.0], [-1.0], [-1.0]]))


def test_sft_term_is_the_token_mean():
    """Report R145: the mean over pairs is the likelihood's mean over all chosen tokens, with other lengths beside it.

    Chosen tokens -1 -2 | -6: mean 3, however the pairs are split into micro-batches of the step.
    """
    first, second = [[-1.0, -2.0], [-9.0]], [[-6.0], [-9.0, -9.0]]
    whole = PAIR_LOSSES["sft"](pair_scores(token_scores(first + second)), None).loss
    assert whole.mean().item() == pytest.approx(3.0)
    assert whole.mean().item() == pytest.approx(nll(torch.tensor([-1.0, -2.0, -6.0])).mean().item())
    parts = [
        PAIR_LOSSES["sft"](pair_scores(token_scores(part), ld_alpha=0.0, mean_chosen_length=1.5), None).loss
        for part in (first, second)
    ]
    assert torch.cat(parts).tolist() == pytest.approx(whole.tolist())


def random_completion(draw: random.Random, length: int) -> tuple[list[float], list[float], float]:
    """Log-probabilities and log sums of squares over a vocabulary of three, and the weight from the definition."""
    logps, squares, product = [], [], 1.0
    for _ in range(length):
        logits = [draw.uniform(-2, 2) for _ in range(3)]
        total = sum(math.exp(x) for x in logits)
        probs = [math.exp(x) / total for x in logits]
        token = draw.randrange(3)
        expected = sum(p * p for p in probs)
        logps.append(math.log(probs[token]))
        squares.append(math.log(expected))
        product *= probs[token] / expected
    return logps, squares, product ** (1 / length)


@given(seed=st.integers(0, 10**6), lengths=st.tuples(*[st.integers(1, 5)] * 4))
def test_wpo_weights_equal_a_loop(seed, lengths):
    """The geometric mean over tokens of p(y_t) / sum_v p(v)^2; for a pair, the product of both."""
    draw = random.Random(seed)
    logps, squares, want = zip(*[random_completion(draw, n) for n in lengths])
    scores = token_scores(list(logps), list(squares))
    assert wpo_weights(scores).tolist() == pytest.approx(list(want), rel=1e-6)
    assert wpo_pair_weights(scores).tolist() == pytest.approx([want[0] * want[1], want[2] * want[3]], rel=1e-6)


def test_wpo_weight_is_one_for_uniform_and_for_certain_predictions():
    third = math.log(1 / 3)
    scores = token_scores([[third, third], [0.0, 0.0, 0.0], [], [third]], [[third, third], [0.0] * 3, [], [third]])
    assert wpo_weights(scores).tolist() == pytest.approx([1.0] * 4)


def test_wpo_needs_its_output():
    with pytest.raises(ValueError, match="log_sum_sq_probs"):
        wpo_weights(token_scores([[-1.0], [-1.0]]))


def test_wpo_with_sft_for_a_batch():
    """Each row of w_c w_r (loss + sft); gradients flow through the losses only, and nothing is changed in place."""
    logps = torch.tensor([-1.0, -2.0, -1.5, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    squares = torch.tensor([-1.1, -1.2, -1.3, -1.4, -1.5], dtype=torch.float64, requires_grad=True)
    scores = TokenScores(logps, torch.tensor([0, 0, 1, 2, 3]), 4, log_sum_sq_probs=squares)
    policy = pair_scores(scores)
    ref = reference_pair_scores(torch.tensor([-2.0, -2.0, -1.0, -2.0], dtype=torch.float64), policy)
    losses = [(PAIR_LOSSES["sigmoid"], 1.0), (PAIR_LOSSES["sft"], 1.0)]
    output = weighted_pair_loss(losses, policy, ref, pair_weights_B=wpo_pair_weights(scores), beta=0.5)
    output.loss.sum().backward()

    weights = [math.exp((0.1 - 0.8) / 2) * math.exp(-0.2), math.exp(0.9) * math.exp(-1.5)]
    gaps = [(-3 + 2) - (-1.5 + 2), (-0.5 + 1) - (-3 + 2)]
    sft = [3 / 1.5, 0.5 / 1.5]
    want = [w * (math.log(1 + math.exp(-0.5 * d)) + n) for w, d, n in zip(weights, gaps, sft)]
    assert output.loss.tolist() == pytest.approx(want)
    push = [0.5 / (1 + math.exp(0.5 * d)) for d in gaps]  # beta s(-beta d)
    by_hand = [-weights[0] * (push[0] + 1 / 1.5)] * 2 + [weights[0] * push[0]]
    by_hand += [-weights[1] * (push[1] + 1 / 1.5), weights[1] * push[1]]
    assert logps.grad is not None
    assert logps.grad.tolist() == pytest.approx(by_hand)
    assert squares.grad is None
