"""Prompts, stream keys and the plain `generate` that rollouts are compared with.

Prompts have lengths 1 to 17, so that every batch is padded on the left.
"""

from __future__ import annotations

import torch

from preftune.types import Sampling

LENGTHS = (1, 5, 9, 9, 17)


def make_prompts(lengths=LENGTHS, seed: int = 0, vocab_size: int = 320) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def keys(count: int, round_number: int = 0) -> list[tuple[int, ...]]:
    return [(round_number, index) for index in range(count)]


def sampling(max_new_tokens: int = 12, **options) -> Sampling:
    return Sampling(max_new_tokens=max_new_tokens, **options)


def generated(model, prompts, max_new_tokens: int, eos: tuple[int, ...] = (), **options) -> list[list[int]]:
    """Completions by transformers' own `generate`, prompts padded on the left, each cut after its first end token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = list(eos) or None
    try:
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            do_sample=False,
            **options,
        )
    finally:
        model.generation_config.eos_token_id = before
    return [_cut(row, eos) for row in out[:, width:].tolist()]


def _cut(ids: list[int], eos: tuple[int, ...]) -> list[int]:
    first = next((position for position, token in enumerate(ids) if token in eos), len(ids))
    return ids[: first + 1]
