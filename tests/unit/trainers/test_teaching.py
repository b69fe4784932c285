"""Student and teacher asked about the same tokens: in one forward or several, about some completions or all of them.

The teacher's prompts are of unlike length and order, so that a mix-up of two completions would show.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from preftune.models.reference import FrozenCopy
from preftune.trainers.groups import Group, in_order, teacher_groups
from preftune.trainers.teaching import Lesson, taught_tokens

TEACHER = [[9, 8, 7, 6], [], [9, 8, 7, 6], [5], [3, 3], [3, 3]]
COMPLETIONS = [[11, 12, 13], [14], [15, 16], [17, 18, 19, 20], [21], [22, 23]]


def groups() -> list[Group]:
    """Two prompts of four and two completions; one has no teacher, and one token is not learned from."""
    masks = [np.ones(len(ids), bool) for ids in COMPLETIONS]
    masks[3][1] = False
    made = []
    for prompt, rows in (([1, 2], range(4)), ([4], range(4, 6))):
        made.append(
            Group(
                prompt, [COMPLETIONS[i] for i in rows], [masks[i] for i in rows], np.zeros(len(rows)), list(rows), {},
                [TEACHER[i] for i in rows],
            )
        )  # fmt: skip
    return made


def rows_of(some: list[Group]) -> list[tuple[tuple[int, ...], int]]:
    return [(tuple(g.prompt_ids), n) for g in some for n in g.numbers]


def test_who_is_asked_about_what():
    """In the order of the completions, which is not that of the prompts' lengths; neighbours share a prompt."""
    asked = teacher_groups(groups())
    assert rows_of(asked) == [(tuple(TEACHER[n]), n) for n in (0, 2, 3, 4, 5)]
    assert [g.rows for g in asked] == [2, 1, 2]
    assert [m.tolist() for m in asked[1].masks] == [[True, False, True, True]]
    whole = teacher_groups(groups(), everywhere=True)
    assert rows_of(whole) == [(tuple(TEACHER[n] or [1, 2]), n) for n in range(6)]


@pytest.mark.parametrize("budget", [1, 8, 12, 100, None])
def test_parts_keep_the_order(budget):
    parts = in_order(teacher_groups(groups()), budget)
    assert [row for part in parts for row in rows_of(part)] == rows_of(teacher_groups(groups()))
    for part in parts:
        assert budget is None or sum(g.flat_tokens for g in part) <= budget or sum(g.rows for g in part) == 1


@pytest.mark.parametrize("mode", ["sampled_token", "topk_logits", "full_logits"])
def test_one_forward_or_several_some_or_all(tiny_model, mode):
    """The same divergences; 0 exactly where there is no teacher."""
    model, teacher = tiny_model(), FrozenCopy(tiny_model(seed=1))
    lesson = Lesson(mode, 1.0, 9, True, 0.8, "tree", None)
    found = []
    for changes in ({}, {"max_tokens": 8}, {"everywhere": True}, {"layout": "padded"}):
        tokens, _ = taught_tokens(
            groups(), model, teacher, replace(lesson, **changes), on_policy=True, device=torch.device("cpu")
        )
        found.append(tokens.divergence)
    for values in found:
        torch.testing.assert_close(values, found[0], rtol=1e-4, atol=1e-5)
        assert values[1].tolist() == [0.0] * values.shape[1]
        assert values.requires_grad
    assert (found[0][[0, 2, 3, 4, 5], 0].abs() > 1e-4).all()


def test_without_any_teacher(tiny_model):
    none = [replace(group, teacher_prompts=()) for group in groups()]
    lesson = Lesson("full_logits", 0.5, None, False, 1.0, "tree", None)
    tokens, _ = taught_tokens(
        none, tiny_model(), FrozenCopy(tiny_model(seed=1)), lesson, on_policy=True, device=torch.device("cpu")
    )
    assert tokens.divergence is not None and tokens.divergence.abs().sum() == 0
    assert tokens.logps.requires_grad
