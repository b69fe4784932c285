"""`PromptTree`s: flat order, positions, what predicts what, selections and splits.

Compared with a loop over tokens that follows the definition in `preftune.types`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.data.tree import build_tree, scored_lengths, select_branch, select_prompts, split_by_tokens
from preftune.types import TreeImages

ids = st.lists(st.integers(0, 99), max_size=4)
branches = st.lists(st.tuples(ids.filter(len), st.integers(0, 15)), min_size=1, max_size=3)
forests = st.lists(st.tuples(ids, branches), min_size=1, max_size=4)


def by_definition(prompts, completions, masks):
    """Flat ids and positions; (predicting, target, branch) of each scored token."""
    flat, positions, scored = [], [], []
    branch = 0
    for prompt, answers, marks in zip(prompts, completions, masks):
        start = len(flat)
        flat += prompt
        positions += range(len(prompt))
        for answer, mark in zip(answers, marks):
            for place, token in enumerate(answer):
                previous = len(flat) - 1 if place else start + len(prompt) - 1
                predicted = bool(prompt) or place > 0
                if mark[place] and predicted:
                    scored.append((previous, len(flat), branch))
                flat.append(token)
                positions.append(len(prompt) + place)
            branch += 1
    return flat, positions, scored


def parts(forest):
    prompts = [prompt for prompt, _ in forest]
    completions = [[answer for answer, _ in answers] for _, answers in forest]
    masks = [[[pattern >> place & 1 for place in range(len(answer))] for answer, pattern in b] for _, b in forest]
    return prompts, completions, masks


def all_scored(completions):
    return [[[1] * len(answer) for answer in answers] for answers in completions]


def same(one, other):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(vars(one).values(), vars(other).values())
    )


@given(forests)
def test_trees_follow_the_definition(forest):
    prompts, completions, masks = parts(forest)
    tree = build_tree(prompts, completions, masks)
    flat, positions, scored = by_definition(prompts, completions, masks)
    assert tree.input_ids.tolist() == flat
    assert tree.position_ids.tolist() == positions
    got = zip(tree.predict_index.tolist(), tree.target_index.tolist(), tree.branch_index.tolist())
    assert list(got) == scored
    assert tree.layout == tuple((len(p), tuple(map(len, b))) for p, b in zip(prompts, completions))
    everything = build_tree(prompts, completions)
    assert same(everything, build_tree(prompts, completions, all_scored(completions)))


@given(forests, st.data())
def test_selections_are_trees_of_the_selected(forest, data):
    prompts, completions, masks = parts(forest)
    chosen = data.draw(st.lists(st.sampled_from(range(len(forest))), min_size=1, unique=True))
    for marks in (masks, all_scored(completions)):
        selected = select_prompts(build_tree(prompts, completions, marks), chosen)
        wanted = build_tree(*([part[p] for p in chosen] for part in (prompts, completions, marks)))
        assert same(selected, wanted)


@given(
    st.lists(
        st.tuples(ids, st.lists(st.tuples(ids.filter(len), st.integers(0, 15)), min_size=2, max_size=2)), min_size=1
    )
)
def test_one_branch_of_each_prompt(forest):
    prompts, completions, masks = parts(forest)
    for marks in (masks, all_scored(completions)):
        tree = build_tree(prompts, completions, marks)
        for number in range(2):
            wanted = build_tree(prompts, [[b[number]] for b in completions], [[m[number]] for m in marks])
            assert same(select_branch(tree, number), wanted)


@given(forests)
def test_what_the_layout_says_of_scored_tokens(forest):
    """Their numbers, counted in the tree, or nothing where a mask leaves out what could be scored."""
    prompts, completions, masks = parts(forest)
    for marks in (masks, all_scored(completions)):
        tree = build_tree(prompts, completions, marks)
        counted = torch.bincount(tree.branch_index, minlength=tree.num_branches).tolist()
        most = [len(answer) - (not prompt) for prompt, b in zip(prompts, completions) for answer in b]
        lengths = scored_lengths(tree)
        assert (lengths is not None) == (counted == most)
        assert lengths is None or sum(lengths, []) == counted


@given(forests, st.integers(1, 20))
def test_splits_have_every_prompt_once_and_fit(forest, budget):
    prompts, completions, masks = parts(forest)
    tree = build_tree(prompts, completions, masks)
    sizes = [n + sum(b) for n, b in tree.layout]
    groups = split_by_tokens(tree, budget)
    assert sorted(p for group in groups for p in group) == list(range(len(forest)))
    assert all(group == sorted(group) for group in groups)
    assert all(len(group) == 1 or sum(sizes[p] for p in group) <= budget for group in groups)
    assert split_by_tokens(tree, None) == [list(range(len(forest)))]


def test_wrong_trees():
    with pytest.raises(ValueError, match="2 prompts and 1 branch lists"):
        build_tree([[1], [2]], [[[3]]])
    with pytest.raises(ValueError, match="wanted one non-empty list a prompt"):
        build_tree([[1]], [[]])
    with pytest.raises(ValueError, match="prompt 0, branch 0: 2 tokens but 1 mask values"):
        build_tree([[1]], [[[2, 3]]], [[[1]]])


def test_moving_a_tree_moves_all_of_it():
    tree = build_tree([[1, 2]], [[[3], [4, 5]]])
    images = TreeImages(({"pixel_values": torch.zeros(1, 3)},), {"token_type_ids": torch.zeros(5)})
    moved = replace(tree, images=images).to("meta")
    assert moved.layout == tree.layout and moved.images is not None
    assert all(value.is_meta for name, value in vars(moved).items() if name not in ("layout", "images"))
    assert moved.images.prompts[0]["pixel_values"].is_meta and moved.images.tokens["token_type_ids"].is_meta
    assert tree.to("meta").images is None
