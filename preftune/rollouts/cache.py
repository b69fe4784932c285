"""Keys and values of rows that are decoded together: written once per prompt, in buffers that grow by chunks.

Rows end at the same column (prompts are padded on the left), as in transformers' own `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
class Prefilled:
    """The cache of prompts that went through the model together, padded on the left to one width.

    Attributes:
        layers: Of the cache.
        rows: For each prompt in it the rows `(first, end)` that continue it.
        lengths: Tokens of each prompt.
    """

    layers: list[DynamicLayer]
    rows: Sequence[tuple[int, int]]
    lengths: Sequence[int]


def shared_cache(prefilled: Sequence[Prefilled], *, width: int, limit: int) -> Cache:
    """One cache whose rows continue the prompts; the layers of `prefilled` are given up one by one.

    Args:
        prefilled: All rows, in order.
        width: Columns of the longest prompt.
        limit: Columns that will be needed at most.
    """
    count = len(prefilled[0].layers)
    return Cache(
        layers=[_GrowingLayer.of([(p, p.layers.pop(0)) for p in prefilled], width, limit) for _ in range(count)]
    )


class _GrowingLayer(CacheLayerMixin):
    """Keys and values `[rows, heads, capacity, dim]`, of which columns `[:end]` are filled; views of them go out.

    `DynamicLayer` copies everything at every token. A sliding window keeps more than it shows, and shows what
    transformers' masks expect: the last `window - 1` columns and the new ones.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, window: int | None, seen: int, limit: int) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.is_initialized = True
        self._window = window
        self._seen = seen
        self._limit = limit
        self._end = 0

    @classmethod
    def of(cls, parts: list[tuple[Prefilled, DynamicLayer]], width: int, limit: int) -> _GrowingLayer:
        first = parts[0][1]
        window = first.sliding_window if isinstance(first, DynamicSlidingWindowLayer) else None
        layer = cls(window, width, limit)
        layer._end = width if window is None else min(width, window - 1)
        rows = parts[-1][0].rows[-1][1]
        layer.keys = layer._gather([(p, _filled(part.keys)) for p, part in parts], rows)
        layer.values = layer._gather([(p, _filled(part.values)) for p, part in parts], rows)
        return layer

    def _gather(self, parts: list[tuple[Prefilled, Tensor]], rows: int) -> Tensor:
        states = parts[0][1]
        buffer = states.new_empty(rows, states.shape[1], self._capacity(self._end), states.shape[3])
        for prefilled, states in parts:
            for index, ((lo, hi), length) in enumerate(zip(prefilled.rows, prefilled.lengths, strict=True)):
                start = self._end - min(length, states.shape[2], self._end)
                buffer[lo:hi, :, :start] = 0  # masked, yet a NaN there would pass through the mask
                buffer[lo:hi, :, start : self._end] = states[index, :, states.shape[2] - (self._end - start) :]
        return buffer

    def _capacity(self, kept: int) -> int:
        ahead = self._limit - self._seen
        return kept + min(ahead, max(_CHUNK, kept // 2))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        count = key_states.shape[2]
        if self._end + count > _filled(self.keys).shape[2]:
            self._move(None)
        keys, values = _filled(self.keys), _filled(self.values)
        end = self._end + count
        keys[:, :, self._end : end] = key_states
        values[:, :, self._end : end] = value_states
        self._end = end
        self._seen += count
        begin = 0 if self._window is None else max(0, end - (self._window - 1 + count))
        return keys[:, :, begin:end], values[:, :, begin:end]

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these."""
        self._move(rows)

    def _move(self, rows: Tensor | None) -> None:
        """New buffers with room for more columns, for all rows or some."""
        begin = 0 if self._window is None else max(0, self._end - (self._window - 1))
        kept = self._end - begin
        capacity = self._capacity(kept)

        def moved(old: Tensor) -> Tensor:
            count = old.shape[0] if rows is None else rows.shape[0]
            new = old.new_empty(count, old.shape[1], capacity, old.shape[3])
            filled = old[:, :, begin : self._end]
            new[:, :, :kept] = filled if rows is None else filled.index_select(0, rows.to(old.device))
            return new

        self.keys, self.values = moved(_filled(self.keys)), moved(_filled(self.values))
        self._end = kept

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = 0 if self._window is None else max(0, self._seen - self._window + 1)
        return self._seen - offset + query_length, offset

    def get_seq_length(self) -> int:
        return self._seen

    def get_max_length(self) -> int:
        return -1 if self._window is None else self._window

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
