"""The columns of a dataset: their names, the user's names for them, and what to say when one is missing.

A dataset is never read here but for its first row.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from datasets import Dataset, IterableDataset

from preftune.errors import ConfigError, DataFormatError

# Names under which the standard columns are often published.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "query", "input", "context", "problem"),
    "chosen": ("accepted", "preferred", "chosen_response", "response_chosen", "better", "winner", "good"),
    "rejected": ("dispreferred", "rejected_response", "response_rejected", "worse", "loser", "bad"),
    "completion": ("answer", "response", "output", "target", "solution"),
    "label": ("labels", "desirable", "feedback", "thumbs_up", "liked"),
    "messages": ("conversation", "dialogue", "dialog", "chat", "turns"),
    "text": ("content", "document", "body"),
}


# First rows of streaming datasets: every look at one restarts its stream, which may mean a download.
_FIRST_ROWS: WeakKeyDictionary[IterableDataset, dict[str, Any]] = WeakKeyDictionary()


def first_row(dataset: Dataset | IterableDataset, name: str) -> dict[str, Any]:
    """The first row as plain Python values. A stream is begun once for it, however often one asks.

    Raises:
        DataFormatError: there is none.
    """
    if isinstance(dataset, IterableDataset) and dataset in _FIRST_ROWS:
        return dict(_FIRST_ROWS[dataset])
    for row in dataset.with_format(None).take(1):
        if isinstance(dataset, IterableDataset):
            _FIRST_ROWS[dataset] = dict(row)
        return dict(row)
    raise DataFormatError(f"the {name} dataset has no rows. Check the split and the filters that made it.")


def column_names(dataset: Dataset | IterableDataset) -> list[str]:
    """The names of the columns; of a streaming dataset that does not know them, the keys of its first row."""
    names = dataset.column_names
    return list(names) if names is not None else list(first_row(dataset, "streaming"))


def rename_columns(dataset: Any, columns: Mapping[str, str] | None) -> Any:
    """Gives columns their standard names: `{"prompt": "question"}` makes column `question` the prompt.

    A column that already has the standard name makes way. Two standard names may not read the same column.

    Raises:
        DataFormatError: a column to rename is not there, with the nearest name.
        ConfigError: one column is wanted under two names.
    """
    wanted = {standard: own for standard, own in (columns or {}).items() if standard != own}
    if not wanted:
        return dataset
    if len(set(wanted.values())) < len(wanted):
        raise ConfigError(f"columns={dict(wanted)} reads one column under two names. Copy the column first.")
    names = column_names(dataset)
    for standard, own in wanted.items():
        if own not in names:
            raise DataFormatError(
                f"columns maps {standard!r} to {own!r}, and the dataset has columns {names}.{_nearest(own, names)}"
            )
    displaced = [standard for standard in wanted if standard in names and standard not in wanted.values()]
    if displaced:
        dataset = dataset.remove_columns(displaced)
    return dataset.rename_columns({own: standard for standard, own in wanted.items()})


def check_plain(dataset: Any, name: str) -> None:
    """Refuses what cannot be prepared: no dataset of the `datasets` library, or one with a custom transform."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise DataFormatError(
            f"the {name} dataset is a {type(dataset).__name__}; wanted a datasets.Dataset or IterableDataset. Make one "
            "with datasets.Dataset.from_list(rows), from_dict(columns) or load_dataset('json', data_files=...)."
        )
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise DataFormatError(
            f"the {name} dataset makes its rows on the fly (Dataset.with_transform() or set_transform()), which cannot "
            "be prepared once and cached. Apply the function with dataset.map(), or, where the rows are trainer-ready, "
            "set dataset_kwargs={'skip_prepare_dataset': True}."
        )


def missing_column(
    name: str, found: Iterable[str], missing: Iterable[str], wanted: str, hint: str = ""
) -> DataFormatError:
    """The error for a dataset without a column: what it has, what is wanted, and the column that may be meant."""
    found, hints = list(found), [hint] if hint else []
    for column in missing:
        near = _meant(column, found)
        if near is not None:
            hints.append(f"If {near!r} is meant, say columns={{{column!r}: {near!r}}} (--columns {column}={near}).")
    names = ", ".join(repr(column) for column in missing)
    return DataFormatError(f"the {name} dataset has columns {found}; {wanted} needs {names} too. " + " ".join(hints))


def meant_column(standard: str, found: Iterable[str]) -> str | None:
    """A column that is often published in the role of `standard`, if there is one."""
    lowered = {column.lower(): column for column in found}
    return next((lowered[synonym] for synonym in SYNONYMS.get(standard, ()) if synonym in lowered), None)


def _meant(standard: str, found: list[str]) -> str | None:
    close = difflib.get_close_matches(standard, found, n=1, cutoff=0.7)
    return close[0] if close else meant_column(standard, found)


def _nearest(wrong: str, names: list[str]) -> str:
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
