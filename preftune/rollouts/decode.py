"""The decode loop: every prompt goes through the model once, then all samples of all prompts step together.

Finished rows are carried along until half of the rows are finished: dropping a row copies the cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from preftune.errors import RolloutError
from preftune.rollouts.cache import cache_obstacle, keep_rows, row_of
from preftune.rollouts.kept import KeptRows
from preftune.rollouts.prefill import Sample, last_logits, least_work_first, padded, prefill
from preftune.rollouts.sampling import TokenSampler, uniforms

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
    kept: KeptRows | None = None,
) -> Decoded:
    """Continues all samples at once; rows are the samples in order.

    Args:
        model: Unwrapped, in eval mode, without `loop_obstacle`.
        samples: Whose prompts are of like length.
        sampler: Draws the tokens.
        pad_token_id: Fills the left of short prompts.
        device: Where ids go.
        position_limit: Positions that the model knows; None where it knows all.
        kept: What is known of prompts from before, of the same weights; what becomes known of rows is put there.

    Raises:
        RolloutError: the model's logits are not finite, or the options leave no token to draw.
    """
    kept = kept or KeptRows(0)
    samples, order = least_work_first(samples, kept)
    steps = max(sample.budget for sample in samples)
    width = max(len(sample.prompt) for sample in samples)
    rows = _start(samples, order, steps, pad_token_id, device)
    sampler.begin(rows.ids[:, :width], rows.mask[:, :width])
    is_padded = min(len(sample.prompt) for sample in samples) < width
    logits, cache = prefill(model, samples, kept, pad_token_id=pad_token_id, device=device, limit=width + steps)
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
                staying = _staying(rows.done, alive)
                _write(result, rows)
                _keep(kept, rows, cache, steps, eos, staying)
                rows.keep(staying)
                keep_rows(cache, staying)
                tokens = tokens.index_select(0, staying)
                sampler.begin(rows.ids[:, :width], rows.mask[:, :width])
        positions = rows.positions + step
        if position_limit is not None:
            positions = positions.clamp(max=position_limit - 1)  # of rows that have ended
        mask = rows.mask[:, : end + 1] if is_padded else None
        logits = last_logits(model, tokens[:, None], mask, positions[:, None], cache)
    _write(result, rows)
    check_finite(result)
    _keep(kept, rows, cache, steps, eos)
    return result


def _start(
    samples: Sequence[Sample], order: Sequence[int], steps: int, pad_token_id: int, device: torch.device
) -> _Rows:
    prompts = [sample.prompt for sample in samples for _ in sample.keys]
    ids, mask = padded(prompts, max(map(len, prompts)), pad_token_id)
    rows = _Rows(
        ids=torch.cat([ids, ids.new_full((len(ids), steps), pad_token_id)], dim=1),
        mask=torch.cat([mask, mask.new_ones(len(ids), steps)], dim=1),
        positions=torch.tensor([len(prompt) for prompt in prompts]),
        uniforms=uniforms([key for sample in samples for key in sample.keys], steps),
        budgets=torch.tensor([sample.budget for sample in samples for _ in sample.keys]),
        done=torch.zeros(len(prompts), dtype=torch.bool),
        logps=torch.zeros(len(prompts), steps),
        index=torch.tensor(order),
    )
    for field in fields(rows):
        setattr(rows, field.name, getattr(rows, field.name).to(device))
    return rows


def _staying(done: Tensor, alive: int) -> Tensor:
    """The unfinished rows, and finished ones up to a halving of the number of rows.

    Halvings, because every new number of rows is a new shape, for which the CPU's matrix library compiles a kernel.
    """
    target = len(done)
    while target // 2 >= alive:
        target //= 2
    return done.to(torch.int8).sort(stable=True).indices[:target].sort().values


def _keep(kept: KeptRows, rows: _Rows, cache: Cache, steps: int, eos: Tensor, staying: Tensor | None = None) -> None:
    """Puts what the cache holds of rows that leave it into `kept`: all rows but those that stay."""
    if not kept.keeps:
        return
    width = rows.ids.shape[1] - steps
    computed = cache.get_seq_length() - width
    drawn = drawn_lengths(rows.ids[:, width:], rows.budgets, eos).clamp(max=computed)
    stay = set() if staying is None else set(staying.tolist())
    begins, ends = (width - rows.positions).tolist(), (width + drawn).tolist()
    for row, ids in enumerate(rows.ids.tolist()):
        if row not in stay:
            columns = slice(begins[row], ends[row])
            kept.add(ids[columns], functools.partial(row_of, cache, row, columns))


def drawn_lengths(tokens_RS: Tensor, budgets_R: Tensor, eos: Tensor) -> Tensor:
    """`[R]` tokens of each row up to its first end token, which counts, or to its budget."""
    ends = torch.isin(tokens_RS, eos)
    first = torch.where(ends.any(1), ends.int().argmax(1) + 1, tokens_RS.shape[1])
    return torch.minimum(first, budgets_R)


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
