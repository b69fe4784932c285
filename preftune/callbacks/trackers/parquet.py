"""Tables as Parquet files, one a log: `{folder}/{name}_{step:05d}.parquet`, whole or absent.

What a fresh or resumed run supersedes moves to `{folder}/superseded/`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from preftune.callbacks.trackers.base import Row, Tracker
from preftune.callbacks.trackers.cells import columns_of

UPLOAD_MINUTES = 2


class ParquetTracker(Tracker):
    """Values keep their types; a column that Parquet has no type for (messages of unlike content) holds JSON text.

    Args:
        folder: Made when there is a first table.
        hub_repo: A dataset repository on the hub that the files are uploaded to every `UPLOAD_MINUTES`.
    """

    name = "parquet"
    is_local = True

    def __init__(self, folder: str | os.PathLike[str], hub_repo: str | None = None):
        self.folder = Path(folder)
        self._hub_repo = hub_repo
        self._scheduler: Any = None
        self._own: set[Path] = set()

    def begin(self, step: int) -> None:
        """Files of later steps move aside; at step 0, where a new run begins, also all that another process wrote."""
        for path in sorted(self.folder.glob("*.parquet")):
            if _step_of(path) > step or (step == 0 and path not in self._own):
                (self.folder / "superseded").mkdir(exist_ok=True)
                os.replace(path, self.folder / "superseded" / path.name)

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Nothing: curves are in `metrics.jsonl`."""

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        if not rows:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}_{step:05d}.parquet"
        staged = path.with_suffix(".new")
        pq.write_table(_table(rows), staged)
        os.replace(staged, path)
        self._own.add(path)
        if self._hub_repo is not None and self._scheduler is None:
            from huggingface_hub import CommitScheduler

            self._scheduler = CommitScheduler(
                repo_id=self._hub_repo,
                repo_type="dataset",
                folder_path=self.folder,
                every=UPLOAD_MINUTES,
                allow_patterns=["*.parquet"],
                ignore_patterns=["superseded/*"],
            )

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.trigger().result()
            self._scheduler.stop()


def _table(rows: Sequence[Row]) -> pa.Table:
    return pa.table({column: _array([row.get(column) for row in rows]) for column in columns_of(rows)})


def _array(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values])


def _step_of(path: Path) -> int:
    found = re.search(r"_(\d+)$", path.stem)
    return int(found.group(1)) if found else -1
