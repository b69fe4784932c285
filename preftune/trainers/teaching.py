"""What a student is told by a teacher that sees more: both are asked about the same tokens, each after its own prompt.

The teacher is asked once a micro-batch, without gradient; distributions over the vocabulary exist for a chunk alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from preftune.losses.distillation import alpha_divergence, sampled_token, topk_divergence
from preftune.models.attention import Layout
from preftune.models.distributions import Recall, compared_scores, logps_at, recalled, top_scores
from preftune.models.logprobs import token_scores
from preftune.models.reference import LiveReference
from preftune.trainers.groups import Group, in_order, teacher_groups, tree_of
from preftune.trainers.learning import as_rows
from preftune.types import PolicyTokens, PromptTree, TokenScores


@dataclass(frozen=True)
class Lesson:
    """How student and teacher are asked and compared; fields as the options of `DistillationConfig`.

    Attributes:
        max_tokens: Most flat tokens of one forward of the teacher; None: all at once.
        everywhere: The teacher is asked about every completion, and its answer used where there is a teacher: ranks
            whose weights are sharded must take part in the same forwards.
    """

    mode: str
    alpha: float
    topk: int | None
    add_tail: bool
    temperature: float
    layout: Layout
    max_tokens: int | None
    everywhere: bool = False


def taught_tokens(
    groups: Sequence[Group], model: nn.Module, teacher: LiveReference, lesson: Lesson, *, on_policy: bool, device: Any
) -> tuple[PolicyTokens, TokenScores]:
    """What a loss sees of the groups, with the divergence from the teacher at each token of those that have one."""
    tree = tree_of(groups).to(device)
    asked = teacher_groups(groups, everywhere=lesson.everywhere)
    taught = _taught_tokens(groups)
    told = np.ones_like(taught) if lesson.everywhere else taught
    if not asked:
        scores = token_scores(
            model, tree, layout=lesson.layout, temperature=lesson.temperature, outputs=frozenset({"entropy"})
        )
        return as_rows(groups, tree, scores, on_policy=on_policy, divergence=torch.zeros_like(scores.logps)), scores
    trees = [tree_of(few).to(device) for few in in_order(asked, lesson.max_tokens)]
    place = torch.from_numpy(np.flatnonzero(told)).to(device)  # of each token that the teacher is asked about
    compare = {"sampled_token": _by_sample, "topk_logits": _by_top, "full_logits": _by_all}[lesson.mode]
    scores, values = compare(model, tree, Asked(teacher, model, trees, lesson), place, lesson)
    values = values.where(torch.from_numpy(taught).to(device), 0.0)
    return as_rows(groups, tree, scores, on_policy=on_policy, divergence=values), scores


@dataclass(frozen=True)
class Asked:
    """The teacher, and what it is asked about, in one or several trees whose scored tokens follow one another."""

    teacher: LiveReference
    policy: nn.Module
    trees: Sequence[PromptTree]
    lesson: Lesson

    @torch.no_grad()
    def each(self, ask: Callable[[nn.Module, PromptTree, int, Layout], Any]) -> list[Any]:
        """`ask(module, tree, number of its first scored token, layout)` of each tree."""
        starts = np.cumsum([0, *(len(tree.target_index) for tree in self.trees)])
        with self.teacher.as_reference(self.policy) as module:
            layout = self.teacher.layout_for(self.lesson.layout)
            return [ask(module, tree, int(start), layout) for tree, start in zip(self.trees, starts)]


def _by_sample(
    model: nn.Module, tree: PromptTree, asked: Asked, place: Tensor, lesson: Lesson
) -> tuple[TokenScores, Tensor]:
    heat = lesson.temperature
    told = asked.each(lambda module, part, _, layout: token_scores(module, part, layout=layout, temperature=heat).logps)
    scores = token_scores(model, tree, layout=lesson.layout, outputs=frozenset({"entropy"}), temperature=heat)
    return scores, _spread(scores.logps, place, sampled_token(scores.logps[place], torch.cat(told)))


def _by_top(
    model: nn.Module, tree: PromptTree, asked: Asked, place: Tensor, lesson: Lesson
) -> tuple[TokenScores, Tensor]:
    assert lesson.topk is not None
    heat = lesson.temperature
    top = top_scores(model, tree, lesson.topk, layout=lesson.layout, temperature=heat)
    ids_Tk = top.ids_Tk[place]

    def ask(module: nn.Module, part: PromptTree, start: int, layout: Layout) -> Tensor:
        return logps_at(module, part, ids_Tk[start : start + len(part.target_index)], layout=layout, temperature=heat)

    teacher_Tk = torch.cat(asked.each(ask))
    values = topk_divergence(top.logps_Tk[place], teacher_Tk, alpha=lesson.alpha, add_tail=lesson.add_tail)
    return top.scores, _spread(top.scores.logps, place, values)


def _by_all(
    model: nn.Module, tree: PromptTree, asked: Asked, place: Tensor, lesson: Lesson
) -> tuple[TokenScores, Tensor]:
    heat = lesson.temperature
    parts: list[Recall] = asked.each(
        lambda module, part, _, layout: recalled(module, part, layout=layout, temperature=heat)
    )
    recall = Recall(torch.cat([part.hidden_TH for part in parts]), parts[0].head)
    number_T = torch.zeros_like(tree.target_index).index_put((place,), torch.arange(len(place), device=place.device))

    def compare(logps_tV: Tensor, at: slice) -> Tensor:
        with asked.teacher.as_reference(asked.policy):
            teacher_tV = recall.logps(number_T[at]).to(logps_tV.device)
        return alpha_divergence(logps_tV, teacher_tV, alpha=lesson.alpha)

    return compared_scores(model, tree, compare, layout=lesson.layout, temperature=heat)


def _spread(logps_T: Tensor, place: Tensor, values: Tensor) -> Tensor:
    """`[T]`: the values at their places, 0 elsewhere; gradients pass."""
    return torch.zeros_like(logps_T).index_put((place,), values)


def _taught_tokens(groups: Sequence[Group]) -> np.ndarray:
    """`[T]` whether the completion of each scored token has a teacher."""
    rows = [(i in group.taught, int(group.masks[i].sum())) for group in groups for i in range(group.rows)]
    return np.repeat([is_taught for is_taught, _ in rows], [tokens for _, tokens in rows])
