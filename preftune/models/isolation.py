"""`isolated`: whatever happens inside, training goes on as if it had not: the law of everything that watches.

Kept and given back: random states, train/eval mode of every submodule, gradient checkpointing, generation configs, and
the padding and truncation of a tokenizer. Inside, the model is in eval mode and checkpointing is off.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from preftune.models.random_state import forked_random_states


@contextmanager
def isolated(
    model: nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    seed: int | None = None,
) -> Iterator[None]:
    """Forks the random state and holds the model in eval mode; restores all of it however the block ends.

    Args:
        model: May be wrapped; every module below it is looked after.
        tokenizer: May be padded and truncated with in the block.
        seed: Seeds the forked random states, so that the block draws the same numbers each time. None goes on from the
            state that training has, without moving it.
    """
    with ExitStack() as stack:
        stack.enter_context(forked_random_states(seed))
        if tokenizer is not None:
            stack.enter_context(_tokenizer_state(tokenizer))
        if model is not None:
            stack.enter_context(_generation_configs(model))
            stack.enter_context(_checkpointing_off(model))
            stack.enter_context(_eval_mode(model))
        yield


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Submodules may differ (a frozen tower in eval mode), so `model.train()` would not be the way back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _checkpointing_off(model: nn.Module) -> Iterator[None]:
    flags = [(m, m.__dict__["gradient_checkpointing"]) for m in model.modules() if "gradient_checkpointing" in vars(m)]
    try:
        for module, _ in flags:
            module.__dict__["gradient_checkpointing"] = False
        yield
    finally:
        for module, flag in flags:
            module.__dict__["gradient_checkpointing"] = flag


@contextmanager
def _generation_configs(model: nn.Module) -> Iterator[None]:
    """The object stays the same one, with the fields it had."""
    found = [(m, m.__dict__["generation_config"]) for m in model.modules() if "generation_config" in vars(m)]
    kept = [(m, config, copy.deepcopy(vars(config))) for m, config in found if isinstance(config, GenerationConfig)]
    try:
        yield
    finally:
        for module, config, fields in kept:
            config.__dict__.clear()
            config.__dict__.update(fields)
            module.__dict__["generation_config"] = config


@contextmanager
def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    sides = tokenizer.padding_side, tokenizer.truncation_side
    backend = tokenizer.backend_tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None
    padding, truncation = (backend.padding, backend.truncation) if backend is not None else (None, None)
    try:
        yield
    finally:
        tokenizer.padding_side, tokenizer.truncation_side = sides
        if backend is not None:
            backend.enable_padding(**padding) if padding else backend.no_padding()
            backend.enable_truncation(**truncation) if truncation else backend.no_truncation()
