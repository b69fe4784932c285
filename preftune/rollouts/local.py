"""LocalBackend: rollouts by the policy itself, in this process; each prompt is computed once for all its samples.

The policy is left as found: modes, generation config, attention function, random state and weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from preftune.errors import ConfigError
from preftune.models import structure
from preftune.models.adapters import is_prompt_learning, peft_model
from preftune.models.distributed import is_sharded, reshard
from preftune.rollouts.base import RolloutBackend, Stream, check_request, finish_reasons
from preftune.rollouts.decode import Decoded, Sample, decode, drawn_lengths, loop_obstacle
from preftune.rollouts.kept import KeptRows
from preftune.rollouts.one_token import one_token
from preftune.rollouts.policy import budget_of, check_ids, generating
from preftune.rollouts.sampling import TokenSampler, generation_config
from preftune.rollouts.snapshot import Snapshot
from preftune.rollouts.through_generate import generate_samples
from preftune.types import Rollouts, Sampling

logger = logging.getLogger(__name__)

Precision = Literal["model", "bfloat16"]
DEFAULT_MAX_BATCH_TOKENS = 65536
_ROUNDED = torch.bfloat16
# Logits of one step: rows times vocabulary.
_MAX_LOGITS = 2**26


class LocalBackend(RolloutBackend):
    """Generates with the policy's own modules; the sampler's log-probs are those of the trainer's scores.

    Prompts of a batch are computed once, their keys and values handed to all samples, and all samples stepped together.
    A model whose cache cannot be shared (recurrent or hybrid layers, inputs prepared in its own way) is run through its
    `generate` instead, and prompt learning without a cache, said once; samples and log-probs mean the same.

    A policy whose weights are sharded (FSDP2, ZeRO-3) generates from a whole copy, adapters merged into it, that each
    call of `generate` gathers and frees again, a block of `conversations` once: all ranks have to come to them equally
    often, with prompts or without.

    Args:
        model: The policy; may be wrapped by DDP, PEFT or `torch.compile`.
        pad_token_id: Fills short prompts on the left, masked; None takes the model's, or an end token.
        precision: "model" decodes in the dtype of the weights, also where training is under autocast. "bfloat16"
            decodes with a copy of the weights (adapters merged), taken anew at each call or block of
            `conversations`: half the bytes to read for a token, for two bytes of memory per parameter; log-probs then
            differ from the trainer's, which `sampling/sampling_logp_difference` shows.
        max_batch_tokens: Tokens, prompt and budget, of the rows that are decoded together: the size of the cache. Of
            `conversations` at most as many again are kept.

    Raises:
        ConfigError: an unknown precision, or a batch of no tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int | None = None,
        precision: Precision = "model",
        max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS,
    ) -> None:
        if precision not in ("model", "bfloat16") or max_batch_tokens < 1:
            raise ConfigError(
                f"rollout precision is {precision!r} and max_batch_tokens {max_batch_tokens}; wanted 'model' or "
                "'bfloat16', and at least 1"
            )
        self.model = model
        self._pad_token_id = pad_token_id
        self._precision = precision
        self._max_batch_tokens = max_batch_tokens
        self._snapshot: Snapshot | None = None
        self._current: nn.Module | None = None
        self._kept = KeptRows(0)
        self._told: set[str] = set()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        *,
        stream: Sequence[Stream],
    ) -> Rollouts:
        check_request(prompts, num_generations, sampling, stream)
        generation_config(sampling)  # names a wrong option before the model works
        with self._weights() as policy:
            if not prompts:
                return Rollouts([], [], [], logps=[])
            return self._drawn(policy, prompts, num_generations, sampling, stream)

    def _drawn(
        self,
        policy: nn.Module,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        stream: Sequence[Stream],
    ) -> Rollouts:
        check_ids(policy, prompts)
        limit = structure.learned_position_limit(policy)
        asked = sampling.budgets or [sampling.max_new_tokens] * len(prompts)
        budgets = [budget_of(len(prompt), most, limit) for prompt, most in zip(prompts, asked, strict=True)]
        if any(budget < most for budget, most in zip(budgets, asked)):
            self._tell(
                f"the model has {limit} positions: some completions get less than {sampling.max_new_tokens} tokens"
            )
        samples = [
            Sample(
                prompt=prompt,
                budget=budgets[p],
                keys=[(sampling.seed, *stream[p], g) for g in range(num_generations)],
                places=range(p * num_generations, (p + 1) * num_generations),
            )
            for p, prompt in enumerate(prompts)
        ]
        completions: dict[int, tuple[list[int], list[float]]] = {}
        with generating(policy), one_token(model := _decoder(policy)):
            for batch, decoded in self._decoded(model, samples, sampling, limit):
                completions |= _completions(batch, decoded, sampling.eos_token_ids)
        ordered = [completions[place] for place in range(len(prompts) * num_generations)]
        drawn = [ids for ids, _ in ordered]
        return Rollouts(prompts, drawn, finish_reasons(drawn, sampling), logps=[logps for _, logps in ordered])

    @contextmanager
    def conversations(self) -> Iterator[Callable[[Sequence[Sequence[int]]], None]]:
        """As in the base class; a turn computes what is new in its prompt, unless `generate` of the model draws it."""
        outer, self._kept = self._kept, KeptRows(self._max_batch_tokens)
        try:
            with self._weights():
                yield self._kept.only
        finally:
            self._kept = outer

    def close(self) -> None:
        """Frees the copy of the weights; the next `generate` makes a new one."""
        self._snapshot = None

    @contextmanager
    def _weights(self) -> Iterator[nn.Module]:
        """The policy or the copy that draws for it, with the weights of now; the outermost of such blocks decides."""
        if self._current is not None:
            yield self._current
            return
        policy = structure.unwrap(self.model)
        snapshot = self._copy_of(policy)
        with nullcontext(policy) if snapshot is None else snapshot.filled() as current:
            self._current = current
            try:
                yield current
            finally:
                self._current = None

    def _copy_of(self, policy: nn.Module) -> Snapshot | None:
        """What draws for a policy that is sharded, or has other numbers than those asked for; None: it draws itself."""
        reshard(policy)  # else FSDP2 may show it as whole
        sharded, rounded = is_sharded(policy.parameters()), self._precision == "bfloat16"
        if not sharded and not (rounded and (peft_model(policy) is not None or _has_other_dtype(policy))):
            return None
        if self._snapshot is None or self._snapshot.is_gathered != sharded:
            self._snapshot = Snapshot(policy, _ROUNDED if rounded else None)
        return self._snapshot

    def _decoded(
        self, model: Any, samples: Sequence[Sample], sampling: Sampling, limit: int | None
    ) -> Iterator[tuple[list[Sample], Decoded]]:
        obstacle = loop_obstacle(model)
        if obstacle is not None:
            self._tell(
                f"rollouts of {type(model).__name__} cannot share prompts between samples and are slower: {obstacle}"
            )
        device = structure.input_device(model)
        pad = next(
            i for i in (self._pad_token_id, structure.pad_token_id(model), *sampling.eos_token_ids, 0) if i is not None
        )
        sampler = TokenSampler(model, sampling, device)
        max_rows = max(1, _MAX_LOGITS // structure.vocabulary_size(model))
        for batch in batches(samples, self._max_batch_tokens, max_rows, one_length=obstacle is not None):
            if obstacle is None:
                decoded = decode(
                    model, batch, sampler, pad_token_id=pad, device=device, position_limit=limit, kept=self._kept
                )
            else:
                decoded = generate_samples(model, batch, sampler, pad_token_id=pad, device=device)
            yield batch, decoded

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)


