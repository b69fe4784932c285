"""Applies a row encoder to a whole dataset: in batches, in several processes, cached, or while it streams.

The cache key is our own: what the encoder's ids depend on, and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets, is_caching_enabled
from datasets import config as datasets_config

from preftune.data.columns import column_names
from preftune.data.report import NOTES, DataReport, Outcome
from preftune.errors import DataFormatError

# Raise it when the ids of any row change: older caches are then left alone.
ENCODING_VERSION = 1
BATCH_ROWS = 1000
STREAM_ROWS = 64
ROWS_PER_PROCESS = 4000  # fewer are done before another process has started

EncodeBatch = Callable[[Mapping[str, list], list[int]], dict[str, list]]


@dataclass
class PreparedData:
    """Rows ready for a collator, and what was done to get them."""

    dataset: Any
    report: DataReport


@dataclass
class EncodedRow:
    """What an encoder says of one row: ids by column (empty where the row is dropped) and notes for the report."""

    ids: Sequence[Sequence[int]]
    outcome: Outcome = Outcome.KEPT
    cut: int = 0
    moved: int = 0
    unended: bool = False


def as_columns(rows: Sequence[EncodedRow], names: Sequence[str]) -> dict[str, list]:
    """The columns of a batch of encoded rows: ids under `names`, then the notes. Dropped rows have no ids."""
    kept = [row.ids if row.outcome is Outcome.KEPT else [()] * len(names) for row in rows]
    columns: dict[str, list] = {
        name: [np.array(ids[place], dtype=np.int32) for ids in kept] for place, name in enumerate(names)
    }
    columns["_outcome"] = [int(row.outcome) for row in rows]
    columns["_cut"] = [row.cut for row in rows]
    columns["_moved"] = [row.moved for row in rows]
    columns["_unended"] = [row.unended for row in rows]
    return columns


def encode_dataset(
    dataset: Any,
    encode: EncodeBatch,
    names: Sequence[str],
    *,
    key: Sequence[Any],
    name: str,
    keep: Collection[str] = (),
    beside: Collection[str] = (),
    batch_rows: int = BATCH_ROWS,
    num_proc: int | None = None,
) -> PreparedData:
    """Replaces the columns of `dataset` by the ids that `encode` makes of them.

    Args:
        dataset: A `Dataset` or `IterableDataset` with standard column names.
        encode: A picklable function from a batch and its row numbers to the columns of `as_columns`.
        names: The columns of ids.
        key: All that the ids depend on besides the dataset, as JSON values.
        name: What to call the dataset in the report.
        keep: Columns to leave in place beside the ids.
        beside: The same for large ones: they stay in the files of `dataset` and are not copied into the cache.
        batch_rows: Rows to encode at a time.
        num_proc: The most processes to encode with, one for each `ROWS_PER_PROCESS`; streaming datasets ignore it.

    Raises:
        DataFormatError: no row is left, or a row is wrong.
    """
    report = DataReport(name, streaming=isinstance(dataset, IterableDataset))
    keep = [column for column in column_names(dataset) if column in keep and column not in names]
    beside = [column for column in column_names(dataset) if column in beside and column not in keep]
    if isinstance(dataset, IterableDataset):
        return PreparedData(_stream(dataset, encode, names, keep + beside, report), report)
    if not len(dataset):
        raise DataFormatError(f"the {name} dataset has no rows. Check the split and the filters that made it.")
    dataset = dataset.with_format(None)
    fingerprint = digest(dataset._fingerprint, ENCODING_VERSION, list(names), keep, *key)
    features = Features({column: dataset.features[column] for column in keep})
    features |= Features({column: List(Value("int32")) for column in names})
    features |= Features({column: Value(dtype) for column, dtype in NOTES.items()})
    encoded = dataset.map(
        encode,
        with_indices=True,
        batched=True,
        batch_size=batch_rows,
        remove_columns=[column for column in column_names(dataset) if column not in keep],
        features=features,
        num_proc=_processes(num_proc, len(dataset)),
        new_fingerprint=fingerprint,
        cache_file_name=cache_file(dataset, fingerprint),
        desc=f"Tokenizing {name} dataset",
    )
    large = dataset.select_columns(beside) if beside else None
    return PreparedData(_keep_usable(encoded, names, report, fingerprint, large), report)


def _processes(num_proc: int | None, rows: int) -> int | None:
    processes = min(num_proc or 1, math.ceil(rows / ROWS_PER_PROCESS))
    return processes if processes > 1 else None  # a pool of one would only cost its start


def _keep_usable(
    encoded: Dataset, names: Sequence[str], report: DataReport, fingerprint: str, beside: Dataset | None
) -> Dataset:
    table = encoded.data
    notes = {column: table.column(column).to_numpy() for column in NOTES}
    lengths = {column: _list_lengths(table.column(column)) for column in names}
    rows = np.arange(len(encoded))
    report.add(rows, notes, lengths)
    if not report.rows_out:
        raise DataFormatError(report.nothing_left())
    usable = encoded.remove_columns(list(NOTES), new_fingerprint=digest(fingerprint, "ids"))
    if beside is not None:
        usable = concatenate_datasets([usable, beside], axis=1)
    if not report.rows_dropped:
        return usable
    kept = rows[notes["_outcome"] == Outcome.KEPT]
    return usable.select(kept, keep_in_memory=True, new_fingerprint=digest(fingerprint, "kept"))


def _list_lengths(column: Any) -> np.ndarray:
    return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks])


def _stream(
    dataset: IterableDataset, encode: EncodeBatch, names: Sequence[str], keep: list[str], report: DataReport
) -> IterableDataset:
    known = dataset.features
    features = None
    if known is not None or not keep:
        features = Features({column: known[column] for column in keep} if known is not None else {})
        features |= Features({column: List(Value("int32")) for column in names})
    return dataset.with_format(None).map(
        functools.partial(_encode_stream, encode=encode, names=names, keep=keep, report=report),
        with_indices=True,
        batched=True,
        batch_size=STREAM_ROWS,
        remove_columns=column_names(dataset),
        features=features,
    )


def _encode_stream(
    batch: Mapping[str, list],
    rows: list[int],
    encode: EncodeBatch,
    names: Sequence[str],
    keep: list[str],
    report: DataReport,
) -> dict[str, list]:
    columns = encode(batch, rows)
    lengths = {name: np.array([len(ids) for ids in columns[name]]) for name in names}
    report.add(rows, {note: np.array(columns[note]) for note in NOTES}, lengths)
    usable = [place for place, outcome in enumerate(columns["_outcome"]) if outcome == Outcome.KEPT]
    kept = {column: [batch[column][place] for place in usable] for column in keep}
    return {**kept, **{name: [columns[name][place].tolist() for place in usable] for name in names}}


def digest(*parts: Any) -> str:
    """32 hexadecimal digits that stand for `parts` (JSON values)."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def tokenizer_key(tokenizer: Any, chat_template: str | None = None) -> list[Any]:
    """What the ids depend on in a tokenizer: vocabulary, rules, special tokens, template; not its name or padding."""
    if tokenizer.is_fast:
        rules = tokenizer.backend_tokenizer.to_str()
        # Before the added tokens stand truncation and padding, which every call sets anew.
        rules = rules[rules.index('"added_tokens"') :]
    else:
        rules = json.dumps([tokenizer.get_vocab(), type(tokenizer).__qualname__], sort_keys=True)
    template = chat_template if chat_template is not None else tokenizer.chat_template
    return [
        hashlib.blake2b(rules.encode(), digest_size=16).hexdigest(),
        template,
        tokenizer.special_tokens_map,
        bool(tokenizer.split_special_tokens),
    ]


def cache_file(dataset: Dataset, fingerprint: str) -> str | None:
    """Where the result for `dataset` is cached: beside its files or, for a dataset in memory and files in a folder that
    cannot be written, in a folder of preftune's under `HF_DATASETS_CACHE`. None where caching is off or impossible.
    """
    if not is_caching_enabled():
        return None
    beside = [Path(file["filename"]).parent for file in dataset.cache_files[:1]]
    for folder in (*beside, Path(datasets_config.HF_DATASETS_CACHE) / "preftune"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return str(folder / f"cache-{fingerprint}.arrow")
    return None
