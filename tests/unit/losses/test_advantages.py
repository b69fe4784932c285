"""Advantages against loops over plain lists, hand values, and the invariants of groups: sums, equal rewards, offsets.

None in a list is a reward that no function gave.
"""

from __future__ import annotations

import math
import random
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.errors import ConfigError
from preftune.losses.advantages import (
    combine_rewards,
    gdpo_advantages,
    group_advantages,
    is_flat,
    leave_one_out,
    shaped_rewards,
    whiten,
)

SCALES = ("group", "batch", "none")
reward = st.none() | st.floats(-100, 100).map(lambda x: round(x, 3))


def tensor(rows) -> torch.Tensor:
    """Nested lists with None as float64 with NaN."""
    if isinstance(rows, list):
        return torch.stack([tensor(row) for row in rows])
    return torch.tensor(math.nan if rows is None else rows, dtype=torch.float64)


def weights(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def groups(prompts: int = 3, size: int = 4):
    return st.lists(st.lists(reward, min_size=size, max_size=size), min_size=1, max_size=prompts)


def loop_advantages(rows: list[list[float | None]], scale: str, eps: float = 1e-4) -> list[list[float]]:
    everything = [r for row in rows for r in row if r is not None]
    result = []
    for row in rows:
        scored = [r for r in row if r is not None]
        sample = {"group": scored, "batch": everything, "none": []}[scale]
        divisor = (statistics.stdev(sample) if len(sample) > 1 else 0.0) + eps if scale != "none" else 1.0
        mean = statistics.fmean(scored) if scored else 0.0
        result.append([0.0 if r is None or len(scored) < 2 else (r - mean) / divisor for r in row])
    return result


@pytest.mark.parametrize("scale", SCALES)
@given(rows=groups())
def test_equals_the_loop(scale, rows):
    got = group_advantages(tensor(rows), scale=scale)
    torch.testing.assert_close(got, tensor(loop_advantages(rows, scale)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", SCALES)
@given(rows=groups())
def test_sums_to_zero_in_each_group_and_is_finite(scale, rows):
    got = group_advantages(tensor(rows), scale=scale)
    assert got.isfinite().all()
    assert got.sum(-1).abs().max() <= 1e-9 * max(1.0, float(got.abs().max()))


def test_hand_values():
    """Rewards 0 and 1: sample deviation sqrt(1/2). Batch 0 1 0 10: mean 2.75, squares 79.75+... = 70.75, over 3."""
    rows = tensor([[0.0, 1.0], [0.0, 10.0]])
    assert group_advantages(rows, eps=0.0)[0].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert group_advantages(rows, scale="none").tolist() == [[-0.5, 0.5], [-5.0, 5.0]]
    deviation = math.sqrt((2.75**2 * 2 + 1.75**2 + 7.25**2) / 3)
    batch = group_advantages(rows, scale="batch", eps=0.0)
    assert batch[1].tolist() == pytest.approx([-5 / deviation, 5 / deviation])


def test_scaling_by_group_and_batch_are_not_swapped():
    """trl#3992: by group both groups count alike, by batch the second counts 10 times as much."""
    rows = tensor([[0.0, 1.0], [0.0, 10.0]])
    by_group, by_batch = (group_advantages(rows, scale=scale, eps=0.0) for scale in ("group", "batch"))
    assert by_group[0].tolist() == pytest.approx(by_group[1].tolist())
    assert (10 * by_batch[0]).tolist() == pytest.approx(by_batch[1].tolist())


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_give_exactly_zero(value, scale):
    rows = tensor([[value] * 7, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    assert torch.equal(group_advantages(rows, scale=scale)[0], torch.zeros(7, dtype=torch.float64))
    assert torch.equal(leave_one_out(rows)[0], torch.zeros(7, dtype=torch.float64))
    assert is_flat(rows).tolist() == [True, False]


def test_rewards_equal_to_rounding_are_equal():
    one, other = 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1
    assert one != other
    assert is_flat(tensor([[one, other]])).tolist() == [True]
    assert group_advantages(tensor([[one, other]])).tolist() == [[0.0, 0.0]]
    assert is_flat(tensor([[0.0, 1e-12], [1e6, 1e6 + 1e-6]])).tolist() == [False, False]


def test_a_large_offset_costs_no_accuracy():
    """Expected in exact fractions of the very numbers given; at 1e6 a plain mean is off by 1e-10."""
    row = [1e6 + small for small in (0.1, 0.2, 0.4, 0.7, 0.35, 0.3, 0.9)]
    mean = sum(map(Fraction, row)) / len(row)
    exact = [float(Fraction(r) - mean) for r in row]
    deviation = math.sqrt(sum(e * e for e in exact) / 6)
    assert group_advantages(tensor([row]), scale="none")[0].tolist() == pytest.approx(exact, rel=0, abs=1e-15)
    for scale in ("group", "batch"):
        got = group_advantages(tensor([row]), scale=scale)[0].tolist()
        assert got == pytest.approx([e / (deviation + 1e-4) for e in exact], rel=0, abs=1e-14)
    assert leave_one_out(tensor([row]))[0].tolist() == pytest.approx([e * 7 / 6 for e in exact], rel=0, abs=1e-15)


def test_fewer_than_two_rewards_teach_nothing():
    rows = tensor([[None, None, None], [None, 4.0, None], [1.0, None, 3.0]])
    assert is_flat(rows).tolist() == [True, True, False]
    for scale in SCALES:
        got = group_advantages(rows, scale=scale)
        assert got[:2].abs().max() == 0
        assert got[2, 1] == 0 and got[2, 0] == -got[2, 2] != 0
    assert leave_one_out(rows).tolist() == [[0, 0, 0], [0, 0, 0], [-2.0, 0, 2.0]]
    single = tensor([[3.0], [4.0]])
    assert [group_advantages(single, scale=s).tolist() for s in SCALES] == [[[0.0], [0.0]]] * 3
    assert leave_one_out(single).tolist() == [[0.0], [0.0]]


def test_unknown_scale():
    with pytest.raises(ConfigError, match="Did you mean 'group'"):
        group_advantages(tensor([[0.0, 1.0]]), scale="groups")


def test_leave_one_out_by_hand():
    assert leave_one_out(tensor([[1.0, 2.0, 6.0]])).tolist() == [[1 - 4.0, 2 - 3.5, 6 - 1.5]]


@given(rows=groups())
def test_leave_one_out_is_the_definition_and_grpo_times_a_factor(rows):
    got = leave_one_out(tensor(rows))
    for row, values, centred in zip(rows, got, group_advantages(tensor(rows), scale="none"), strict=True):
        scored = [r for r in row if r is not None]
        n = len(scored)
        for r, value in zip(row, values.tolist(), strict=True):
            assert value == pytest.approx(0 if r is None or n < 2 else r - (sum(scored) - r) / (n - 1), abs=1e-9)
        if n > 1:  # GRPO without scaling is RLOO times (G - 1) / G
            torch.testing.assert_close(centred, values * (n - 1) / n, rtol=1e-12, atol=1e-12)


# Several reward functions


@given(st.integers(0, 2**32))
def test_without_none_it_is_the_plain_weighted_sum(seed):
    draw = random.Random(seed)
    rows = [[[draw.uniform(-5, 5) for _ in range(3)] for _ in range(4)] for _ in range(2)]
    scale = [draw.uniform(-2, 2) for _ in range(3)]
    expected = [[sum(w * r for w, r in zip(scale, one, strict=True)) for one in group] for group in rows]
    torch.testing.assert_close(combine_rewards(tensor(rows), weights(*scale)), tensor(expected))


def test_a_function_that_does_not_apply_is_neither_for_nor_against():
    """Format reward 1 for all; correctness 5, 7, none: the third counts as 6, not as 0."""
    rows = tensor([[[1.0, 5.0], [1.0, 7.0], [1.0, None]]])
    assert combine_rewards(rows, weights(1.0, 1.0)).tolist() == [[6.0, 8.0, 7.0]]
    assert group_advantages(combine_rewards(rows, weights(1.0, 1.0)), scale="none").tolist() == [[-1.0, 1.0, 0.0]]


def test_functions_for_different_tasks():
    """Each function applies to one group only: the sum is that one's reward; a row with none stays NaN."""
    rows = tensor([[[1.0, None], [2.0, None]], [[None, 30.0], [None, None]]])
    got = combine_rewards(rows, weights(2.0, 0.1))
    assert got[0].tolist() == [2.0, 4.0]
    assert got[1, 0] == 3.0 and got[1, 1].isnan()


@given(st.lists(st.tuples(reward, reward), min_size=2, max_size=5))
def test_adding_a_constant_to_a_function_changes_no_advantage(rows):
    """What None means must not depend on where a function's zero is."""
    moved = [(a, None if b is None else b + 1000) for a, b in rows]
    one, other = (
        group_advantages(combine_rewards(tensor([[list(r) for r in case]]), weights(1.0, 0.5)), scale="none")
        for case in (rows, moved)
    )
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def loop_gdpo(rows, scale: list[float], eps: float = 1e-4) -> list[list[float]]:
    per_function = [loop_advantages([[one[k] for one in g] for g in rows], "group", eps) for k in range(len(scale))]
    sums = [
        [sum(w * per_function[k][p][g] for k, w in enumerate(scale)) for g in range(len(group))]
        for p, group in enumerate(rows)
    ]
    scored = [s for p, g in enumerate(rows) for s, one in zip(sums[p], g, strict=True) if set(one) != {None}]
    deviation = statistics.stdev(scored) if len(scored) > 1 else 0.0
    return [[s / (deviation + eps) for s in row] for row in sums]


@given(st.lists(st.lists(st.tuples(reward, reward), min_size=3, max_size=3), min_size=1, max_size=3))
def test_gdpo_equals_the_loop(rows):
    got = gdpo_advantages(tensor([[list(one) for one in g] for g in rows]), weights(1.0, 0.3))
    torch.testing.assert_close(got, tensor(loop_gdpo(rows, [1.0, 0.3])), rtol=1e-7, atol=1e-7)
    assert got.isfinite().all()
    assert got.sum(-1).abs().max() <= 1e-9 * max(1.0, float(got.abs().max()))


def test_gdpo_keeps_rewards_apart_that_their_sum_confuses():
    """The paper's example: (1, 0) twice of two against (1, 0) and (0, 1): equal sums, different groups."""
    rows = tensor([[[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 0.0]]])
    summed = group_advantages(combine_rewards(rows, weights(1.0, 1.0)), eps=0.0)
    apart = gdpo_advantages(rows, weights(1.0, 1.0), eps=0.0)
    assert summed[0].tolist() == pytest.approx(summed[1].tolist())
    assert apart[0, 1] == pytest.approx(2 * apart[1, 1].item())


# Of the whole round


@given(rows=groups())
def test_whiten_has_mean_zero_and_unit_deviation(rows):
    values = tensor(rows)
    scored = ~values.isnan()
    got = whiten(values.nan_to_num(), scored, eps=0.0)
    flat = [r for row in rows for r in row if r is not None]
    if len(flat) > 1 and max(flat) - min(flat) > 1e-3:
        assert got[scored].mean().item() == pytest.approx(0, abs=1e-9)
        assert statistics.stdev(got[scored].tolist()) == pytest.approx(1)
    assert got[~scored].abs().sum() == 0


def test_whiten_leaves_flat_groups_at_zero():
    got = whiten(leave_one_out(tensor([[0.1, 0.1, 0.1], [1.0, 2.0, 6.0]])))
    assert got[0].abs().max() < 1e-12 and got[1, 2] > 0.5


def test_shaped_rewards_clips_before_the_penalty():
    got = shaped_rewards(tensor([[7.0, -9.0, None]]), tensor([[3.0, 3.0, 3.0]]), beta=0.5, reward_clip_range=(-1, 2))
    assert got[0, :2].tolist() == [0.5, -2.5] and got[0, 2].isnan()
    assert shaped_rewards(tensor([[7.0]]), beta=0.5).tolist() == [[7.0]]
