"""Pair accuracy: two ways to compare, and an interval that comes from resampling."""

from __future__ import annotations

import numpy as np
import pytest

from preftune.trainers.pairs import PairTable, RewardTable, bootstrap_share


def test_summed_and_per_token_differ():
    """-6 over 6 tokens is worse than -4 over 2 summed, and better per token (-1 against -2)."""
    table = PairTable(np.array([-6.0]), np.array([-4.0]), np.array([6.0]), np.array([2.0]))
    assert (table.summed.value, table.per_token.value) == (0.0, 1.0)


def test_ties_do_not_count():
    table = PairTable(np.array([-1.0]), np.array([-1.0]), np.array([1.0]), np.array([1.0]))
    assert table.summed.value == 0.0


def test_scores_of_a_reward_model_are_compared_as_they_are():
    table = RewardTable(np.array([1.0, -2.0, 0.5]), np.array([0.0, -1.0, 0.5]))
    assert list(table.shares) == ["accuracy"] and table.accuracy.value == pytest.approx(1 / 3)
    assert str(table).endswith("of 3; mean score: chosen -0.167, rejected -0.167")


def test_interval_is_that_of_the_binomial():
    """100 trials at 0.5: standard error 0.05, so the 95 % interval is near 0.5 -+ 0.098."""
    share = bootstrap_share([True, False] * 50)
    assert share.value == 0.5 and share.n == 100
    assert share.low == pytest.approx(0.402, abs=0.02) and share.high == pytest.approx(0.598, abs=0.02)
    assert bootstrap_share([True] * 10).low == 1.0


def test_it_draws_from_no_global_state():
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    bootstrap_share([True, False])
    assert (np.random.get_state()[1] == before).all()


def test_no_pairs_is_an_error():
    with pytest.raises(ValueError, match="no pairs"):
        bootstrap_share([])
