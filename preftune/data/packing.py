"""Joins short rows into rows of one length, so that little is padded; documents stay apart through `seq_lengths`.

The plan is made from the lengths of the whole dataset, not of a map batch, and depends on nothing but them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, List, Value

from preftune.data.mapping import cache_file, digest
from preftune.errors import ConfigError, DataFormatError

STRATEGIES = ("bfd", "bfd_split", "wrapped")
STREAM_ROWS = 1000
LENGTH_ROWS = 10_000
_MAP_OPTIONS = ("num_proc", "desc", "load_from_cache_file", "keep_in_memory", "cache_file_name", "writer_batch_size")

# A piece of a row: its number, its first token and the token after its last. A bin is what becomes one packed row.
Piece = tuple[int, int, int]


def pack_dataset(
    dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Packs rows of equally long list columns (ids, labels, masks) into rows of at most `seq_length` tokens.

    - bfd: best fit decreasing. Whole rows only; a longer row is cut at its end, so no document begins in its middle.
    - bfd_split: the same, but a longer row is split into pieces first and no token is lost.
    - wrapped: all rows end to end, cut every `seq_length` tokens; documents are not kept apart.

    With bfd and bfd_split a column `seq_lengths` has the lengths of the documents of each packed row. Rows without
    tokens are left out. A streaming dataset is packed 1,000 rows at a time (`map_kwargs={"batch_size": ...}`).

    Raises:
        ConfigError: an unknown strategy, or a length below 1.
        DataFormatError: a column that is no list, or columns of different lengths, with the row.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"packing strategy {strategy!r} is not known. Allowed: {', '.join(STRATEGIES)}.")
    if seq_length < 1:
        raise ConfigError(f"seq_length={seq_length} is too short to pack into; wanted at least 1 token.")
    if isinstance(dataset, (DatasetDict, IterableDatasetDict, dict)):
        splits = {name: pack_dataset(split, seq_length, strategy, map_kwargs) for name, split in dataset.items()}
        return type(dataset)(splits)
    options: dict[str, Any] = dict(map_kwargs or {})
    if isinstance(dataset, IterableDataset):
        return _pack_stream(dataset, seq_length, strategy, options.get("batch_size", STREAM_ROWS))
    rows = dataset.with_format("arrow")
    bins = plan_bins(row_lengths(rows), seq_length, strategy)
    if not bins:
        raise DataFormatError("nothing to pack: no row has a token.")
    fingerprint = digest(dataset._fingerprint, "packed", seq_length, strategy)
    features = Features({column: _plain_list(feature) for column, feature in dataset.features.items()})
    if strategy != "wrapped":
        features["seq_lengths"] = List(Value("int64"))
    plan = Dataset.from_dict({"bin": [[number for piece in pieces for number in piece] for pieces in bins]})
    options = {"desc": "Packing", **{key: value for key, value in options.items() if key in _MAP_OPTIONS}}
    options.setdefault("cache_file_name", cache_file(dataset, fingerprint))
    packed = plan.map(
        functools.partial(_pack_bins, rows=rows, with_lengths=strategy != "wrapped"),
        batched=True,
        remove_columns=["bin"],
        features=features,
        new_fingerprint=fingerprint,
        **options,
    )
    return _keep_format(packed, dataset)


def plan_bins(lengths: np.ndarray, seq_length: int, strategy: str) -> list[list[Piece]]:
    """Which pieces of which rows make up each packed row."""
    if strategy == "wrapped":
        return _wrap(lengths, seq_length)
    if strategy == "bfd":
        pieces = [(row, 0, min(int(n), seq_length)) for row, n in enumerate(lengths) if n]
    else:
        pieces = [
            (row, start, min(start + seq_length, int(n)))
            for row, n in enumerate(lengths)
            for start in range(0, int(n), seq_length)
        ]
    return _best_fit(pieces, seq_length)


def _best_fit(pieces: Sequence[Piece], seq_length: int) -> list[list[Piece]]:
    """Longest piece first, each into the fullest bin that has room; ties go to the earlier piece and the older bin."""
    bins: list[list[Piece]] = []
    with_room: list[deque[int]] = [deque() for _ in range(seq_length + 1)]
    # Bit r is set where some bin has room for exactly r tokens: the fullest bin that fits is one shift away.
    rooms = 0
    for piece in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        size = piece[2] - piece[1]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].popleft()
            if not with_room[room]:
                rooms ^= 1 << room
            bins[chosen].append(piece)
        else:
            room, chosen = seq_length, len(bins)
            bins.append([piece])
        if room > size:
            with_room[room - size].append(chosen)
            rooms |= 1 << (room - size)
    return bins


def _wrap(lengths: np.ndarray, seq_length: int) -> list[list[Piece]]:
    bins: list[list[Piece]] = []
    room = 0
    for row, n in enumerate(lengths):
        start = 0
        while start < n:
            if not room:
                bins.append([])
                room = seq_length
            end = min(int(n), start + room)
            bins[-1].append((row, start, end))
            room -= end - start
            start = end
    return bins


def row_lengths(rows: Dataset) -> np.ndarray:
    """Tokens of each row of a dataset in arrow format.

    Raises:
        DataFormatError: a column that is no list, or that differs in length from the first one, with the row.
    """
    columns = list(rows.column_names)
    for column in columns:
        kind = rows.data.schema.field(column).type
        if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
            raise DataFormatError(
                f"column {column!r} holds {kind}, and packing joins lists of tokens. Remove the column before packing."
            )
    found: dict[str, list[np.ndarray]] = {column: [] for column in columns}
    for start in range(0, len(rows), LENGTH_ROWS):
        table: Any = rows[start : start + LENGTH_ROWS]
        for column in columns:
            found[column].extend(np.diff(chunk.offsets.to_numpy()) for chunk in table.column(column).chunks)
    lengths = {column: np.concatenate(parts) if parts else np.zeros(0, np.int64) for column, parts in found.items()}
    for column in columns:
        wrong = np.flatnonzero(lengths[columns[0]] != lengths[column])
        if len(wrong):
            row = int(wrong[0])
            raise DataFormatError(
                f"row {row}: column {columns[0]!r} has {lengths[columns[0]][row]} values and {column!r} has "
                f"{lengths[column][row]}; packing needs one for each token. Cut them alike, or remove the column."
            )
    if not columns:
        raise DataFormatError("a dataset without columns cannot be packed.")
    return lengths[columns[0]]


def _pack_bins(batch: Mapping[str, list], rows: Dataset, with_lengths: bool) -> pa.Table:
    """Packed rows for a batch of bins, each written as row, first, end, row, first, end, ..."""
    pieces = [np.asarray(flat, np.int64).reshape(-1, 3) for flat in batch["bin"]]
    return _join(rows, pieces, with_lengths)


def _join(rows: Dataset, bins: Sequence[np.ndarray], with_lengths: bool) -> pa.Table:
    pieces = np.concatenate(bins)
    needed, places = np.unique(pieces[:, 0], return_inverse=True)
    table = rows[needed.tolist()].combine_chunks()
    sizes = pieces[:, 2] - pieces[:, 1]
    ends = np.cumsum([0, *(int((part[:, 2] - part[:, 1]).sum()) for part in bins)])
    columns = {}
    for column in table.column_names:
        values = table.column(column).combine_chunks()
        offsets = values.offsets.to_numpy().astype(np.int64)
        first = offsets[places] - offsets[0] + pieces[:, 1]
        # Token k of a piece stands at first + k: one range over all tokens, shifted piece by piece.
        index = np.arange(sizes.sum()) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes)
        columns[column] = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values.flatten().take(pa.array(index)))
    if with_lengths:
        counts = np.cumsum([0, *map(len, bins)])
        columns["seq_lengths"] = pa.ListArray.from_arrays(pa.array(counts, pa.int32()), pa.array(sizes, pa.int64()))
    return pa.table(columns)


def _pack_stream(dataset: IterableDataset, seq_length: int, strategy: str, batch_rows: int) -> IterableDataset:
    pack = functools.partial(_pack_batch, seq_length=seq_length, strategy=strategy)
    names = dataset.column_names
    features = None
    if dataset.features is not None:
        features = Features({column: _plain_list(feature) for column, feature in dataset.features.items()})
        if strategy != "wrapped":
            features["seq_lengths"] = List(Value("int64"))
    return dataset.map(pack, batched=True, batch_size=batch_rows, remove_columns=names, features=features)


def _pack_batch(batch: Mapping[str, list], seq_length: int, strategy: str) -> dict[str, list]:
    rows = Dataset.from_dict(dict(batch)).with_format("arrow")
    bins = plan_bins(row_lengths(rows), seq_length, strategy)
    packed = _join(rows, [np.asarray(pieces, np.int64) for pieces in bins], strategy != "wrapped") if bins else None
    empty = {column: [] for column in batch} | ({"seq_lengths": []} if strategy != "wrapped" else {})
    return packed.to_pydict() if packed is not None else empty


def _plain_list(feature: Any) -> List:
    return List(feature.feature)


def _keep_format(packed: Dataset, dataset: Dataset) -> Dataset:
    form = dataset.format
    if form["type"] is None:
        return packed
    columns = [*form["columns"], *(["seq_lengths"] if "seq_lengths" in packed.column_names else [])]
    return packed.with_format(form["type"], columns=columns, **form["format_kwargs"])
