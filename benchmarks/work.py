"""How many operations a step needs: the floating-point model behind "share of the matrix peak".

Recomputation (gradient checkpointing, flash backward, a recomputed head) is work done, never work needed: not counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-like decoder that decide its operations."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int

    @property
    def body_parameters(self) -> int:
        """Parameters of the decoder's matrices: no embedding, no head, no norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.key_value_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @staticmethod
    def read(folder: Path) -> ModelShape:
        """The shape written in a model folder's `config.json`."""
        config = json.loads((folder / "config.json").read_text())
        return ModelShape(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocabulary=config["vocab_size"],
        )


@dataclass(frozen=True)
class Work:
    """What one pass over a batch goes through.

    Attributes:
        tokens: Positions through the decoder layers.
        attended: (query, key) couples per layer and head under the causal mask.
        scored: Positions through the output head.
    """

    tokens: int
    attended: int
    scored: int

    def flops(self, shape: ModelShape, *, reference_forward: bool) -> float:
        """Forward and backward of the policy, plus one forward of the reference where it is online.

        A multiply and an add are two operations; the backward is twice the forward.
        """
        return self.forward_flops(shape) * (4 if reference_forward else 3)

    def forward_flops(self, shape: ModelShape) -> float:
        """One forward pass."""
        return float(
            2 * shape.body_parameters * self.tokens
            + 4 * shape.layers * shape.heads * shape.head_dim * self.attended
            + 2 * shape.hidden * shape.vocabulary * self.scored
        )


Lengths = Sequence[tuple[int, int, int]]
"""(prompt, chosen, rejected) tokens of each pair of a batch, after truncation."""


def triangle(n: int) -> int:
    """Couples of a causal block of n tokens."""
    return n * (n + 1) // 2


Trees = Sequence[tuple[int, Sequence[int]]]
"""(prompt, branches) tokens of each prompt of a batch."""


def tree_work(trees: Trees, scored: int | None = None) -> Work:
    """Every prompt once, no padding; the head on `scored` tokens, by default those of the branches."""
    tokens = sum(p + sum(branches) for p, branches in trees)
    attended = sum(triangle(p) + sum(b * p + triangle(b) for b in branches) for p, branches in trees)
    return Work(tokens, attended, sum(sum(branches) for _, branches in trees) if scored is None else scored)


def rows_work(trees: Trees, width: int, scored: int | None = None, *, head_everywhere: bool) -> Work:
    """A row for each branch with its prompt, all padded to `width`; the head on every position or on `scored`."""
    rows = sum(len(branches) for _, branches in trees)
    wanted = sum(sum(branches) for _, branches in trees) if scored is None else scored
    return Work(rows * width, rows * triangle(width), rows * width if head_everywhere else wanted)


def longest_row(trees: Trees) -> int:
    return max(p + max(branches) for p, branches in trees)


def row_tokens(trees: Trees) -> int:
    """Tokens as the user counts them: the prompt once per branch, no padding."""
    return sum(len(branches) * p + sum(branches) for p, branches in trees)


def _pairs(lengths: Lengths) -> Trees:
    return [(p, (c, r)) for p, c, r in lengths]


def shared_work(lengths: Lengths) -> Work:
    """Every prompt once, no padding, the head on completion tokens alone: what a pair needs."""
    return tree_work(_pairs(lengths))


def padded_work(lengths: Lengths, *, head_everywhere: bool) -> Work:
    """Two rows a pair, each padded to the longest of the batch; the head on every position or on completions."""
    trees = _pairs(lengths)
    return rows_work(trees, longest_row(trees), head_everywhere=head_everywhere)


def real_tokens(lengths: Lengths) -> int:
    """Tokens of the batch as the user counts them: prompt once per branch, no padding. Equal for both sides."""
    return row_tokens(_pairs(lengths))


# Trainers other than DPO. A step is the dict that a worker sends: "trees", "scored", "forwarded" (positions through
# the policy with gradient), "looked_at" (without).


def own_trees(kind: str, step: dict[str, Any]) -> Trees:
    """The trees that have a loss: of KTO without the mismatched completions."""
    trees = step["trees"]
    return [(p, branches[:1]) for p, branches in trees] if kind == "kto" else trees


def head_tokens(kind: str, step: dict[str, Any]) -> int | None:
    """Tokens with a loss; a reward model has no head over the vocabulary."""
    return 0 if kind == "reward" else step["scored"]


def needed_flops(kind: str, step: dict[str, Any], shape: ModelShape) -> float:
    """What a step of the algorithm needs: prompts shared, policy forward and backward, the passes without gradient.

    KTO: mismatched completions after the same prompts, under the policy and under the reference. RLOO: the reference.
    """
    own = tree_work(own_trees(kind, step), head_tokens(kind, step)).forward_flops(shape)
    if kind == "kto":
        both = tree_work(step["trees"]).forward_flops(shape)
        return 3 * own + (both - own) + both
    return (4 if kind == "rloo" else 3) * own


@dataclass(frozen=True)
class Passes:
    """How a side may put the rows of a step through the policy (with gradient, and without) and the reference."""

    policy: Work
    looked_at: Work | None = None
    reference: Sequence[Work] = ()


def layouts(kind: str, step: dict[str, Any], device: str) -> list[Passes]:
    """The ways that are known, those of shared prompts first."""
    trees, head = own_trees(kind, step), head_tokens(kind, step)
    everywhere = device == "cpu" and kind != "reward"
    flat = tree_work(trees, head)
    if kind == "kto":
        strays = [(p, branches[1:]) for p, branches in step["trees"]]
        both = tree_work(step["trees"])
        padded = [rows_work(rows, longest_row(rows), head_everywhere=everywhere) for rows in (trees, strays)]
        return [Passes(flat, tree_work(strays), [both]), Passes(both, None, [both]), Passes(*padded, padded)]
    width = longest_row(trees)
    if kind in ("grpo", "rloo"):  # prompts are padded on their left, completions on their right
        width = max(p for p, _ in trees) + max(max(branches) for _, branches in trees)
    works = [flat, rows_work(trees, width, head, head_everywhere=everywhere)]
    if kind == "sft-packed":  # documents end to end; the head may still be on all of them
        works.append(Work(flat.tokens, flat.attended, flat.tokens if everywhere else flat.scored))
    return [Passes(w, w, [w]) if kind == "rloo" else Passes(w) for w in works]


def done_flops(kind: str, step: dict[str, Any], shape: ModelShape, device: str, *, is_ours: bool) -> float | None:
    """What the side did in its training pass; None where the positions it forwarded are those of no known layout.

    Passes without gradient count as far as their positions were seen. The reference model's are not seen: taken to be
    those of its layout.
    """
    known = layouts(kind, step, device)
    candidates = known if is_ours else known[::-1]  # packed rows: the same positions, unlike heads
    for passes in candidates:
        if passes.policy.tokens == step["forwarded"] and (passes.looked_at is not None) == (step["looked_at"] > 0):
            flops = 3 * passes.policy.forward_flops(shape) + sum(w.forward_flops(shape) for w in passes.reference)
            if passes.looked_at is not None:
                flops += passes.looked_at.forward_flops(shape) * step["looked_at"] / passes.looked_at.tokens
            return flops
    return None


def decode_bytes(shape: ModelShape) -> int:
    """Bytes of weights that a decoding step must read, however many rows it has: matrices and head, once.

    They are float32 in both precisions: bf16 is autocast over such weights.
    """
    return 4 * (shape.body_parameters + shape.hidden * shape.vocabulary)
