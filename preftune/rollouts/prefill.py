"""Prompts through the model, each once and those with as much to compute together; what is known of them is left out.

All rows of a group compute as many columns at the end as the one with the most to compute, so no mask has holes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from preftune.rollouts.cache import Prefilled, prefill_cache, shared_cache, taken
from preftune.rollouts.kept import KeptRows

# Prompts go through the model together while at least this part of the tokens is not padding.
_DENSITY = 0.8


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


def least_work_first(samples: Sequence[Sample], kept: KeptRows) -> tuple[list[Sample], list[int]]:
    """The samples by the number of tokens that are not known, and for each row then its place before."""
    ends = list(itertools.accumulate(len(sample.keys) for sample in samples))
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].prompt) - kept.known(samples[i].prompt))
    places = [place for i in order for place in range(ends[i] - len(samples[i].keys), ends[i])]
    return [samples[i] for i in order], places


def prefill(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    kept: KeptRows,
    *,
    pad_token_id: int,
    device: torch.device,
    limit: int,
) -> tuple[Tensor, Cache]:
    """Logits after the prompt `[R, V]`, and the cache of all rows.

    Args:
        samples: Those with the least work first.
        kept: Where the beginnings of prompts are looked up.
        limit: Columns that the cache will have at most.
    """
    counts = [len(sample.keys) for sample in samples]
    ends = list(itertools.accumulate(counts))
    prompts = [sample.prompt for sample in samples]
    known = [kept.known(prompt) for prompt in prompts]
    prefilled, logits = [], []
    for group in _groups([len(prompt) for prompt in prompts], known):
        few = [prompts[i] for i in group]
        lengths = [len(prompt) for prompt in few]
        width = max(lengths)
        new = max(lengths[n] - known[i] for n, i in enumerate(group))
        ids, mask = padded(few, width, pad_token_id)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new:].to(device)
        cache = _known_columns(few, width - new, kept) if new < width else prefill_cache(model.config, kept.keeps)
        seen = mask.to(device) if min(lengths) < width else None
        last = last_logits(model, ids[:, -new:].to(device), seen, positions, cache)
        logits.append(last.repeat_interleave(torch.tensor([counts[i] for i in group], device=last.device), dim=0))
        prefilled.append(Prefilled(taken(cache), [(ends[i] - counts[i], ends[i]) for i in group], lengths))
    width = max(map(len, prompts))
    return torch.cat(logits), shared_cache(prefilled, width=width, limit=limit, whole=kept.keeps)


def _known_columns(prompts: Sequence[Sequence[int]], width: int, kept: KeptRows) -> Cache:
    """The cache of prompts without their last columns: `width` is left of the longest."""
    longest = max(map(len, prompts))
    lengths = [max(0, len(prompt) - (longest - width)) for prompt in prompts]
    pasts = [kept.past(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    rows = [Prefilled(past.layers, [(i, i + 1)], [lengths[i]]) for i, past in enumerate(pasts)]
    return shared_cache(rows, width=width, limit=longest, whole=True)


def _groups(lengths: Sequence[int], known: Sequence[int]) -> list[list[int]]:
    """Runs in which at least `_DENSITY` of the columns to compute are real tokens that are not known.

    Prompts of which something is known and others are in different groups.
    """
    new = [length - few for length, few in zip(lengths, known, strict=True)]
    groups: list[list[int]] = []
    for index, count in enumerate(new):
        last = groups[-1] if groups else []
        real = sum(new[i] for i in last) + count
        is_alike = last and (known[last[0]] > 0) == (known[index] > 0)
        if is_alike and real >= _DENSITY * (len(last) + 1) * count:
            last.append(index)
        else:
            groups.append([index])
    return groups


def padded(prompts: Sequence[Sequence[int]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """`[P, width]` ids and mask, padded on the left."""
    ids = torch.full((len(prompts), width), pad_token_id)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def last_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
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
