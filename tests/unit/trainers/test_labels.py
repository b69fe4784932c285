"""How well labelled rows are told apart: the area under the curve by its definition, the margin, their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preftune.trainers.labels import LabelTable

values = st.lists(st.integers(-3, 3), min_size=1, max_size=8)


@given(values, values)
def test_separation_by_its_definition(good, bad):
    table = LabelTable(np.array([*good, *bad], float), np.array([True] * len(good) + [False] * len(bad)))
    wins = [1.0 if g > b else 0.5 if g == b else 0.0 for g in good for b in bad]
    assert table.separation.value == pytest.approx(sum(wins) / len(wins))
    assert table.margin.value == pytest.approx(np.mean(good) - np.mean(bad))
    assert table.separation.low - 1e-9 <= table.separation.value <= table.separation.high + 1e-9
    assert table.separation.n == len(good) + len(bad)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """Rewards N(1, 1) and N(0, 1): the margin is 1, and 95 % of the intervals hold it (50 trials: at least 40)."""
    draws = np.random.default_rng(3)
    hits = 0
    for _ in range(50):
        rewards = np.concatenate([draws.normal(1, 1, 40), draws.normal(0, 1, 40)])
        margin = LabelTable(rewards, np.arange(80) < 40).margin
        hits += margin.low <= 1 <= margin.high
    assert hits >= 40


def test_untrained_and_perfect():
    labels = np.array([True, False, True, False])
    nothing = LabelTable(np.zeros(4), labels)
    assert (nothing.separation.value, nothing.separation.low, nothing.margin.value) == (0.5, 0.5, 0.0)
    perfect = LabelTable(np.array([2.0, -1.0, 1.0, 0.5]), labels)
    assert perfect.separation.value == 1.0
    assert set(perfect.shares) == {"separation", "margin"} and "1.000" in str(perfect)


def test_one_label_alone():
    table = LabelTable(np.zeros(3), np.ones(3, bool))
    assert table.shares == {} and "one label" in str(table)
    with pytest.raises(ValueError, match="3 desirable and 0 undesirable"):
        _ = table.margin
