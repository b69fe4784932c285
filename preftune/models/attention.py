"""Attention over prompt trees, registered with transformers as `preftune_tree`, and the switch that turns it on.

The first branch continues its prompt; every other branch attends to the prompt and to itself, never to its siblings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from transformers import AttentionInterface

from preftune.models.cpu_kernel import cpu_attention
from preftune.models.kernels import TreeTable, eager_attention, sdpa_attention
from preftune.models.structure import attention_configs

Layout = Literal["tree", "padded"]
TREE_ATTENTION = "preftune_tree"
TREE_KEYWORD = "preftune_tree"


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    preftune_tree: TreeTable | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers' interface: q `[1, H, N, D]`, k and v `[1, K, N, D]` -> `[1, N, H, D]`."""
    if preftune_tree is None:
        raise RuntimeError(
            "the model was called without a prompt tree inside `scoring(model, 'tree')`; "
            "leave the block before you call or generate with the model yourself"
        )
    table = preftune_tree
    window = None if sliding_window is None or sliding_window >= table.longest else sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None or s_aux is not None:
        out = eager_attention(
            query, key, value, table, scale, window=window, dropout=dropout, softcap=softcap, sinks=s_aux
        )
    elif query.device.type == "cpu" and window is None and dropout == 0 and value.shape[-1] == query.shape[-1]:
        out = cpu_attention(query, key, value, table, scale)
    else:
        out = sdpa_attention(query, key, value, table, scale, window=window, dropout=dropout)
    return out, None


AttentionInterface.register(TREE_ATTENTION, tree_attention)


class _Switched(str):
    """The name of an attention function that is on for a while; a copy or pickle gets the name from before."""

    before: str | None

    def __new__(cls, name: str, before: str | None) -> _Switched:
        self = super().__new__(cls, name)
        self.before = before
        return self

    def __copy__(self) -> str | None:
        return self.before

    def __deepcopy__(self, memo: dict) -> str | None:
        return self.before

    def __reduce__(self) -> Any:
        return (_same, (self.before,))


def _same(value: Any) -> Any:
    return value


@contextmanager
def attention_function(model: nn.Module, name: str | None) -> Iterator[None]:
    """Makes every attention layer of `model` call the registered function `name` until exit; nests; always restores.

    None gives back, for the time of the block, what stood there before any such block.
    """
    changed = []
    try:
        for config in attention_configs(model):
            current = config._attn_implementation_internal
            before = current.before if isinstance(current, _Switched) else current
            changed.append((config, current))
            config._attn_implementation_internal = before if name is None else _Switched(name, before)
        yield
    finally:
        for config, current in reversed(changed):
            config._attn_implementation_internal = current


def is_active(model: nn.Module, layout: Layout) -> bool:
    """True where the model's attention is already what `scoring(model, layout)` would make it."""
    current = [config._attn_implementation_internal for config in attention_configs(model)]
    if layout == "padded":
        return not any(isinstance(name, _Switched) for name in current)
    return all(isinstance(name, _Switched) and name == TREE_ATTENTION for name in current)


@contextmanager
def scoring(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Holds the attention function of `layout` on the model, for a forward and its backward.

    With gradient checkpointing the backward runs the layers again: leave the block only after it. Inside it the model
    cannot be called without a tree (`generate`, plain forwards); outside it nothing is changed. For `padded` the
    model's own attention function stays.
    """
    with attention_function(model, TREE_ATTENTION if layout == "tree" else None):
        yield
