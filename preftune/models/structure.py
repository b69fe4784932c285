"""What a model can take: its head, its attention configs, what follows its head, and why a layout is impossible.

The only file that reads optional attributes of models and configs; it never decides by a model's name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

PostHeadKind = Literal["softcap", "multiply", "divide"]

# Where families keep what they do to logits after the head; which of them applies, and how, the probe finds out.
_POST_HEAD_FIELDS: tuple[tuple[str, tuple[PostHeadKind, ...], float | None], ...] = (
    ("final_logit_softcapping", ("softcap",), None),
    ("logit_scale", ("multiply", "divide"), 1.0),
    ("logits_scaling", ("divide", "multiply"), 1.0),
    ("lm_head_multiplier", ("multiply", "divide"), 1.0),
    ("output_multiplier", ("multiply", "divide"), 1.0),
)

_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP, DeepSpeed engines and `torch.compile`; PEFT models and FSDP2 modules stay as they are."""
    while True:
        inner = next((model._modules[name] for name in _WRAPPED if name in model._modules), None)
        if inner is None:
            return model
        model = inner


def text_config(model: nn.Module) -> PreTrainedConfig:
    """The config of the language model (of a multimodal model: its text part)."""
    return unwrap(model).config.get_text_config()  # pyright: ignore


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that turns hidden states into logits, seen through PEFT; None where there is none."""
    inner = unwrap(model)
    getter = getattr(inner, "get_output_embeddings", None)
    return getter() if getter is not None else None


def value_head(model: nn.Module) -> nn.Module | None:
    """The scalar head of a sequence classification model (`score`), seen through PEFT; None where there is none."""
    head = getattr(unwrap(model), "score", None)
    return head if isinstance(head, nn.Module) else None


def num_labels(model: nn.Module) -> int | None:
    return getattr(unwrap(model).config, "num_labels", None)


def vocabulary_size(model: nn.Module) -> int:
    """Number of ids the input embeddings know (also where ZeRO-3 has their weight elsewhere)."""
    embeddings = unwrap(model).get_input_embeddings()  # pyright: ignore
    return getattr(embeddings, "num_embeddings", None) or text_config(model).vocab_size


def learned_position_limit(model: nn.Module) -> int | None:
    """Positions for which the model has learned a vector; None where they are computed (rotary, ALiBi)."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    if limit is None:
        return None
    token_table = unwrap(model).get_input_embeddings()  # pyright: ignore
    tables = [m for m in unwrap(model).modules() if isinstance(m, nn.Embedding) and m is not token_table]
    # some tables begin with a few rows that stand for no position
    return limit if any(limit <= table.num_embeddings <= limit + 8 for table in tables) else None


def input_device(model: nn.Module) -> torch.device:
    """Where token ids must be."""
    return next(unwrap(model).get_input_embeddings().parameters()).device  # pyright: ignore


def is_plain_linear(head: nn.Module) -> bool:
    """True where a head's own forward computes `x @ weight.T + bias` and nothing else: no adapter, no quantisation.

    Ask inside the model's forward: outside it FSDP2 shows a sharded weight.
    """
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    return not hasattr(head.weight, "placements") and head.weight.dtype.is_floating_point


def is_prompt_learning(model: nn.Module) -> bool:
    """True for PEFT prompt, prefix and p-tuning: virtual tokens are put before every row."""
    return bool(getattr(getattr(unwrap(model), "active_peft_config", None), "is_prompt_learning", False))


def attention_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config object that some module of the model reads its attention implementation from."""
    found: dict[int, PreTrainedConfig] = {}

    def add(config: Any) -> None:
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            for name in config.sub_configs:
                add(getattr(config, name, None))

    for module in unwrap(model).modules():
        add(getattr(module, "config", None))
    return list(found.values())


def supports_attention_switch(model: nn.Module) -> bool:
    """False where the family says that it does not go through transformers' AttentionInterface (True is no proof)."""
    check = getattr(unwrap(model), "_can_set_attn_implementation", None)
    return bool(check()) if check is not None else False


def takes_extra_keywords(model: nn.Module) -> bool:
    """True where the forward hands unknown keyword arguments down."""
    inner = unwrap(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # pyright: ignore
    forward: Callable = inspect.unwrap(type(inner).forward)
    parameters = inspect.signature(forward).parameters
    return "position_ids" in parameters and any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def position_limit(model: nn.Module) -> int | None:
    """Tokens that the model has positions for; None where its config names no limit."""
    return getattr(text_config(model), "max_position_embeddings", None)


def generation_config(model: nn.Module) -> Any:
    """How the model generates; None for one that does not (a classifier)."""
    return getattr(unwrap(model), "generation_config", None)


def pad_token_id(model: nn.Module) -> int | None:
    return getattr(text_config(model), "pad_token_id", None)


@contextmanager
def pad_token(model: nn.Module, token_id: int) -> Iterator[None]:
    """Gives the config a padding token until exit: without one, classifiers refuse more than one row."""
    config = text_config(model)
    before = config.pad_token_id
    config.pad_token_id = token_id
    try:
        yield
    finally:
        config.pad_token_id = before


def recomputes(model: nn.Module) -> bool:
    """True where training runs layers again in backward (gradient checkpointing is on)."""
    inner = unwrap(model)
    return inner.training and bool(getattr(inner, "is_activation_checkpointing", False))


@dataclass(frozen=True)
class PostHeadField:
    """A number that may be applied to the logits after the head.

    Attributes:
        place: Where it is, as `post_head_owner` knows it (no reference to the model, so that plans can be cached).
        name: The attribute.
        kinds: What families do with it.
        neutral: The value that switches it off.
        value: Its value.
    """

    place: str
    name: str
    kinds: tuple[PostHeadKind, ...]
    neutral: float | None
    value: float


def post_head_owner(model: nn.Module, place: str) -> Any:
    """The object that holds the fields of `place`, or None."""
    inner = unwrap(model)
    base: Any = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # pyright: ignore
    if place == "config":
        return base.config
    if place == "text_config":
        return base.config.get_text_config()
    return base if place == "model" else getattr(base, "model", None)


def post_head_fields(model: nn.Module) -> list[PostHeadField]:
    """Candidates among the attributes of the model, its body and its configs that do not have the neutral value."""
    found, seen = [], set()
    for place in ("config", "text_config", "model", "body"):
        owner = post_head_owner(model, place)
        for name, kinds, neutral in _POST_HEAD_FIELDS:
            value = getattr(owner, name, None)
            if isinstance(value, int | float) and value != neutral and (id(owner), name) not in seen:
                seen.add((id(owner), name))
                found.append(PostHeadField(place, name, kinds, neutral, float(value)))
    return found


def router_coefficient(model: nn.Module) -> float | None:
    """The model's own weight of its load-balancing loss; None where it has none (no experts, or a classifier)."""
    config = text_config(model)
    if not hasattr(config, "output_router_logits") or output_head(model) is None:
        return None
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0)
