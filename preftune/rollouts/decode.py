"""The decode loop: every prompt goes through the model once, then all samples of all prompts step together.

Finished rows are carried along until half of the rows are finished: dropping a row copies the cache.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from preftune.errors import RolloutError
from preftune.rollouts.cache import Prefilled, cache_obstacle, keep_rows, shared_cache
from preftune.rollouts.sampling import TokenSampler, uniforms

# Prompts go through the model together while at least this part of the tokens is not padding.
_PREFILL_DENSITY = 0.8
# Reading on a GPU whether rows have finished waits for it; some steps of finished rows cost less.
_CHECK_EVERY = {"cpu": 1}
_CHECK_EVERY_ELSEWHERE = 8
_OWN_PREPARATION = (
    "prepare_inputs_for_generation",
    "_prepare_position_ids_for_generation",
    "_update_model_kwargs_for_generation",
    "_expand_inputs_for_generation",
)


def loop_obstacle(model: Any) -> str | None:
    """Why `decode` cannot be used for a model, in a few words; None where it can."""
    if not isinstance(model, PreTrainedModel):
        return "virtual tokens stand before every prompt"
    cls: Any = type(model)
    own = [name for name in _OWN_PREPARATION if inspect.getattr_static(cls, name) is not vars(GenerationMixin)[name]]
    if own:
        return f"it has a {own[0]} of its own"
    missing = {"cache", "position_ids", "attention_mask"} - set(inspect.signature(cls.forward).parameters)
    if missing:
        return f"its forward takes no {' and no '.join(sorted(missing))}"
    if not cls._supports_default_dynamic_cache():
        return "its cache is of its own kind"
    return cache_obstacle(model.config)


@dataclass(frozen=True)
class Sample:
    """Samples of one prompt.

    Attributes:
        prompt: Token ids.
        budget: New tokens at most.
        keys: Of the random stream of each sample.
        places: Where the samples stand among all.
    """

    prompt: Sequence[int]
    budget: int
    keys: Sequence[tuple[int, ...]]
    places: Sequence[int]


@dataclass
class _Rows:
    """What is known of the rows that are being decoded; every tensor has them along its first axis."""

    ids: Tensor
    mask: Tensor
    positions: Tensor
    uniforms: Tensor
    budgets: Tensor
    done: Tensor
    logps: Tensor
    index: Tensor

    def keep(self, rows: Tensor) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name).index_select(0, rows))


@dataclass(frozen=True)
class Decoded:
    """`[R, S]` tokens and log-probs of each row, on the CPU; meaningless after a row has ended."""

    tokens: Tensor
    logps: Tensor


def decode(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    sampler: TokenSampler,
    *,
    pad_token_id: int,
    device: torch.device,
    position_limit: int | None,
) -> Decoded:
    """Continues all samples at once; rows are the samples in order.

    Args:
        model: Unwrapped, in eval mode, without `loop_obstacle`.
        samples: Prompts in order of length.
        sampler: Draws the tokens.
        pad_token_id: Fills the left of short prompts.
        device: Where ids go.
        position_limit: Positions that the model knows; None where it knows all.

    Raises:
        RolloutError: the model's logits are not finite, or the options leave no token to draw.
    """
    steps = max(sample.budget for sample in samples)
    width = max(len(sample.prompt) for sample in samples)
    rows = _start(samples, steps, pad_token_id, device)
    sampler.begin(rows.ids[:, :width], rows.mask[:, :width])
    is_padded = min(len(sample.prompt) for sample in samples) < width
    logits, cache = _prefill(model, samples, pad_token_id, device, width + steps)
    result = Decoded(torch.zeros(len(rows.ids), steps, dtype=torch.long), torch.zeros(len(rows.ids), steps))
    eos = torch.tensor(sampler.sampling.eos_token_ids, dtype=torch.long, device=device)
    every = _CHECK_EVERY.get(device.type, _CHECK_EVERY_ELSEWHERE)
    for step in range(steps):
        end = width + step
        tokens, logps = sampler(rows.ids[:, :end], logits, rows.uniforms[:, step])
        rows.ids[:, end], rows.logps[:, step] = tokens, logps.masked_fill(rows.done, 0.0)
        rows.done |= torch.isin(tokens, eos) | (rows.budgets <= step + 1)
        if step + 1 == steps:
            break
        if (step + 1) % every == 0:
            alive = int((~rows.done).sum())
            if alive == 0:
                break
            if alive <= len(rows.done) // 2:
                _write(result, rows)
                tokens = _drop(rows, cache, tokens, alive)
                sampler.begin(rows.ids[:, :width], rows.mask[:, :width])
        positions = rows.positions + step
        if position_limit is not None:
            positions = positions.clamp(max=position_limit - 1)  # of rows that have ended
        mask = rows.mask[:, : end + 1] if is_padded else None
        logits = _call(model, tokens[:, None], mask, positions[:, None], cache)
    _write(result, rows)
    check_finite(result)
    return result


def _start(samples: Sequence[Sample], steps: int, pad_token_id: int, device: torch.device) -> _Rows:
    prompts = [sample.prompt for sample in samples for _ in sample.keys]
    ids, mask = _padded(prompts, max(map(len, prompts)), pad_token_id)
    rows = _Rows(
        ids=torch.cat([ids, ids.new_full((len(ids), steps), pad_token_id)], dim=1),
        mask=torch.cat([mask, mask.new_ones(len(ids), steps)], dim=1),
        positions=torch.tensor([len(prompt) for prompt in prompts]),
        uniforms=uniforms([key for sample in samples for key in sample.keys], steps),
        budgets=torch.tensor([sample.budget for sample in samples for _ in sample.keys]),
        done=torch.zeros(len(prompts), dtype=torch.bool),
        logps=torch.zeros(len(prompts), steps),
        index=torch.arange(len(prompts)),
    )
    for field in fields(rows):
        setattr(rows, field.name, getattr(rows, field.name).to(device))
    return rows


def _padded(prompts: Sequence[Sequence[int]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """`[P, width]` ids and mask, padded on the left."""
    ids = torch.full((len(prompts), width), pad_token_id)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _prefill(
    model: PreTrainedModel, samples: Sequence[Sample], pad_token_id: int, device: torch.device, limit: int
) -> tuple[Tensor, Cache]:
    """Logits after the prompt `[R, V]`, and the cache of all rows; prompts of like length go together."""
    counts = [len(sample.keys) for sample in samples]
    ends = list(itertools.accumulate(counts))
    prefilled, logits = [], []
    for group in _groups_of_like_length([len(sample.prompt) for sample in samples]):
        lengths = [len(samples[i].prompt) for i in group]
        ids, mask = _padded([samples[i].prompt for i in group], max(lengths), pad_token_id)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        is_padded = min(lengths) < max(lengths)
        last = _call(model, ids.to(device), mask.to(device) if is_padded else None, positions.to(device), cache)
        logits.append(last.repeat_interleave(torch.tensor([counts[i] for i in group], device=last.device), dim=0))
        layers: list[Any] = cache.layers
        prefilled.append(Prefilled(layers, [(ends[i] - counts[i], ends[i]) for i in group], lengths))
    width = max(len(sample.prompt) for sample in samples)
    return torch.cat(logits), shared_cache(prefilled, width=width, limit=limit)


def _groups_of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Runs of the sorted `lengths` in which at least `_PREFILL_DENSITY` of the padded tokens are real."""
    groups: list[list[int]] = []
    for index, length in enumerate(lengths):
        real = sum(lengths[i] for i in groups[-1]) + length if groups else 0
        if groups and real >= _PREFILL_DENSITY * (len(groups[-1]) + 1) * length:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _call(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
    """`[rows, V]` logits at the last column."""
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        return_dict=True,
        **keep,
    )
    return output.logits[:, -1].to(ids.device)


def _drop(rows: _Rows, cache: Cache, tokens: Tensor, alive: int) -> Tensor:
    """Keeps the unfinished rows, and finished ones up to a halving of the number of rows; gives their `tokens`.

    Halvings, because every new number of rows is a new shape, for which the CPU's matrix library compiles a kernel.
    """
    target = len(rows.done)
    while target // 2 >= alive:
        target //= 2
    kept = rows.done.to(torch.int8).sort(stable=True).indices[:target].sort().values
    rows.keep(kept)
    keep_rows(cache, kept)
    return tokens.index_select(0, kept)


def _write(result: Decoded, rows: _Rows) -> None:
    steps = result.tokens.shape[1]
    index = rows.index.cpu()
    result.tokens[index] = rows.ids[:, -steps:].cpu()
    result.logps[index] = rows.logps.cpu()


def check_finite(result: Decoded) -> None:
    bad = (~torch.isfinite(result.logps)).nonzero()
    if len(bad):
        row, step = bad[0].tolist()
        raise RolloutError(
            f"sample {row} has no finite probabilities at its token {step} ({len(bad)} tokens in all): the model's "
            "logits overflow or are NaN, or the generation options leave no token to draw"
        )
