"""Loads what `--dataset_name` or `datasets` describe, and holds rows out for evaluation.

The rows held out depend on the data alone, never on the training seed, so that runs can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError

from preftune.cli.preflight import check_exists
from preftune.configs.fields import did_you_mean
from preftune.configs.script import DatasetConfig, DatasetMixtureConfig, ScriptArguments
from preftune.errors import ConfigError, DataFormatError

Rows = Dataset | IterableDataset

_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".txt": ("text", {}),
}
_HELD_OUT_SEED = 0


@dataclass(frozen=True)
class Splits:
    """Rows to train on, and rows to evaluate on where there are any."""

    train: Rows
    evaluation: Rows | None


def load_splits(script: ScriptArguments, mixture: DatasetMixtureConfig, *, evaluate: bool) -> Splits:
    """The rows that the options describe.

    Args:
        evaluate: Whether the run wants an evaluation set (`eval_strategy` is set, or a test split was named).

    Raises:
        ConfigError: There is no such dataset or split, or no evaluation set although one is wanted.
        DataFormatError: The dataset cannot be read, or has no rows.
    """
    if mixture.datasets:
        train, evaluation = _load_mixture(mixture), None
    else:
        source = DatasetConfig(path=str(script.dataset_name), name=script.dataset_config)
        streaming = script.dataset_streaming or mixture.streaming
        train = load_rows(source, script.dataset_train_split, streaming)
        held_out = mixture.test_split_size is not None
        wants_split = evaluate and not held_out
        evaluation = load_rows(source, script.dataset_test_split, streaming) if wants_split else None
    if mixture.test_split_size is not None:
        train, evaluation = hold_out(train, mixture.test_split_size)
    if evaluate and evaluation is None:
        raise ConfigError(
            "evaluation is asked for, and there is nothing to evaluate on. Add --test_split_size 100 to hold rows out, "
            "or set eval_strategy to no."
        )
    return Splits(train, evaluation)


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """A mixture of datasets as `{"train": rows}`, with `"test"` beside it where `test_split_size` is set."""
    splits = load_splits(ScriptArguments(), mixture_config, evaluate=False)
    parts: dict[Any, Any] = {"train": splits.train}
    if splits.evaluation is not None:
        parts["test"] = splits.evaluation
    return IterableDatasetDict(parts) if isinstance(splits.train, IterableDataset) else DatasetDict(parts)


def load_rows(source: DatasetConfig, split: str, streaming: bool) -> Rows:
    """One split of one dataset: a file, a folder that `save_to_disk` wrote, or what `load_dataset` knows.

    Raises:
        ConfigError: There is no such dataset or split.
        DataFormatError: It cannot be read, or has no rows.
    """
    check_exists(source.path, "dataset")
    path = Path(source.path).expanduser()
    try:
        rows = _from_disk(path, split) if _is_saved(path) else _load(source, path, split, streaming)
    except DatasetGenerationError as error:
        raise DataFormatError(f"{source.path} cannot be read: {error.__cause__ or error}") from error
    except (FileNotFoundError, ConnectionError) as error:
        raise ConfigError(f"dataset {source.path!r} was not found: {error}") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"dataset {source.path!r}, split {split!r}: {error}") from error
    if isinstance(rows, Dataset) and len(rows) == 0:
        raise DataFormatError(f"dataset {source.path!r}, split {split!r}, has no rows.")
    return rows


def _load(source: DatasetConfig, path: Path, split: str, streaming: bool) -> Rows:
    if path.is_file():
        suffix = next(suffix.lower() for suffix in reversed(path.suffixes) if suffix.lower() in _READERS)
        reader, options = _READERS[suffix]
        return load_dataset(reader, data_files={"train": str(path)}, split=split, streaming=streaming, **options)
    name = str(path) if path.is_dir() else source.path
    return load_dataset(
        name,
        source.name,
        data_dir=source.data_dir,
        data_files=source.data_files,
        split=split,
        streaming=streaming,
    )


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _from_disk(path: Path, split: str) -> Rows:
    saved = load_from_disk(str(path))
    if isinstance(saved, Dataset):
        return saved
    known = [str(name) for name in saved]
    if split not in known:
        raise ConfigError(
            f"{path} has no split {split!r}{did_you_mean(split, known) or '.'} It has: {', '.join(known)}."
        )
    return saved[split]


def _load_mixture(mixture: DatasetMixtureConfig) -> Rows:
    """All datasets of a mixture, one after the other."""
    parts = []
    for source in mixture.datasets:
        parts.append(_with_columns(load_rows(source, source.split, mixture.streaming), source))
    first = sorted(parts[0].column_names or [])
    for source, rows in zip(mixture.datasets, parts, strict=True):
        if sorted(rows.column_names or []) != first:
            raise DataFormatError(
                f"datasets of a mixture need the same columns: {mixture.datasets[0].path} has {', '.join(first)}; "
                f"{source.path} has {', '.join(sorted(rows.column_names or []))}. Choose or rename them with columns "
                "in each entry."
            )
    return concatenate_datasets(parts)


def _with_columns(rows: Rows, source: DatasetConfig) -> Rows:
    """Keep the columns of a list; with a mapping, keep and rename its columns."""
    if source.columns is None:
        return rows
    wanted = list(source.columns.values()) if isinstance(source.columns, dict) else list(source.columns)
    found = rows.column_names or wanted
    for column in wanted:
        if column not in found:
            raise DataFormatError(
                f"dataset {source.path!r} has no column {column!r}{did_you_mean(column, found) or '.'} "
                f"It has: {', '.join(found)}."
            )
    rows = rows.select_columns(wanted)
    if isinstance(source.columns, dict):
        rows = rows.rename_columns({theirs: ours for ours, theirs in source.columns.items() if ours != theirs})
    return rows


def hold_out(rows: Rows, size: float) -> tuple[Rows, Rows]:
    """Split off `size` rows (a share of all below 1), the same ones for the same number of rows; order is kept.

    A stream gives its first rows.

    Raises:
        ConfigError: Nothing would be left on one side, or a share of a stream is asked for.
    """
    if isinstance(rows, IterableDataset):
        if size < 1:
            raise ConfigError(
                f"test_split_size={size} of a stream is unknown. Give a number of rows, for instance 100."
            )
        return rows.skip(int(size)), rows.take(int(size))
    total = len(rows)
    count = round(size * total) if size < 1 else int(size)
    if not 0 < count < total:
        raise ConfigError(
            f"test_split_size={size:g} of {total} rows leaves {total - count} to train on and {count} out."
        )
    held = np.random.default_rng(_HELD_OUT_SEED).permutation(total)[:count]
    kept = np.setdiff1d(np.arange(total), held)
    return rows.select(kept), rows.select(np.sort(held))
