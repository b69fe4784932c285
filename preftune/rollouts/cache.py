"""Keys and values of rows that are decoded together: written once per prompt, in buffers that grow by chunks.

Rows end at the same column (prompts are padded on the left), as in transformers' own `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

_CHUNK = 128


def cache_obstacle(config: PreTrainedConfig) -> str | None:
    """Why the cache of such a model cannot be shared between the samples of a prompt; None where it can."""
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    foreign = kinds - {DynamicLayer, DynamicSlidingWindowLayer}
    return f"it caches {', '.join(sorted(kind.__name__ for kind in foreign))}" if foreign else None


@dataclass(frozen=True)
class LayerStates:
    """Keys and values of a layer, `[rows, heads, columns, dim]`: the last columns of what its rows have seen.

    Attributes:
        window: How far back the layer looks; None: to the beginning.
    """

    keys: Tensor
    values: Tensor
    window: int | None

    def begin(self, columns: int) -> LayerStates:
        """Views of the first columns."""
        return LayerStates(self.keys[:, :, :columns], self.values[:, :, :columns], self.window)


@dataclass(frozen=True)
class Prefilled:
    """The cache of prompts that went through the model together, padded on the left to one width.

    Attributes:
        layers: Of the cache.
        rows: For each prompt in it the rows `(first, end)` that continue it.
        lengths: Tokens of each prompt.
    """

    layers: list[LayerStates]
    rows: Sequence[tuple[int, int]]
    lengths: Sequence[int]


def prefill_cache(config: PreTrainedConfig, whole: bool) -> DynamicCache:
    """An empty cache for prompts; with `whole` its sliding windows keep all columns."""
    cache = DynamicCache(config=config)
    for layer in cache.layers if whole else ():
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()
    return cache


def taken(cache: Cache) -> list[LayerStates]:
    """What the layers of a cache hold; the cache gives them up."""
    states = [_states(layer) for layer in cache.layers]
    cache.layers.clear()
    return states


def _states(layer: Any) -> LayerStates:
    keys, values = _filled(layer.keys), _filled(layer.values)
    if isinstance(layer, _GrowingLayer):
        return LayerStates(keys, values, layer.window).begin(layer.end)
    return LayerStates(keys, values, layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None)


def shared_cache(prefilled: Sequence[Prefilled], *, width: int, limit: int, whole: bool = False) -> Cache:
    """One cache whose rows continue the prompts; the layers of `prefilled` are given up one by one.

    Args:
        prefilled: All rows, in order.
        width: Columns of the longest prompt.
        limit: Columns that will be needed at most.
        whole: Sliding windows keep all columns too, as those of `prefilled` have done.
    """
    count = len(prefilled[0].layers)
    return Cache(
        layers=[_GrowingLayer.of([(p, p.layers.pop(0)) for p in prefilled], width, limit, whole) for _ in range(count)]
    )


def row_of(cache: Cache, row: int, columns: slice) -> list[LayerStates]:
    """Copies of what a `shared_cache` that is `whole` holds of a row."""

    def copied(states: LayerStates) -> LayerStates:
        keys, values = (x[row : row + 1, :, columns].clone() for x in (states.keys, states.values))
        return LayerStates(keys, values, states.window)

    return [copied(_states(layer)) for layer in cache.layers]


class _GrowingLayer(CacheLayerMixin):
    """Keys and values `[rows, heads, capacity, dim]`, of which columns `[:end]` are filled; views of them go out.

    `DynamicLayer` copies everything at every token. A sliding window keeps more than it shows, and shows what
    transformers' masks expect: the last `window - 1` columns and the new ones.

    Attributes:
        window: None where the layer looks back to the beginning.
        end: Columns that are filled.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, window: int | None, seen: int, limit: int, whole: bool) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.is_initialized = True
        self.window = window
        self._seen = seen
        self._limit = limit
        self._kept = None if whole or window is None else window - 1
        self.end = self._kept_of(seen)

    @classmethod
    def of(cls, parts: list[tuple[Prefilled, LayerStates]], width: int, limit: int, whole: bool) -> _GrowingLayer:
        layer = cls(parts[0][1].window, width, limit, whole)
        rows = parts[-1][0].rows[-1][1]
        layer.keys = layer._gather([(p, part.keys) for p, part in parts], rows)
        layer.values = layer._gather([(p, part.values) for p, part in parts], rows)
        return layer

    def _kept_of(self, columns: int) -> int:
        """How many of the last `columns` have to be kept."""
        return columns if self._kept is None else min(columns, self._kept)

    def _gather(self, parts: list[tuple[Prefilled, Tensor]], rows: int) -> Tensor:
        states = parts[0][1]
        buffer = states.new_empty(rows, states.shape[1], self._capacity(self.end), states.shape[3])
        for prefilled, states in parts:
            for index, ((lo, hi), length) in enumerate(zip(prefilled.rows, prefilled.lengths, strict=True)):
                start = self.end - min(length, states.shape[2], self.end)
                buffer[lo:hi, :, :start] = 0  # masked, yet a NaN there would pass through the mask
                buffer[lo:hi, :, start : self.end] = states[index, :, states.shape[2] - (self.end - start) :]
        return buffer

    def _capacity(self, kept: int, coming: int = 1) -> int:
        ahead = self._limit - self._seen
        return kept + min(ahead, max(_CHUNK, kept // 2, coming))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        count = key_states.shape[2]
        if self.end + count > _filled(self.keys).shape[2]:
            self._move(None, count)
        keys, values = _filled(self.keys), _filled(self.values)
        end = self.end + count
        keys[:, :, self.end : end] = key_states
        values[:, :, self.end : end] = value_states
        self.end = end
        self._seen += count
        begin = 0 if self.window is None else max(0, end - (self.window - 1 + count))
        return keys[:, :, begin:end], values[:, :, begin:end]

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these."""
        self._move(rows)

    def _move(self, rows: Tensor | None, coming: int = 1) -> None:
        """New buffers with room for more columns, for all rows or some."""
        kept = self._kept_of(self.end)
        begin = self.end - kept
        capacity = self._capacity(kept, coming)

        def moved(old: Tensor) -> Tensor:
            count = old.shape[0] if rows is None else rows.shape[0]
            new = old.new_empty(count, old.shape[1], capacity, old.shape[3])
            filled = old[:, :, begin : self.end]
            new[:, :, :kept] = filled if rows is None else filled.index_select(0, rows.to(old.device))
            return new

        self.keys, self.values = moved(_filled(self.keys)), moved(_filled(self.values))
        self.end = kept

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = 0 if self.window is None else max(0, self._seen - self.window + 1)
        return self._seen - offset + query_length, offset

    def get_seq_length(self) -> int:
        return self._seen

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the layer is made with its content")


def keep_rows(cache: Cache, rows: Tensor) -> None:
    """Drops all rows of a `shared_cache` but these, layer by layer."""
    for layer in cache.layers:
        assert isinstance(layer, _GrowingLayer)
        layer.keep(rows)


def _filled(states: Tensor | None) -> Tensor:
    assert states is not None, "a layer that has seen a prompt has keys and values"
    return states
