"""Gives every labelled row the completion of another prompt, by which KTO measures how far the policy has moved.

It is that of the next row with another prompt, in the order in which the rows are read: the batch size, the number of
processes and where a run was resumed do not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from preftune.data.multimodal import IMAGE_COLUMNS
from preftune.data.samplers import EpochSampler
from preftune.errors import DataFormatError

Row = Mapping[str, Any]

MISMATCHED = "mismatched_ids"
MOST_WAITING = 1000  # rows of one prompt in a row that a stream holds back
_READ = 10_000
_READ_IMAGES = 64


class MismatchedRows(TorchDataset):
    """Rows with `mismatched_ids`: `rows[i]` takes them from the next row of the set, `rows[i, j]` from row j.

    The rows have at least two prompts, see `require_two_prompts`.
    """

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows
        self._answers = rows.select_columns(["completion_ids"])
        self.groups = prompt_groups(rows)
        self._next = next_other_prompt(np.arange(len(rows)), self.groups)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        # accelerate tells the dataset where it cannot reach the sampler: several processes, resumed within an epoch
        self.epoch = epoch

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[int | tuple[int, int]]) -> list[dict[str, Any]]:
        places = [key if isinstance(key, tuple) else (key, int(self._next[key])) for key in keys]
        own = self.rows[[row for row, _ in places]]
        others = self._answers[[other for _, other in places]]["completion_ids"]
        return [{c: values[i] for c, values in own.items()} | {MISMATCHED: ids} for i, ids in enumerate(others)]

    def __len__(self) -> int:
        return len(self.rows)


class MismatchedSampler(EpochSampler):
    """Yields `(row, other row)`: every row once an epoch in `epoch_order`, with the next one of another prompt."""

    data_source: MismatchedRows

    def set_epoch(self, epoch: int) -> None:
        self.data_source.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.epoch = self.data_source.epoch
        order = np.array(self.order())
        return zip(order.tolist(), next_other_prompt(order, self.data_source.groups).tolist())


class MismatchedStream:
    """The same of a stream, in its own order; the last rows get the first completion of the stream, or the one before.

    Raises:
        DataFormatError: while it is read, where all rows have the same prompt.
    """

    def __init__(self, rows: IterableDataset, name: str = "train") -> None:
        self.rows = rows
        self.name = name

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        waiting: list[Row] = []  # rows of one prompt
        earlier: list[Row] = []  # the first row, and the last one of another prompt than those that wait
        for row in self.rows:
            if waiting and _prompt(row) != _prompt(waiting[0]):
                yield from _with(waiting, row)
                earlier, waiting = [*(earlier or waiting)[:1], waiting[-1]], []
            waiting.append(row)
            if len(waiting) == MOST_WAITING:
                yield from _with(waiting[:-1], self._before(waiting[0], earlier))
                waiting = waiting[-1:]
        if waiting:
            yield from _with(waiting, self._before(waiting[0], earlier))

    def _before(self, row: Row, earlier: Sequence[Row]) -> Row:
        for other in earlier:
            if _prompt(other) != _prompt(row):
                return other
        raise one_prompt(self.name)


def _prompt(row: Row) -> list[Any]:
    """Ids and images: the same question about another image is another prompt."""
    return [row.get(column) for column in ("prompt_ids", *IMAGE_COLUMNS)]


def _with(rows: Iterable[Row], other: Row) -> Iterator[dict[str, Any]]:
    return ({**row, MISMATCHED: other["completion_ids"]} for row in rows)


def prompt_groups(rows: Dataset) -> np.ndarray:
    """A number for each row; rows with equal `prompt_ids` and images have the same. The first row has 0."""
    known: dict[Any, int] = {}
    groups = np.empty(len(rows), np.int64)
    place = 0
    shown = [column for column in IMAGE_COLUMNS if column in rows.column_names]
    tables: Any = (
        rows.select_columns(["prompt_ids", *shown]).with_format("arrow").iter(_READ_IMAGES if shown else _READ)
    )
    for table in tables:
        images = [_digests(table.column(column)) for column in shown]
        row = 0
        for chunk in table.column("prompt_ids").chunks:
            ends, ids = chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=False)
            for start, end in zip(ends[:-1], ends[1:]):
                key = (ids[start:end].tobytes(), *(digests[row] for digests in images))
                groups[place] = known.setdefault(key, len(known))
                place, row = place + 1, row + 1
    return groups


def _digests(column: Any) -> list[bytes]:
    return [hashlib.blake2b(repr(images).encode(), digest_size=16).digest() for images in column.to_pylist()]


def next_other_prompt(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For each place of `order` (row numbers, read in a circle) the next row of another group.

    One fact to check: rows 0 1 2 3 in order, with groups 0 0 1 1, give 2 2 0 0.
    """
    group = groups[order]
    last = np.flatnonzero(group != np.roll(group, -1))  # places that another group follows
    before = last[np.searchsorted(last, np.arange(len(order))) % len(last)]
    return order[(before + 1) % len(order)]


def require_two_prompts(rows: Dataset, name: str) -> None:
    """Refuses a set in which no completion belongs to another prompt.

    Raises:
        DataFormatError: all rows have the same prompt.
    """
    columns = [column for column in ("prompt_ids", *IMAGE_COLUMNS) if column in rows.column_names]
    prompts = (_prompt(dict(row)) for row in rows.select_columns(columns).with_format(None))
    first = next(prompts)
    if all(prompt == first for prompt in prompts):
        raise one_prompt(name)


def one_prompt(name: str) -> DataFormatError:
    """The error for a set in which no completion belongs to another prompt."""
    return DataFormatError(
        f"all rows of the {name} dataset have the same prompt, and loss_type='kto' compares with completions of other "
        "prompts. Bring rows of at least two prompts, or set loss_type='apo_zero_unpaired', which needs none."
    )
