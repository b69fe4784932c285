"""Running metrics: weighted means over everything seen, exact across a checkpoint, nothing from nothing."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.trainers.metrics import RunningMetrics, merged


def test_mean_is_over_rows_not_over_batches():
    """Batches of 1 and 3 rows with means 10 and 2: (10 + 6) / 4 = 4, not (10 + 2) / 2 = 6."""
    metrics = RunningMetrics()
    metrics.add("m", torch.tensor([10.0]))
    metrics.add("m", torch.tensor([1.0, 2.0, 3.0]))
    assert metrics.reduce() == {"m": 4.0}
    assert metrics.reduce() == {}


def test_weights_and_extremes():
    metrics = RunningMetrics()
    metrics.add("m", torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0]))
    metrics.add_extremes("reward", torch.tensor([1.0, -2.0]))
    metrics.add_extremes("reward", torch.tensor([0.5]))
    assert metrics.reduce("eval_") == {"eval_m": 2.0, "eval_min_reward": -2.0, "eval_max_reward": 1.0}


def test_nothing_seen_is_left_out_and_nan_is_shown():
    metrics = RunningMetrics()
    metrics.add("empty", torch.tensor([]))
    metrics.add("weightless", torch.tensor([1.0]), torch.tensor([0.0]))
    metrics.add("broken", torch.tensor([1.0, float("nan")]))
    values = metrics.reduce()
    assert set(values) == {"broken"} and values["broken"] != values["broken"]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.data())
def test_a_window_cut_by_a_checkpoint_ends_the_same(values, data):
    cut = data.draw(st.integers(0, len(values)))
    whole, first, second = RunningMetrics(), RunningMetrics(), RunningMetrics()
    for value in values:
        whole.add("m", torch.tensor([value]))
    for value in values[:cut]:
        first.add("m", torch.tensor([value]))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for value in values[cut:]:
        second.add("m", torch.tensor([value]))
    assert second.reduce() == whole.reduce()
    assert whole.reduce() == {}


def test_extremes_show_what_is_no_number_whatever_rank_saw_it():
    ranks = [RunningMetrics(), RunningMetrics()]
    for first, second in ((0, 1), (1, 0)):
        ranks[first].add_extremes("x", torch.tensor([1.0, 2.0]))
        ranks[second].add_extremes("x", torch.tensor([float("nan"), 3.0]))
        both = merged(rank.state_dict() for rank in ranks)
        assert all(value != value for _, value, _ in both.values()) and set(both) == {"min_x", "max_x"}
        assert all(value != value for value in ranks[second].reduce().values())
        ranks[first].clear()
    ranks[0].add_extremes("x", torch.tensor([]))
    assert ranks[0].reduce() == {}


def test_gradient_is_not_kept():
    metrics = RunningMetrics()
    x = torch.tensor([2.0], requires_grad=True)
    metrics.add("m", x * 3)
    assert metrics.reduce() == {"m": pytest.approx(6.0)}


def test_what_is_added_meanwhile_is_ignored():
    metrics = RunningMetrics()
    metrics.add("m", torch.tensor([1.0]))
    with metrics.paused(), metrics.paused():
        metrics.add("m", torch.tensor([9.0]))
        metrics.add_extremes("m", torch.tensor([9.0]))
    metrics.add("m", torch.tensor([3.0]))
    assert metrics.reduce() == {"m": 2.0}


def test_accumulators_together():
    ranks = [RunningMetrics(), RunningMetrics(), RunningMetrics()]
    ranks[0].add("m", torch.tensor([1.0]))
    ranks[1].add("m", torch.tensor([2.0, 6.0]))
    ranks[1].add_extremes("x", torch.tensor([2.0, 6.0]))
    together = RunningMetrics()
    together.load_state_dict(merged(rank.state_dict() for rank in ranks))
    assert together.reduce() == {"m": 3.0, "min_x": 2.0, "max_x": 6.0}


def test_difference_of_two_means_over_all_that_was_added():
    """Batches of one kind each: (1 + 3 + 5) / 3 - (2 + 10) / 2 = -3, whatever each of them holds."""
    metrics = RunningMetrics()
    metrics.differences["gap"] = ("a", "b")
    metrics.add("a", torch.tensor([1.0, 3.0]))
    assert metrics.reduce("eval_") == {"eval_a": 2.0}
    metrics.add("a", torch.tensor([1.0, 3.0]))
    metrics.add("b", torch.tensor([2.0]))
    metrics.add("b", torch.tensor([10.0, 7.0]), torch.tensor([True, False]))
    metrics.add("a", torch.tensor([5.0]))
    assert metrics.reduce("eval_") == {"eval_a": 3.0, "eval_b": 6.0, "eval_gap": -3.0}
