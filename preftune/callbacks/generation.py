"""How completions are generated while a run is watched: by a rollout backend where it can, else by `model.generate`.

Both leave model and random states as found; a backend computes each prompt once and gives each sample its own stream.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from preftune.data.multimodal import with_images
from preftune.data.tree import build_tree
from preftune.errors import ConfigError
from preftune.models import structure
from preftune.models.adapters import peft_model
from preftune.models.structure import unwrap
from preftune.rollouts.sampling import generation_config
from preftune.types import Sampling

DEFAULT_MAX_NEW_TOKENS = 128

Generate = Callable[[Any, PreTrainedTokenizerBase, Sequence[list[int]], GenerationConfig], list[list[int]]]
"""`(model, tokenizer, prompt_ids, generation_config) -> completion_ids`, one list each, in order."""

# What a sampling has a field for, and what transformers takes where a config says nothing.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "repetition_penalty": 1.0}
# What does not change which tokens are drawn one by one, at these values.
_HARMLESS = {"num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1, "use_cache": True, "do_sample": None}
_ELSEWHERE = ("max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "bos_token_id", "transformers_version")


def effective_config(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    config: GenerationConfig | None,
    options: Mapping[str, Any],
) -> GenerationConfig:
    """The config given, else the model's own with 128 new tokens unless it says otherwise, then `options`.

    Raises:
        ValueError: an option that a generation config does not have.
    """
    own = own_generation_config(model)
    effective = copy.deepcopy(config or own)
    unknown = effective.update(**options)
    if unknown:
        raise ValueError(f"unknown generation options {sorted(unknown)}; wanted fields of GenerationConfig")
    if config is None and not {"max_new_tokens", "max_length"} & options.keys():
        effective.max_new_tokens = effective.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
    if effective.max_new_tokens is not None:
        effective.max_length = None
    if effective.eos_token_id is None:
        effective.eos_token_id = tokenizer.eos_token_id if own.eos_token_id is None else own.eos_token_id
    if effective.pad_token_id is None:
        effective.pad_token_id = pad_id(tokenizer)
    return effective


def own_generation_config(model: nn.Module) -> GenerationConfig:
    """The model's, or one that says nothing."""
    config = structure.generation_config(model)
    return config if isinstance(config, GenerationConfig) else GenerationConfig()


def as_sampling(config: GenerationConfig, seed: int) -> Sampling | None:
    """The same as options of a rollout backend; None for what is not drawn token by token (beams, `max_length`)."""
    given = {name: value for name, value in config.to_diff_dict().items() if value is not None}
    known = {name: given.pop(name, default) for name, default in _DEFAULTS.items()}
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    extra = {n: v for n, v in given.items() if n not in _ELSEWHERE and (n not in _HARMLESS or v != _HARMLESS[n])}
    extra.pop("do_sample", None)
    if config.max_new_tokens is None:
        return None
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens,
        eos_token_ids=tuple(int(end) for end in ends if end is not None),
        seed=seed,
        extra=extra,
        **(known if config.do_sample else known | {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": None}),
    )
    try:
        generation_config(sampling)
    except ConfigError:
        return None
    return sampling


def generate_completions(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    config: GenerationConfig,
    *,
    batch_size: int,
) -> list[list[int]]:
    """Completions of texts by `model.generate`, in the order of the prompts, each cut after its first end token."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    device = next(model.parameters()).device
    padding = pad_id(tokenizer)
    completions: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        width = max(len(ids) for ids in batch)
        input_ids = torch.tensor([[padding] * (width - len(ids)) + ids for ids in batch], device=device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch], device=device)
        output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config)
        completions += [_until_end(row, ends) for row in output[:, width:].tolist()]
    return completions


def complete_with_images(
    model: Any, processor: Any, prompt: Sequence[int], images: Sequence[Any], config: GenerationConfig
) -> list[int]:
    """A completion of one prompt by `model.generate`, which is shown its images."""
    tree = with_images(build_tree([list(prompt)], [[[]]]), [{"images": list(images)}], processor)
    device = next(model.parameters()).device
    given: dict[str, Any] = {}
    if tree.images is not None:
        given = {**tree.images.prompts[0], **{name: values[None] for name, values in tree.images.tokens.items()}}
    ids = tree.input_ids[None].to(device)
    shown = {name: value.to(device) for name, value in given.items()}
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, **shown)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return _until_end(output[0, ids.shape[1] :].tolist(), ends)


def _until_end(ids: list[int], ends: Sequence[int | None]) -> list[int]:
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids


def tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer itself, also where the trainer has a processor."""
    is_processor = isinstance(processing_class, ProcessorMixin)
    found = vars(processing_class).get("tokenizer") if is_processor else processing_class
    if not isinstance(found, PreTrainedTokenizerBase):
        raise ValueError(f"the trainer's processing_class is {type(found).__name__}; completions need a tokenizer")
    return found


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills the left of short prompts: masked out, so any token will do where none is for padding."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if isinstance(i, int)), 0)


def check_generates(model: nn.Module) -> None:
    """Raises `ValueError` for a model that cannot generate, such as a reward model."""
    peft = peft_model(model)
    base: Any = unwrap(model) if peft is None else peft.get_base_model()
    if isinstance(base, PreTrainedModel) and not base.can_generate():
        raise ValueError(f"{type(base).__name__} cannot generate text, so there are no completions to log")
