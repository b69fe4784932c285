"""Reductions: hand values, and that any split into micro-batches, ranks and paddings adds up to the same loss.

The totals that a share is divided by are those of the whole step.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.aggregate import REDUCTION_OF, fixed_length, sequence_mean, sequence_sum, token_mean
from preftune.losses.names import POLICY_LOSS_NAMES

LIMIT = 16


def batch(rows: list[list[float]], masks: list[list[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    loss = [row + [7.0] * (width - len(row)) for row in rows]
    mask = [row + [0] * (width - len(row)) for row in masks]
    return torch.tensor(loss, dtype=torch.float64), torch.tensor(mask)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("grpo", "sapo"), 0.0),
        (("bnpo", "dapo", "cispo", "vespo"), 0.5),
        (("dr_grpo",), 4 / (2 * LIMIT)),
        (("luspo",), 2.0),
    ],
)
def test_by_hand(names, expected):
    """trl#2995: lengths 2 and 6, advantages 1 and -1, ratio 1, so losses -1 and 1. Sums -2 and 6, means -1 and 1."""
    loss, mask = batch([[-1.0] * 2, [1.0] * 6], [[1] * 2, [1] * 6], 9)
    for name in names:
        share = REDUCTION_OF[name](loss, mask, rows=2, tokens=8, max_completion_length=LIMIT)
        assert share.item() == pytest.approx(expected)


def test_every_loss_has_one():
    assert tuple(REDUCTION_OF) == POLICY_LOSS_NAMES
    assert set(REDUCTION_OF.values()) == {sequence_mean, token_mean, fixed_length, sequence_sum}


@pytest.mark.parametrize("name", POLICY_LOSS_NAMES)
@given(seed=st.integers(0, 2**32), as_tensors=st.booleans())
def test_any_split_gives_the_same_loss(name, seed, as_tensors):
    """One batch against a random split in random order, each part with its own padding."""
    draw = random.Random(seed)
    rows = [[draw.uniform(-3, 3) for _ in range(draw.randint(1, 7))] for _ in range(6)]
    masks = [[int(draw.random() < 0.7) for _ in row] for row in rows]
    totals = {"rows": len(rows), "tokens": max(sum(map(sum, masks)), 1), "max_completion_length": LIMIT}
    if as_tensors:
        totals |= {key: torch.tensor(totals[key]) for key in ("rows", "tokens")}
    whole = REDUCTION_OF[name](*batch(rows, masks, 7), **totals)
    order = draw.sample(range(6), 6)
    cuts = [0, *sorted(draw.sample(range(1, 6), draw.randint(0, 5))), 6]
    shares = []
    for start, end in itertools.pairwise(cuts):
        part = order[start:end]
        width = max(len(rows[i]) for i in part) + draw.randint(0, 3)
        shares.append(REDUCTION_OF[name](*batch([rows[i] for i in part], [masks[i] for i in part], width), **totals))
    torch.testing.assert_close(sum(shares), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSS_NAMES)
def test_a_step_without_scored_tokens_has_loss_zero(name):
    loss, mask = torch.full((2, 3), torch.inf, requires_grad=True), torch.zeros(2, 3)
    for tokens in (0, torch.tensor(0)):
        share = REDUCTION_OF[name](loss, mask, rows=2, tokens=tokens, max_completion_length=LIMIT)
        assert share.item() == 0 and share.requires_grad
