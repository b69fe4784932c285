"""Completions of one prompt with all that is known of them, and how they become trees and rows of numbers.

A group is the unit that is dealt to micro-steps: its prompt is computed once wherever its completions are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preftune.data.tree import build_tree
from preftune.types import PromptTree


@dataclass(frozen=True)
class Group:
    """Completions of one prompt.

    Attributes:
        prompt_ids: The prompt.
        completion_ids: R lists of token ids.
        masks: R arrays of bool: the tokens that the policy drew and learns from.
        advantages: `[R]`, float64.
        numbers: R numbers of the completions among those of this rank's round.
        logps: Per-token log-probabilities by whose they are ("sampler", "old", "ref"): R arrays, one value for each
            token whose mask is set.
        teacher_prompts: What a teacher is asked instead of the prompt: R lists of token ids, empty for a completion
            that has no teacher; no list at all where none has.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[Sequence[int]]
    masks: Sequence[np.ndarray]
    advantages: np.ndarray
    numbers: Sequence[int]
    logps: Mapping[str, list[np.ndarray]] = field(default_factory=dict)
    teacher_prompts: Sequence[Sequence[int]] = ()

    @property
    def rows(self) -> int:
        return len(self.completion_ids)

    @property
    def scored_tokens(self) -> int:
        return int(sum(mask.sum() for mask in self.masks))

    @property
    def flat_tokens(self) -> int:
        """Tokens really forwarded."""
        return len(self.prompt_ids) + sum(map(len, self.completion_ids))

    @property
    def sequence_tokens(self) -> int:
        """Tokens of all rows, the prompt counted with each."""
        return len(self.prompt_ids) * self.rows + sum(map(len, self.completion_ids))

    @property
    def is_flat(self) -> bool:
        """Whether all advantages are 0, so that the policy gradient is exactly 0."""
        return not np.any(self.advantages)

    @property
    def taught(self) -> list[int]:
        """The completions that have a teacher."""
        return [i for i, prompt in enumerate(self.teacher_prompts) if len(prompt)]

    def select(self, rows: Sequence[int]) -> Group:
        """The group of some of its completions."""
        return Group(
            self.prompt_ids,
            [self.completion_ids[i] for i in rows],
            [self.masks[i] for i in rows],
            self.advantages[list(rows)],
            [self.numbers[i] for i in rows],
            {name: [values[i] for i in rows] for name, values in self.logps.items()},
            [self.teacher_prompts[i] for i in rows] if self.teacher_prompts else (),
        )

    def with_logps(self, name: str, by_number: Mapping[int, np.ndarray]) -> Group:
        """The group with another kind of log-probabilities, given by the number of the completion."""
        return replace(self, logps={**self.logps, name: [by_number[n] for n in self.numbers]})

    def with_teacher_prompts(self, by_number: Mapping[int, Sequence[int]]) -> Group:
        """The group with what the teacher is asked of each completion; of those that are not named, nothing."""
        return replace(self, teacher_prompts=[by_number.get(n, ()) for n in self.numbers])

    def with_advantages(self, by_number: np.ndarray) -> Group:
        return replace(self, advantages=by_number[list(self.numbers)])

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        teacher = {
            "teacher_prompts": _flat_ids(self.teacher_prompts),
            "teacher_lengths": _lengths(self.teacher_prompts),
        }
        return {
            "prompt_ids": torch.tensor(self.prompt_ids),
            "completion_ids": _flat_ids(self.completion_ids),
            "lengths": _lengths(self.completion_ids),
            "masks": torch.from_numpy(np.concatenate(self.masks)),
            "advantages": torch.from_numpy(self.advantages),
            "numbers": list(self.numbers),
            "logps": {name: torch.from_numpy(np.concatenate(values)) for name, values in self.logps.items()},
            **(teacher if self.teacher_prompts else {}),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Group:
        masks = np.split(state["masks"].numpy(), np.cumsum(state["lengths"])[:-1])
        scored = np.cumsum([mask.sum() for mask in masks])[:-1]
        return cls(
            state["prompt_ids"].tolist(),
            _lists(state["completion_ids"], state["lengths"]),
            masks,
            state["advantages"].numpy(),
            state["numbers"],
            {name: np.split(values.numpy(), scored) for name, values in state["logps"].items()},
            _lists(state["teacher_prompts"], state["teacher_lengths"]) if "teacher_prompts" in state else (),
        )


def _flat_ids(lists: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([token for ids in lists for token in ids], dtype=torch.int64)


def _lengths(lists: Sequence[Sequence[int]]) -> list[int]:
    return [len(ids) for ids in lists]


def _lists(flat: Tensor, lengths: Sequence[int]) -> list[list[int]]:
    return [part.tolist() for part in np.split(flat.numpy(), np.cumsum(lengths)[:-1])]


def cut_into(groups: Iterable[Group], rows: int) -> list[list[Group]]:
    """Deals completions in order into parts of `rows` each; a group is divided where a part ends within it."""
    parts: list[list[Group]] = [[]]
    room = rows
    for group in groups:
        start = 0
        while start < group.rows:
            if room == 0:
                parts.append([])
                room = rows
            stop = min(group.rows, start + room)
            parts[-1].append(group.select(range(start, stop)))
            room -= stop - start
            start = stop
    return parts


def within_budget(groups: Sequence[Group], max_tokens: int | None) -> list[list[Group]]:
    """Groups in parts of at most `max_tokens` flat tokens, the largest dealt first; groups above that are divided.

    Where all fit they stay one part, in order. A single completion that exceeds the budget with its prompt is a part of
    its own.
    """
    if max_tokens is None or sum(group.flat_tokens for group in groups) <= max_tokens:
        return [list(groups)]
    pieces = [piece for group in groups for piece in _pieces(group, max_tokens)]
    bins: list[list[Group]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda g: -g.flat_tokens):
        place = next((i for i, left in enumerate(room) if left >= piece.flat_tokens), None)
        if place is None:
            bins.append([piece])
            room.append(max_tokens - piece.flat_tokens)
        else:
            bins[place].append(piece)
            room[place] -= piece.flat_tokens
    return bins


def in_order(groups: Sequence[Group], max_tokens: int | None) -> list[list[Group]]:
    """Groups in parts of at most `max_tokens` flat tokens as `within_budget`, the completions in their order."""
    if max_tokens is None:
        return [list(groups)]
    parts: list[list[Group]] = [[]]
    room = max_tokens
    for piece in (piece for group in groups for piece in _pieces(group, max_tokens)):
        if parts[-1] and piece.flat_tokens > room:
            parts.append([])
            room = max_tokens
        parts[-1].append(piece)
        room -= piece.flat_tokens
    return parts


def teacher_groups(groups: Sequence[Group], *, everywhere: bool = False) -> list[Group]:
    """The completions that have a teacher after its prompt, in their order; neighbours with one prompt are one group.

    Args:
        everywhere: Completions without a teacher too, after the prompt that they have.
    """
    rows: list[tuple[list[int], Group]] = []
    for group in groups:
        for i in range(group.rows) if everywhere else group.taught:
            prompt = group.teacher_prompts[i] if i in group.taught else group.prompt_ids
            rows.append((list(prompt), group.select([i])))
    made = []
    for prompt, same in groupby(rows, lambda row: row[0]):
        one = [row for _, row in same]
        ids, masks = [r.completion_ids[0] for r in one], [r.masks[0] for r in one]
        made.append(Group(prompt, ids, masks, np.zeros(len(one)), [r.numbers[0] for r in one]))
    return made


def _pieces(group: Group, max_tokens: int) -> list[Group]:
    pieces: list[list[int]] = [[]]
    used = len(group.prompt_ids)
    for i, ids in enumerate(group.completion_ids):
        if pieces[-1] and used + len(ids) > max_tokens:
            pieces.append([])
            used = len(group.prompt_ids)
        pieces[-1].append(i)
        used += len(ids)
    return [group.select(rows) for rows in pieces]


def tree_of(groups: Sequence[Group]) -> PromptTree:
    """All groups as one tree; branch b is the b-th completion, groups in order."""
    return build_tree(
        [group.prompt_ids for group in groups],
        [group.completion_ids for group in groups],
        [list(group.masks) for group in groups],
    )


@dataclass(frozen=True)
class RowIndex:
    """Where the scored tokens of a tree stand in rows `[B, T]`.

    Attributes:
        branch: `[tokens]` row of each.
        place: `[tokens]` its number among the scored tokens of its row.
        shape: B and T, the longest row (at least 1).
    """

    branch: Tensor
    place: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, branch_index: Tensor, num_branches: int, lengths: Sequence[int]) -> RowIndex:
        starts = torch.tensor([0, *np.cumsum(lengths)[:-1]], device=branch_index.device)
        place = torch.arange(len(branch_index), device=branch_index.device) - starts[branch_index]
        return cls(branch_index, place, (num_branches, max(1, *lengths)))

    def rows(self, values_T: Tensor) -> Tensor:
        """`[B, T]`: the values in their rows, 0 elsewhere; gradients pass."""
        return values_T.new_zeros(self.shape).index_put((self.branch, self.place), values_T)


def row_index(groups: Sequence[Group], tree: PromptTree) -> RowIndex:
    lengths = [int(mask.sum()) for group in groups for mask in group.masks]
    return RowIndex.of(tree.branch_index, tree.num_branches, lengths)


def stored_values(groups: Sequence[Group], name: str, device: Any) -> Tensor | None:
    """`[tokens]` of one kind of stored log-probabilities in the order of a tree's scored tokens, float32."""
    if not all(name in group.logps for group in groups):
        return None
    values = np.concatenate([row for group in groups for row in group.logps[name]])
    return torch.from_numpy(values.astype(np.float32)).to(device)


def by_number(groups: Sequence[Group], values_T: Tensor) -> dict[int, np.ndarray]:
    """Per-token values of a tree, one array a completion, by its number."""
    lengths = [int(mask.sum()) for group in groups for mask in group.masks]
    parts = np.split(values_T.detach().float().cpu().numpy(), np.cumsum(lengths)[:-1])
    return dict(zip([n for group in groups for n in group.numbers], parts, strict=True))
