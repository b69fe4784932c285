"""How many operations a step needs: the floating-point model behind "share of the matrix peak".

Recomputation (gradient checkpointing, flash backward, a recomputed head) is work done, never work needed: not counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
        forward = (
            2 * shape.body_parameters * self.tokens
            + 4 * shape.layers * shape.heads * shape.head_dim * self.attended
            + 2 * shape.hidden * shape.vocabulary * self.scored
        )
        return float(forward) * (4 if reference_forward else 3)


Lengths = Sequence[tuple[int, int, int]]
"""(prompt, chosen, rejected) tokens of each pair of a batch, after truncation."""


def triangle(n: int) -> int:
    """Couples of a causal block of n tokens."""
    return n * (n + 1) // 2


def shared_work(lengths: Lengths) -> Work:
    """Every prompt once, no padding, the head on completion tokens alone: what a pair needs."""
    tokens = sum(p + c + r for p, c, r in lengths)
    attended = sum(triangle(p) + sum(b * p + triangle(b) for b in (c, r)) for p, c, r in lengths)
    return Work(tokens, attended, sum(c + r for _, c, r in lengths))


def padded_work(lengths: Lengths, *, head_everywhere: bool) -> Work:
    """Two rows a pair, each padded to the longest of the batch; the head on every position or on completions."""
    width = max(p + max(c, r) for p, c, r in lengths)
    rows = 2 * len(lengths)
    scored = rows * width if head_everywhere else sum(c + r for _, c, r in lengths)
    return Work(rows * width, rows * triangle(width), scored)


def real_tokens(lengths: Lengths) -> int:
    """Tokens of the batch as the user counts them: prompt once per branch, no padding. Equal for both sides."""
    return sum(2 * p + c + r for p, c, r in lengths)
