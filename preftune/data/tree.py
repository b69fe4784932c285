"""Builds `PromptTree`s: prompts and their branches in one padding-free row.

Nothing here knows an algorithm: SFT gives one branch a prompt, DPO two, GRPO G.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from preftune.types import PromptTree

Ids = Sequence[int] | np.ndarray


def build_tree(
    prompts: Sequence[Ids], branches: Sequence[Sequence[Ids]], masks: Sequence[Sequence[Ids]] | None = None
) -> PromptTree:
    """Lays out prompts and branches as one flat tree.

    Args:
        prompts: P lists of token ids; an empty one is allowed.
        branches: P lists of branches, each a list of token ids; all branches of prompt p follow prompt p.
        masks: Like `branches`, 1 for tokens to score and 0 for the others; None scores every branch token. The first
            token of a branch whose prompt is empty is never scored, whatever its mask.

    Raises:
        ValueError: no branch at all, or lengths of `prompts`, `branches` and `masks` that do not match.

    One fact to check: prompt [1, 2] with branches [3, 4] and [5] has position ids 0 1 2 3 2, targets 3 4 5, and both 3
    and 5 are predicted at flat index 1.
    """
    if len(prompts) != len(branches) or not any(len(b) for b in branches):
        raise ValueError(
            f"got {len(prompts)} prompts and {len(branches)} branch lists; wanted one non-empty list a prompt"
        )
    ids, positions, predict, target, owner, layout = [], [], [], [], [], []
    start = branch = 0
    for p, prompt in enumerate(prompts):
        n = len(prompt)
        prompt_end = start + n - 1
        ids.append(np.asarray(prompt, np.int64))
        positions.append(np.arange(n))
        start += n
        for b, completion in enumerate(branches[p]):
            m = len(completion)
            ids.append(np.asarray(completion, np.int64))
            positions.append(np.arange(n, n + m))
            flat = np.arange(start, start + m)
            previous = flat - 1
            if m:
                previous[0] = prompt_end
            keep = np.ones(m, bool) if masks is None else np.asarray(masks[p][b], bool)
            if len(keep) != m:
                raise ValueError(f"prompt {p}, branch {b}: {m} tokens but {len(keep)} mask values")
            if n == 0 and m:
                keep = keep.copy()
                keep[0] = False
            predict.append(previous[keep])
            target.append(flat[keep])
            owner.append(np.full(int(keep.sum()), branch))
            start += m
            branch += 1
        layout.append((n, tuple(len(c) for c in branches[p])))

    def tensor(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    return PromptTree(tuple(layout), tensor(ids), tensor(positions), tensor(predict), tensor(target), tensor(owner))


def scored_lengths(tree: PromptTree) -> list[list[int]] | None:
    """Scored tokens of each branch of each prompt, read off the layout; None where masks leave some out.

    All tokens of a branch are scored, but for the first after an empty prompt, which nothing predicts.
    """
    lengths = [[max(0, m - (n == 0)) for m in branches] for n, branches in tree.layout]
    return lengths if sum(map(sum, lengths)) == tree.target_index.shape[0] else None


def select_prompts(tree: PromptTree, chosen: Sequence[int]) -> PromptTree:
    """The tree of the prompts `chosen` (numbers 0..P-1, in the given order) with all their branches.

    Branches are renumbered from 0. Scores of a selection equal the same entries of the scores of the whole tree.
    """
    lengths = [n + sum(branches) for n, branches in tree.layout]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    first_branch = np.concatenate([[0], np.cumsum([len(b) for _, b in tree.layout])])
    target, owner = tree.target_index, tree.branch_index
    scored = scored_lengths(tree)
    ends = None if scored is None else np.cumsum([0, *map(sum, scored)]).tolist()
    parts: dict[str, list[torch.Tensor]] = {k: [] for k in ("ids", "pos", "predict", "target", "owner")}
    flat = branch = 0
    for p in chosen:
        lo, hi = int(starts[p]), int(starts[p + 1])
        if ends is not None:
            t_lo, t_hi = ends[p], ends[p + 1]
        else:  # waits for the device: the layout does not say what is scored
            t_lo, t_hi = torch.searchsorted(target, torch.tensor([lo, hi], device=target.device)).tolist()
        parts["ids"].append(tree.input_ids[lo:hi])
        parts["pos"].append(tree.position_ids[lo:hi])
        parts["predict"].append(tree.predict_index[t_lo:t_hi] + (flat - lo))
        parts["target"].append(target[t_lo:t_hi] + (flat - lo))
        parts["owner"].append(owner[t_lo:t_hi] + (branch - int(first_branch[p])))
        flat += hi - lo
        branch += len(tree.layout[p][1])
    cat = {k: torch.cat(v) for k, v in parts.items()}
    layout = tuple(tree.layout[p] for p in chosen)
    images = None
    if tree.images is not None:
        flat_index = torch.cat([torch.arange(int(starts[p]), int(starts[p + 1]), device=target.device) for p in chosen])
        images = tree.images.select(chosen, flat_index)
    return PromptTree(layout, cat["ids"], cat["pos"], cat["predict"], cat["target"], cat["owner"], images)


def select_branch(tree: PromptTree, number: int) -> PromptTree:
    """The tree of all prompts with branch `number` of each and no other.

    Every prompt has such a branch. Scores equal the same entries of the scores of the whole tree.
    """
    lengths = [m for n, branches in tree.layout for m in (n, *branches)]
    kept = [b in (-1, number) for _, branches in tree.layout for b in range(-1, len(branches))]
    owners = [p if b == number else -1 for p, (_, branches) in enumerate(tree.layout) for b in range(len(branches))]
    keep = np.repeat(kept, lengths)

    def there(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(tree.input_ids.device, non_blocking=True)

    flat_index, place_N = there(np.flatnonzero(keep)), there(np.cumsum(keep) - 1)
    owner_T = there(np.array(owners, np.int64))[tree.branch_index]
    scored = scored_lengths(tree)
    if scored is not None:
        kept_T = there(np.flatnonzero(np.repeat(np.array(owners) >= 0, [m for row in scored for m in row])))
    else:  # waits for the device: the layout does not say what is scored
        kept_T = (owner_T >= 0).nonzero()[:, 0]
    return PromptTree(
        tuple((n, (branches[number],)) for n, branches in tree.layout),
        tree.input_ids[flat_index],
        tree.position_ids[flat_index],
        place_N[tree.predict_index[kept_T]],
        place_N[tree.target_index[kept_T]],
        owner_T[kept_T],
        None if tree.images is None else tree.images.select(range(tree.num_prompts), flat_index),
    )


def split_by_tokens(tree: PromptTree, max_tokens: int | None) -> list[list[int]]:
    """Deals prompts, longest first, into groups of at most `max_tokens` flat tokens each.

    A prompt longer than the budget gets a group of its own. None: one group with all prompts in order. Each group keeps
    the original order of its prompts.
    """
    lengths = [n + sum(branches) for n, branches in tree.layout]
    if max_tokens is None or sum(lengths) <= max_tokens:
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    room: list[int] = []
    for p in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        best = min((g for g in range(len(groups)) if room[g] >= lengths[p]), key=lambda g: room[g], default=None)
        if best is None:
            groups.append([p])
            room.append(max_tokens - lengths[p])
        else:
            groups[best].append(p)
            room[best] -= lengths[p]
    return [sorted(g) for g in groups]
