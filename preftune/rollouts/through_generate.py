"""Rollouts of models that `decode` cannot take: by their own `generate` (Mamba, hybrids), or without any cache.

Samples draw from the same random streams as in `decode`; the prompt is computed once per sample, not once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from preftune.rollouts.decode import Decoded, Sample, check_finite
from preftune.rollouts.sampling import TokenSampler, uniforms


class _Drawn(LogitsProcessor):
    """Draws each step's tokens, keeps their log-probs, and leaves `generate` nothing but those tokens to take.

    Attributes:
        tokens, logps: `[R]` of each step.
        done: `[R]` rows that have drawn an end token.
    """

    def __init__(self, sampler: TokenSampler, uniforms_RS: Tensor, ends: Tensor) -> None:
        self._sampler = sampler
        self._uniforms = uniforms_RS
        self._ends = ends
        self.done = torch.zeros(len(uniforms_RS), dtype=torch.bool, device=uniforms_RS.device)
        self.tokens: list[Tensor] = []
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.tokens:
            self._sampler.begin(input_ids, torch.ones_like(input_ids))
        tokens, logps = self._sampler(input_ids, scores, self._uniforms[:, len(self.tokens)])
        self.tokens.append(tokens)
        self.logps.append(logps.masked_fill(self.done, 0.0))
        self.done |= torch.isin(tokens, self._ends)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


def generate_samples(
    model: Any, samples: Sequence[Sample], sampler: TokenSampler, *, pad_token_id: int, device: torch.device
) -> Decoded:
    """As `decode`, for prompts of one length, so that no model needs padding.

    Raises:
        RolloutError: the model's logits are not finite, or the options leave no token to draw.
    """
    prompts = torch.tensor([list(sample.prompt) for sample in samples for _ in sample.keys], device=device)
    steps = max(sample.budget for sample in samples)
    eos = list(sampler.sampling.eos_token_ids)
    numbers = uniforms([key for sample in samples for key in sample.keys], steps).to(device)
    drawn = _Drawn(sampler, numbers, torch.tensor(eos, dtype=torch.long, device=device))
    if isinstance(model, PeftModel):
        _without_cache(model, prompts, drawn, steps)
    else:
        _by_generate(model, prompts, drawn, steps, eos, pad_token_id)
    made = len(drawn.tokens)
    result = Decoded(torch.zeros(len(prompts), steps, dtype=torch.long), torch.zeros(len(prompts), steps))
    result.tokens[:, :made] = torch.stack(drawn.tokens, dim=1).cpu()
    result.logps[:, :made] = torch.stack(drawn.logps, dim=1).cpu()
    check_finite(result)
    return result


def _by_generate(model: Any, prompts: Tensor, drawn: _Drawn, steps: int, eos: list[int], pad_token_id: int) -> None:
    # `generate` fills what a config leaves open from the model's own one; our caller gives it back.
    model.generation_config = GenerationConfig()
    model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        generation_config=GenerationConfig(
            max_new_tokens=steps, do_sample=False, eos_token_id=eos or None, pad_token_id=pad_token_id
        ),
        logits_processor=LogitsProcessorList([drawn]),
    )


def _without_cache(model: Any, prompts: Tensor, drawn: _Drawn, steps: int) -> None:
    """For prompt learning: peft 0.21's `generate` loses the virtual tokens in the cache of transformers 5.24."""
    ids = prompts
    for _ in range(steps):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, -1]
        drawn(ids, logits.float())
        ids = torch.cat([ids, drawn.tokens[-1][:, None]], dim=1)
        if drawn.done.all():
            break