def _decoder(policy: nn.Module) -> Any:
    peft = peft_model(policy)
    if peft is None or is_prompt_learning(peft):
        return policy
    return peft.get_base_model()  # its layers go through the active adapter


def batches(
    samples: Sequence[Sample], max_tokens: int, max_rows: int, *, one_length: bool = False
) -> Iterator[list[Sample]]:
    """Deals samples, shortest prompts first, into batches of at most `max_tokens` (padded) and `max_rows`.

    A prompt whose samples do not fit is in several batches, at worst one sample at a time.

    Args:
        one_length: The prompts of a batch are equally long.
    """
    batch: list[Sample] = []
    budget = max((sample.budget for sample in samples), default=0)
    for sample in sorted(samples, key=lambda s: len(s.prompt)):
        width, count = len(sample.prompt), len(sample.keys)
        fits = max(1, min(max_rows, max_tokens // (width + budget)))
        rows = sum(len(s.keys) for s in batch)
        if batch and (rows + count > fits or (one_length and len(batch[0].prompt) != width)):
            yield batch
            batch = []
        cuts = [slice(start, start + fits) for start in range(0, count, fits)]
        parts = [replace(sample, keys=sample.keys[cut], places=sample.places[cut]) for cut in cuts]
        yield from ([part] for part in parts[:-1])
        batch.append(parts[-1])
    if batch:
        yield batch


def _completions(
    batch: Sequence[Sample], decoded: Decoded, eos_token_ids: Sequence[int]
) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probs of each sample by its place, cut after the first end token or at its budget."""
    places = [place for sample in batch for place in sample.places]
    budgets = torch.tensor([sample.budget for sample in batch for _ in sample.places])
    lengths = drawn_lengths(decoded.tokens, budgets, torch.tensor(eos_token_ids, dtype=torch.long)).tolist()
    rows = zip(places, lengths, decoded.tokens.tolist(), decoded.logps.tolist(), strict=True)
    return {place: (tokens[:length], logps[:length]) for place, length, tokens, logps in rows}


def _has_other_dtype(policy: nn.Module) -> bool:
    return any(p.is_floating_point() and p.dtype != _ROUNDED for p in policy.parameters())
