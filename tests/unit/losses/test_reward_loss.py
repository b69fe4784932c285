"""The Bradley-Terry loss against plain arithmetic in float64, and what must not change it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.reward import bradley_terry

SCORES = st.floats(-30, 30)


def loss(chosen, rejected, margin=None, c=None):
    double = [torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected)]
    margins = None if margin is None else torch.tensor([margin], dtype=torch.float64)
    return bradley_terry(*double, margins, center_rewards_coefficient=c).item()


def test_by_hand():
    """-log s(0) = log 2; scores 2 and 1, margin 0.5: log(1 + e^-0.5); with c = 0.1: + 0.1 * 3^2."""
    assert loss(0, 0, c=5.0) == pytest.approx(math.log(2))
    assert loss(2, 1, 0.5) == pytest.approx(math.log1p(math.exp(-0.5)))
    assert loss(2, 1, 0.5, 0.1) == pytest.approx(math.log1p(math.exp(-0.5)) + 0.9)


@given(SCORES, SCORES, SCORES, st.floats(0, 1))
def test_is_the_arithmetic(chosen, rejected, margin, c):
    gap = chosen - rejected - margin
    slow = max(-gap, 0) + math.log1p(math.exp(-abs(gap))) + c * (chosen + rejected) ** 2
    assert loss(chosen, rejected, margin, c) == pytest.approx(slow, rel=1e-12, abs=1e-12)


@given(SCORES, SCORES, st.floats(-20, 20))
def test_the_level_is_free_and_a_swap_costs_the_gap(chosen, rejected, shift):
    assert loss(chosen + shift, rejected + shift) == pytest.approx(loss(chosen, rejected), rel=1e-9, abs=1e-9)
    assert loss(rejected, chosen) - loss(chosen, rejected) == pytest.approx(chosen - rejected, rel=1e-9, abs=1e-9)


def test_gradient_and_far_scores():
    """d/dr_c = s(gap) - 1 + 2 c (r_c + r_rj); far apart the loss is the distance, not infinity."""
    chosen = torch.tensor([1.0, -200.0], requires_grad=True)
    rejected = torch.tensor([0.5, 200.0])
    values = bradley_terry(chosen, rejected, center_rewards_coefficient=0.1)
    assert values[1].item() == pytest.approx(400)
    (gradient,) = torch.autograd.grad(values.sum(), chosen)
    assert gradient[0].item() == pytest.approx(1 / (1 + math.exp(-0.5)) - 1 + 0.2 * 1.5, rel=1e-6)
    assert gradient[1].item() == pytest.approx(-1)
