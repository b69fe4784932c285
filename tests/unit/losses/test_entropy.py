"""The entropy threshold against numpy's quantile and by hand; the controller step by step on paper.

Sizes that torch.quantile refuses are no matter here.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.entropy import EntropyController, entropy_threshold, top_entropy_mask


@given(st.lists(st.floats(0, 12, width=32), min_size=1, max_size=40), st.floats(0, 1))
def test_threshold_is_the_linear_quantile(entropies, kept):
    got = entropy_threshold(torch.tensor(entropies, dtype=torch.float64), kept).item()
    assert got == pytest.approx(np.quantile(entropies, 1 - kept), rel=1e-9, abs=1e-9)


def test_threshold_by_hand():
    """Entropies 0 to 4: keeping a quarter puts the cut at place 3; keeping all at the minimum; none at the maximum."""
    values = torch.tensor([3.0, 0.0, 4.0, 1.0, 2.0])
    assert [entropy_threshold(values, kept).item() for kept in (0.25, 1.0, 0.0)] == [3.0, 0.0, 4.0]
    assert entropy_threshold(torch.tensor([]), 0.5).item() == math.inf


def test_more_tokens_than_torch_quantile_takes():
    values = torch.arange(2**24 + 2, dtype=torch.float32).flip(0)
    assert entropy_threshold(values, 0.5).item() == pytest.approx(2**23, rel=1e-6)


def test_mask_keeps_the_most_uncertain_scored_tokens():
    entropy = torch.tensor([[0.1, 2.0, 9.0], [1.0, 3.0, 0.2]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    threshold = entropy_threshold(entropy[mask > 0], 0.5)  # of 0.1 0.2 1 2 3: 1
    assert top_entropy_mask(entropy, mask, threshold).tolist() == [[False, True, False], [True, True, False]]
    kept_none = entropy_threshold(entropy[mask > 0], 0.0)
    assert top_entropy_mask(entropy, mask, kept_none).sum() == 1


def test_fixed_weight():
    control = EntropyController(coef=0.01)
    control.update(5.0)
    assert control.active_coef == control.coef == 0.01


def test_steered_weight_step_by_step():
    """Target 1, delta 0.4, range [0, 1]: entropies 0.5 0.5 0.5 2 2 2 2 move 0 to 0.4 0.8 1 0.6 0.2 0 0."""
    control = EntropyController(coef=0.0, adaptive=True, target=1.0, delta=0.4, low=0.0, high=1.0)
    assert control.active_coef == 0
    seen = []
    for entropy in (0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0):
        control.update(entropy)
        seen.append((round(control.coef, 9), round(control.active_coef, 9)))
    assert seen == [(0.4, 0.4), (0.8, 0.8), (1.0, 1.0), (0.6, 0.0), (0.2, 0.0), (0.0, 0.0), (0.0, 0.0)]


def test_first_step_has_no_steered_bonus():
    assert EntropyController(coef=0.5, adaptive=True).active_coef == 0


def test_state_survives_json():
    first, second = (EntropyController(coef=0.1, adaptive=True) for _ in range(2))
    for _ in range(2):
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert second == first
        first.update(0.1)
