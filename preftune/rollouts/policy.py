"""The policy while it generates: eval mode, its weights' own dtype and attention, no gradients; given back as found.

Every backend that runs the policy itself does so inside `generating`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from preftune.errors import RolloutError
from preftune.models import structure
from preftune.models.attention import attention_function
from preftune.models.distributed import is_sharded
from preftune.models.isolation import isolated


@contextmanager
def generating(policy: nn.Module, *, seed: int | None = None) -> Iterator[None]:
    """Holds an unwrapped policy ready to generate, and restores it and the random states however the block ends.

    Args:
        policy: Its modes, generation config, attention function and forward come back.
        seed: Of the random states within, for code that draws from them.

    Raises:
        RolloutError: the policy is sharded.
    """
    if is_sharded(policy.parameters()):
        raise RolloutError(
            "the policy is sharded (FSDP2 or ZeRO-3), and each token would gather all of its weights; use "
            "rollout_backend='local', which gathers them once for all tokens, or a vLLM server"
        )
    with ExitStack() as stack:
        stack.enter_context(isolated(policy, seed=seed))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(structure.input_device(policy).type, enabled=False))
        stack.enter_context(attention_function(policy, None))
        stack.enter_context(_without_autocast(policy))
        stack.enter_context(_without_router_loss(policy))
        yield


@contextmanager
def _without_autocast(model: nn.Module) -> Iterator[None]:
    """Takes off the autocast that accelerate puts around `forward`: it would cast all weights at every token."""
    state = vars(model)
    wrapped = state.get("forward") if "_original_forward" in state else None
    if wrapped is None:
        yield
        return
    state["forward"] = state["_original_forward"]
    try:
        yield
    finally:
        state["forward"] = wrapped


@contextmanager
def _without_router_loss(model: nn.Module) -> Iterator[None]:
    """A mixture of experts computes its balancing loss at every call; over a cache its mask does not even fit."""
    config = vars(structure.text_config(model))
    if not config.get("output_router_logits"):
        yield
        return
    config["output_router_logits"] = False
    try:
        yield
    finally:
        config["output_router_logits"] = True


def check_ids(policy: nn.Module, prompts: Sequence[Sequence[int]]) -> None:
    """Raises a RolloutError where a prompt holds an id that the model does not know."""
    size = structure.vocabulary_size(policy)
    for index, prompt in enumerate(prompts):
        wrong = next((i for i in (min(prompt), max(prompt)) if not 0 <= i < size), None)
        if wrong is not None:
            raise RolloutError(
                f"prompt {index} holds token {wrong}, and the model knows the ids 0 to {size - 1}; resize the "
                "embeddings, or use the model's own tokenizer"
            )


def budget_of(length: int, max_new_tokens: int, position_limit: int | None) -> int:
    """New tokens that a prompt of `length` can get where the model has learned only so many positions.

    Raises:
        RolloutError: no position is left.
    """
    if position_limit is None:
        return max_new_tokens
    if length >= position_limit:
        raise RolloutError(
            f"a prompt of {length} tokens leaves none of the model's {position_limit} positions for a completion; "
            "shorten the prompt or remove the row"
        )
    return min(max_new_tokens, position_limit - length)
