"""Groups of completions: however they are cut, every completion is there once with its own numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.trainers.groups import Group, by_number, cut_into, row_index, stored_values, tree_of, within_budget
from preftune.trainers.learning import learning_parts, stand_in, with_tokens
from preftune.trainers.rounds import Division, groups_of
from preftune.types import Rollouts


def group(prompt, completions, start=0, advantages=None, masks=None):
    masks = masks or [np.ones(len(ids), bool) for ids in completions]
    rows = len(completions)
    logps = [np.arange(mask.sum(), dtype=np.float32) + 10 * n for n, mask in enumerate(masks, start)]
    advantages = np.arange(start, start + rows, dtype=float) if advantages is None else np.array(advantages, float)
    return Group(prompt, completions, masks, advantages, list(range(start, start + rows)), {"old": logps})


completion = st.lists(st.integers(0, 9), min_size=1, max_size=5)
shapes = st.lists(st.lists(completion, min_size=1, max_size=4), min_size=1, max_size=4)


def made(shape) -> list[Group]:
    starts = np.cumsum([0, *map(len, shape)])
    return [group([7, n], completions, start) for n, (completions, start) in enumerate(zip(shape, starts))]


def contents(groups):
    return sorted(
        (number, tuple(g.prompt_ids), tuple(ids), float(a), tuple(old))
        for g in groups
        for number, ids, a, old in zip(g.numbers, g.completion_ids, g.advantages, g.logps["old"], strict=True)
    )


@given(shapes, st.integers(1, 5), st.integers(3, 20))
def test_cutting_loses_nothing(shape, rows, budget):
    groups = made(shape)
    parts = cut_into(groups, rows)
    assert contents(g for part in parts for g in part) == contents(groups)
    assert [sum(g.rows for g in part) for part in parts[:-1]] == [rows] * (len(parts) - 1)
    bins = within_budget(groups, budget)
    assert contents(g for part in bins for g in part) == contents(groups)
    for part in bins:
        assert sum(g.flat_tokens for g in part) <= budget or sum(g.rows for g in part) == 1


@given(shapes)
def test_a_checkpoint_gives_the_group_back(shape):
    for g in made(shape):
        again = Group.from_state(g.state_dict())
        assert contents([again]) == contents([g])
        assert all(np.array_equal(a, b) for a, b in zip(again.masks, g.masks))


def test_rows_of_a_tree():
    """Two groups; the middle completion has a masked token; values come back at their own places."""
    masks = [np.array([True, False, True]), np.array([True])]
    groups = [group([1], [[5, 6, 7], [8]], masks=masks), group([2, 3], [[9, 4]], start=2)]
    tree = tree_of(groups)
    index = row_index(groups, tree)
    assert index.rows(tree.target_ids.float()).tolist() == [[5, 7], [8, 0], [9, 4]]
    assert index.rows(stored_values(groups, "old", "cpu")).tolist() == [[0, 1], [10, 0], [20, 21]]
    assert stored_values(groups, "ref", "cpu") is None
    found = by_number(groups, torch.arange(5.0))
    assert {n: values.tolist() for n, values in found.items()} == {0: [0, 1], 1: [2], 2: [3, 4]}


def has_signal(g: Group) -> bool:
    return not g.is_flat


def test_groups_without_signal_are_looked_at_first():
    flat, other = group([1], [[5], [6]], advantages=[0, 0]), group([2], [[7], [8]], start=2, advantages=[1, -1])
    parts = learning_parts([flat, other], has_gradient=has_signal, max_tokens=None)
    assert [(contents(few), learns) for few, learns in parts] == [(contents([flat]), False), (contents([other]), True)]
    assert learning_parts([flat, other], has_gradient=lambda _: True, max_tokens=None) == [([flat, other], True)]


def test_where_no_group_has_a_signal_one_completion_takes_the_step():
    flat = [group([1], [[5, 5], [6]], advantages=[0, 0]), group([2], [[7]], start=2, advantages=[0])]
    parts = learning_parts(flat, has_gradient=has_signal, max_tokens=None)
    assert [sum(g.rows for g in few) for few, learns in parts if learns] == [1]
    assert contents(g for few, _ in parts for g in few) == contents(flat)


def test_nothing_to_score():
    silent = group([1], [[5, 6]], masks=[np.zeros(2, bool)])
    assert with_tokens([silent]) == []
    assert stand_in([silent]).masks[0].tolist() == [True, False]


def test_neighbouring_units_of_one_prompt_are_one_group():
    rollouts = Rollouts(
        prompt_ids=[[1], [1], [2]],
        completion_ids=[[5], [6], [7, 7], [8], [9], [4]],
        finish_reasons=["stop", "stop", "length", "stop", "stop", "stop"],
        logps=[[-1.0], [-2.0], [-3.0, -4.0], [-5.0], [-6.0], [-7.0]],
    )
    first, second = groups_of(rollouts, [0, 0, 1], mask_truncated=True)
    assert first.numbers == [0, 1, 2, 3] and second.numbers == [4, 5]
    assert [mask.tolist() for mask in first.masks] == [[True], [True], [False, False], [True]]
    assert [values.tolist() for values in first.logps["sampler"]] == [[-1.0], [-2.0], [], [-5.0]]
    whole = groups_of(rollouts, [0, 0, 1], mask_truncated=False)[0]
    assert whole.logps["sampler"][2] == pytest.approx([-3.0, -4.0])


@pytest.mark.parametrize(
    ("batch", "steps", "samples", "world"), [(4, 2, 4, 2), (2, 4, 4, 2), (6, 2, 4, 2), (4, 1, 8, 2)]
)
def test_a_round_is_divided_alike_for_any_number_of_ranks(batch, steps, samples, world):
    """Every completion has one owner; gathered rows find their places; and steps hold the same rows for any world."""
    size = batch * steps * world
    prompts = size // samples

    def division(rank, world, batch):
        args = SimpleNamespace(
            process_index=rank, world_size=world, per_device_train_batch_size=batch,
            resolved_generation_batch_size=size, num_generations=samples,
        )  # fmt: skip
        return Division.of(args, prompts)

    ranks = [division(rank, world, batch) for rank in range(world)]
    gathered = np.concatenate([d.own for d in ranks])
    assert gathered[ranks[0].order].tolist() == list(range(size))
    for d in ranks:
        rows = [prompt * samples + part * d.size + g for prompt, part in d.units for g in range(d.size)]
        assert rows == d.own.tolist()
    alone = division(0, 1, batch * world).own
    period = math.lcm(batch, ranks[0].size)  # rows of a rank after which both have come equally far
    for start in range(0, batch * steps, period):
        together = sorted(n for d in ranks for n in d.own[start : start + period])
        assert together == sorted(alone[start * world : (start + period) * world])
