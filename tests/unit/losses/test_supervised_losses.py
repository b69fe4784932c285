"""The two token losses of SFT: values by hand, and what tells dft from nll, the gradient.

Nothing is reduced here; the trainer divides by the tokens of the step.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.names import TOKEN_LOSS_NAMES
from preftune.losses.supervised import TOKEN_LOSSES, dft, nll


def test_values_by_hand():
    """p = 1, 1/2, 1/4: -log p is 0, log 2, 2 log 2; times p it is 0, log(2) / 2, log(2) / 2."""
    logps = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64).log()
    assert nll(logps).tolist() == pytest.approx([0, math.log(2), 2 * math.log(2)])
    assert dft(logps).tolist() == pytest.approx([0, math.log(2) / 2, math.log(2) / 2])


@given(logits=st.lists(st.floats(-5, 5), min_size=2, max_size=5))
def test_dft_gradient_is_p_times_that_of_nll(logits):
    """With respect to the logits of a softmax; for nll by hand: p_v - [v is the token]."""
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    total = sum(math.exp(x) for x in logits)
    probs = [math.exp(x) / total for x in logits]
    by_hand = [p - (1 if v == 0 else 0) for v, p in enumerate(probs)]
    (of_nll,) = torch.autograd.grad(nll(leaf.log_softmax(0)[:1]).sum(), leaf)
    (of_dft,) = torch.autograd.grad(dft(leaf.log_softmax(0)[:1]).sum(), leaf)
    assert of_nll.tolist() == pytest.approx(by_hand, abs=1e-12)
    assert of_dft.tolist() == pytest.approx([probs[0] * x for x in by_hand], abs=1e-12)


def test_the_names_are_the_functions():
    assert tuple(TOKEN_LOSSES) == TOKEN_LOSS_NAMES
