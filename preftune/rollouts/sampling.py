"""How one token is drawn: each sample's own random numbers, transformers' logits processors, and the inverse CDF.

A sample's numbers come from a counter-based generator keyed by (seed, stream, g), one per step; no global state moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper

from preftune.errors import ConfigError
from preftune.types import Sampling

# What decides how many tokens there are, and of which distribution log-probs are: fields of Sampling, not options.
_FIELDS = ("temperature", "max_new_tokens", "eos_token_id", "do_sample")
# These need another loop than one draw per step, another model, a tokenizer, or give results that depend on the batch.
_OTHER_LOOPS = (
    "num_beams",
    "num_beam_groups",
    "num_return_sequences",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "guidance_scale",
    "watermarking_config",
    "stop_strings",
    "max_time",
    "max_length",
    "min_length",
    "cache_implementation",
    "use_cache",
)
_BLOCK = 256


def generation_config(sampling: Sampling) -> GenerationConfig:
    """The transformers config that says what `sampling` says; nothing of a model's own config gets into it.

    Raises:
        ConfigError: an option in `sampling.extra` that is unknown, is a field of Sampling, or cannot be followed.
    """
    for name in sampling.extra:
        if name in _FIELDS:
            raise ConfigError(f"generation option {name!r} came as an extra; set the field of the config itself")
        if name in _OTHER_LOOPS:
            hint = "; use min_new_tokens" if name == "min_length" else ""
            raise ConfigError(f"generation option {name!r} has no meaning for rollouts of this backend{hint}")
    config = GenerationConfig(
        do_sample=sampling.temperature > 0,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.eos_token_ids) or None,
        repetition_penalty=sampling.repetition_penalty,
    )
    if sampling.temperature > 0:
        config.update(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p
        )
    try:
        unknown = config.update(**sampling.extra)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"generation options {dict(sampling.extra)}: {error}") from error
    if unknown:
        raise ConfigError(f"unknown generation options {sorted(unknown)}; wanted fields of GenerationConfig")
    return config


def uniforms(keys: Sequence[tuple[int, ...]], steps: int) -> Tensor:
    """`[rows, steps]` float64 numbers in [0, 1), row r a function of `keys[r]` alone; a shorter run is a prefix."""
    raw = np.empty((len(keys), steps), np.uint64)
    for row, key in enumerate(keys):
        # Hashed, so that (1,) and (1, 0) or numbers of any size are different keys.
        digest = hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=16).digest()
        raw[row] = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(steps)
    return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53)


class TokenSampler:
    """Draws the next token of every row, and gives its log-probability under softmax(logits / temperature).

    Greedy log-probabilities are those of softmax(logits).

    Args:
        model: A transformers generation model: it knows how its processors are built.
        sampling: The options.
        device: Where logits are.
    """

    def __init__(self, model: Any, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self.device = device
        self._model = model
        self._config = generation_config(sampling)
        self._processors: LogitsProcessorList | None = None
        self.is_greedy = sampling.temperature == 0

    def begin(self, prompt_ids: Tensor, prompt_mask: Tensor) -> None:
        """Builds the processors for rows with these prompts, padded on the left: `[R, W]` ids and mask."""
        config = self._config
        config.max_length = prompt_ids.shape[1] + self.sampling.max_new_tokens
        self._model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=self.device)
        processors = self._model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=prompt_ids.shape[1],
            encoder_input_ids=prompt_ids,
            device=str(self.device),
            model_kwargs={"attention_mask": prompt_mask},
        )
        plain = all(type(p) is TemperatureLogitsWarper for p in processors)
        self._processors = None if plain else processors

    def __call__(self, ids: Tensor, logits: Tensor, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
        """`[R]` tokens and their log-probabilities (NaN where the logits are no numbers).

        Args:
            ids: `[R, W + step]` what each row has so far, padded on the left.
            logits: `[R, V]` of the model.
            uniforms_R: `[R]` float64, one random number per row.
        """
        temperature = self.sampling.temperature or 1.0
        scores = logits.float()
        scaled = scores if temperature == 1.0 else scores / temperature
        peak = scaled.amax(-1, keepdim=True)
        weights = (scaled - peak).exp_()
        blocks = _block_sums(weights)
        log_total = blocks.sum(-1).log().float()
        if self._processors is None:
            tokens = scores.argmax(-1) if self.is_greedy else _inverse_cdf(weights, blocks, uniforms_R)
        else:
            tokens, highest = self._draw_processed(ids, scores.clone(), uniforms_R)
            log_total = log_total + 0 * highest  # NaN where no token was allowed
        drawn = scaled.gather(1, tokens[:, None]) - peak
        return tokens, drawn.squeeze(1) - log_total

    def _draw_processed(self, ids: Tensor, scores: Tensor, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
        """`[R]` tokens and the highest score of each row; the processors may write to `scores`."""
        assert self._processors is not None
        scores = self._processors(ids, scores)  # pyright: ignore[reportArgumentType]
        peak = scores.amax(-1, keepdim=True)
        if self.is_greedy:
            return scores.argmax(-1), peak.squeeze(1)
        weights = (scores - peak).exp_()
        return _inverse_cdf(weights, _block_sums(weights), uniforms_R), peak.squeeze(1)


def _block_sums(weights: Tensor) -> Tensor:
    """`[R, blocks]` float64 sums over runs of the vocabulary; float32 only within a block."""
    whole = weights.shape[1] // _BLOCK * _BLOCK
    sums = [weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)] if whole else []
    if whole < weights.shape[1]:
        sums.append(weights[:, whole:].sum(-1, keepdim=True))
    return torch.cat(sums, dim=1).double()


def _inverse_cdf(weights: Tensor, blocks: Tensor, uniforms_R: Tensor) -> Tensor:
    """`[R]` the first token at which the running sum of the weights exceeds u times their total.

    Two levels: a block of the vocabulary, then a token within it; a full running sum would cost as much as the exp. A
    token of weight zero is never drawn, whatever is lost to rounding.
    """
    block, rest = _first_above(blocks, uniforms_R * blocks.sum(-1))
    inside = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    beyond = inside >= weights.shape[1]
    chosen = weights.gather(1, inside.clamp(max=weights.shape[1] - 1)).double().masked_fill(beyond, 0.0)
    tokens = block * _BLOCK + _first_above(chosen, rest)[0]
    return tokens.clamp(max=weights.shape[1] - 1)  # NaN could point beyond the vocabulary


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """`[R]` first index whose running sum exceeds `target`, and what of the target is left inside it."""
    running = weights.cumsum(-1)
    total = running[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    index = torch.searchsorted(running, target, right=True).clamp(max=weights.shape[1] - 1)
    before = running.gather(1, index) - weights.gather(1, index)
    return index.squeeze(1), (target - before).clamp(min=0).squeeze(1)
