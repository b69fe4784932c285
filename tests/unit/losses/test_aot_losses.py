"""The two AOT losses against a sort written by hand, and what makes them usable in micro-batches.

They match completions of different pairs by rank, so they are the only losses whose rows look at one another.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.log_ratios import partner_by_rank
from preftune.losses.preference import PAIR_LOSSES
from preftune.types import PairScores


def scores(chosen: torch.Tensor, rejected: torch.Tensor) -> PairScores:
    one = torch.ones_like(chosen)
    return PairScores(chosen, rejected, one, one, -chosen, one[0])


def by_insertion(values: list[float]) -> list[float]:
    """Ascending, one at a time."""
    done: list[float] = []
    for value in values:
        at = 0
        while at < len(done) and done[at] < value:
            at += 1
        done.insert(at, value)
    return done


def quantile_gaps(name: str, x: dict[str, list[float]]) -> list[float]:
    """d_i of the paper: the i-th smallest of one list less the i-th smallest of the other."""
    if name == "aot":
        up = [c - r for c, r in zip(x["pc"], x["pr"])]
        down = [c - r for c, r in zip(x["rc"], x["rr"])]
    else:
        up = [p - r for p, r in zip(x["pc"], x["rc"])]
        down = [p - r for p, r in zip(x["pr"], x["rr"])]
    return [a - b for a, b in zip(by_insertion(up), by_insertion(down))]


def logistic(z: float, eps: float) -> float:
    return (1 - eps) * math.log(1 + math.exp(-z)) + eps * math.log(1 + math.exp(z))


def draw(seed: int, size: int) -> dict[str, list[float]]:
    rng = random.Random(seed)
    return {key: [rng.uniform(-8, 0) for _ in range(size)] for key in ("pc", "pr", "rc", "rr")}


def tensors(x: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(values, dtype=torch.float64) for key, values in x.items()}


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@given(seed=st.integers(0, 10**6), size=st.integers(1, 9), eps=st.floats(0, 1), beta=st.floats(0.01, 2))
def test_equals_sorting_by_hand(name, seed, size, eps, beta):
    x = draw(seed, size)
    t = tensors(x)
    loss = PAIR_LOSSES[name](scores(t["pc"], t["pr"]), scores(t["rc"], t["rr"]), beta=beta, label_smoothing=eps).loss
    want = [logistic(beta * gap, eps) for gap in quantile_gaps(name, x)]
    assert by_insertion(loss.tolist()) == pytest.approx(by_insertion(want))


def test_values_stand_in_the_row_that_has_the_rank():
    """Policy margins 5 1 3, reference margins 20 30 10: gaps 5-30, 1-10, 3-20, in this order of rows."""
    zero = torch.zeros(3, dtype=torch.float64)
    policy = scores(torch.tensor([5.0, 1.0, 3.0], dtype=torch.float64), zero)
    ref = scores(torch.tensor([20.0, 30.0, 10.0], dtype=torch.float64), zero)
    loss = PAIR_LOSSES["aot"](policy, ref, beta=0.1).loss
    assert loss.tolist() == pytest.approx([logistic(-2.5, 0), logistic(-0.9, 0), logistic(-1.7, 0)])
    assert partner_by_rank(policy.chosen_logps, ref.chosen_logps).tolist() == [30.0, 10.0, 20.0]


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_a_single_pair_is_dpo(name):
    t = tensors(draw(4, 1))
    policy, ref = scores(t["pc"], t["pr"]), scores(t["rc"], t["rr"])
    dpo = PAIR_LOSSES["sigmoid"](policy, ref, beta=0.3, label_smoothing=0.2).loss.item()
    assert PAIR_LOSSES[name](policy, ref, beta=0.3, label_smoothing=0.2).loss.item() == pytest.approx(dpo)


def test_unpaired_does_not_see_which_rejected_belongs_to_which_chosen():
    t = tensors(draw(5, 6))
    order = [4, 2, 0, 5, 3, 1]
    as_given = PAIR_LOSSES["aot_unpaired"](scores(t["pc"], t["pr"]), scores(t["rc"], t["rr"]), beta=0.3).loss
    shuffled = PAIR_LOSSES["aot_unpaired"](
        scores(t["pc"], t["pr"][order]), scores(t["rc"], t["rr"][order]), beta=0.3
    ).loss
    assert shuffled.tolist() == pytest.approx(as_given.tolist())


def summed_gradient(name: str, t: dict[str, torch.Tensor], beta: float, eps: float) -> list[torch.Tensor]:
    """Autograd of sum_i logistic(beta d_i) with torch's own sort."""
    pc, pr = t["pc"].clone().requires_grad_(), t["pr"].clone().requires_grad_()
    if name == "aot":
        gap = (pc - pr).sort().values - (t["rc"] - t["rr"]).sort().values
    else:
        gap = (pc - t["rc"]).sort().values - (pr - t["rr"]).sort().values
    z = beta * gap
    total = ((1 - eps) * torch.log1p((-z).exp()) + eps * torch.log1p(z.exp())).sum()
    return list(torch.autograd.grad(total, [pc, pr]))


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 5))
def test_micro_batches_with_the_others_detached_add_up(name, seed, cut):
    """Rows of the whole step are known without gradients; each micro-batch brings gradients for its own rows only."""
    t, beta, eps = tensors(draw(seed, 6)), 0.3, 0.1
    ref = scores(t["rc"], t["rr"])
    leaves = [t["pc"].clone().requires_grad_(), t["pr"].clone().requires_grad_()]
    total = 0.0
    for rows in (slice(0, cut), slice(cut, 6)):
        live = []
        for leaf in leaves:
            whole = leaf.detach().clone()
            whole[rows] = leaf[rows]
            live.append(whole)
        loss = PAIR_LOSSES[name](scores(*live), ref, beta=beta, label_smoothing=eps).loss[rows].sum()
        loss.backward()
        total += loss.item()
    want = PAIR_LOSSES[name](scores(t["pc"], t["pr"]), ref, beta=beta, label_smoothing=eps).loss.sum().item()
    assert total == pytest.approx(want)
    for leaf, gradient in zip(leaves, summed_gradient(name, t, beta, eps)):
        assert leaf.grad is not None
        assert leaf.grad.tolist() == pytest.approx(gradient.tolist())


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_equal_rows_are_no_problem(name):
    """Ties in every list: all gaps are 3, so all rows are equal."""
    policy = scores(torch.full((4,), -1.0, dtype=torch.float64), torch.full((4,), -3.0, dtype=torch.float64))
    ref = scores(torch.full((4,), -2.0, dtype=torch.float64), torch.full((4,), -1.0, dtype=torch.float64))
    gap = 3.0  # aot: (-1+3) - (-2+1) = 3; unpaired: (-1+2) - (-3+1) = 3
    loss = PAIR_LOSSES[name](policy, ref, beta=0.5).loss
    assert loss.tolist() == pytest.approx([logistic(0.5 * gap, 0)] * 4)
