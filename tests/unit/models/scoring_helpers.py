"""What the scorer's tests share: trees of random ids, and the slow way to score them that everything is held against.

The slow way runs prompt + branch alone, in float64, through transformers' own eager attention, and takes log_softmax.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from preftune.data.tree import build_tree
from preftune.types import PromptTree

LENGTHS = [(9, (7, 5)), (0, (6,)), (3, (1, 8, 4)), (2, (5, 0))]


def random_tree(vocabulary: int, lengths=LENGTHS, seed: int = 0, masked: bool = False) -> PromptTree:
    """A tree of random ids; `masked` leaves about a third of the branch tokens unscored."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=generator).tolist()

    prompts = [ids(n) for n, _ in lengths]
    branches = [[ids(m) for m in group] for _, group in lengths]
    masks = None
    if masked:
        masks = [[(torch.rand(m, generator=generator) < 0.7).long().tolist() for m in group] for _, group in lengths]
    return build_tree(prompts, branches, masks)


def rows_of(tree: PromptTree) -> list[list[int]]:
    """The ids of prompt + branch, one row a branch."""
    flat, rows, start = tree.input_ids.tolist(), [], 0
    for n, branches in tree.layout:
        at = start + n
        for m in branches:
            rows.append(flat[start : start + n] + flat[at : at + m])
            at += m
        start = at
    return rows


def double_copy(model: nn.Module) -> nn.Module:
    """The same model in float64 with eager attention."""
    twin = copy.deepcopy(model).double()
    twin.set_attn_implementation("eager")  # pyright: ignore
    if twin._can_set_experts_implementation():  # pyright: ignore
        twin.set_experts_implementation("eager")  # pyright: ignore - the grouped product of experts knows no float64
    return twin


def slow_logits(model: nn.Module, tree: PromptTree) -> Tensor:
    """`[T, V]` logits that predict each scored token."""
    columns = tree.position_ids[tree.predict_index].tolist()
    wanted = list(zip(tree.branch_index.tolist(), columns))
    rows = [model(input_ids=torch.tensor([row])).logits[0] if row else None for row in rows_of(tree)]
    return torch.stack([rows[b][c] for b, c in wanted])  # pyright: ignore


def slow_logps(model: nn.Module, tree: PromptTree, temperature: float = 1.0) -> Tensor:
    """`[T]` log-probabilities of the scored tokens."""
    logits = slow_logits(model, tree) / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, tree.target_ids[:, None]).squeeze(1)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradient of `loss` by parameter name; parameters without one are left out."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None}


def worst(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest relative distance of two sets of gradients, by parameter; tiny ones are measured against the largest."""
    assert set(got) == set(wanted)
    floor = 1e-6 * max(float(g.norm()) for g in wanted.values())
    return max(float((got[n] - wanted[n]).norm()) / max(float(wanted[n].norm()), floor) for n in wanted)


def weights_for(tree: PromptTree) -> Tensor:
    """`[T]` fixed weights of either sign, so that a mistake cannot cancel in the sum."""
    return torch.randn(len(tree.target_index), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
