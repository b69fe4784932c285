"""The tracker that is always on: `{output_dir}/logs/metrics.jsonl` and `tables/{name}.jsonl`, one JSON object a line.

Nothing is destroyed: lines that a fresh or resumed run supersedes move to `logs/superseded/`, same names.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from preftune.callbacks.trackers.base import Row, Tracker, TrackerQueue

_queues: weakref.WeakValueDictionary[Path, TrackerQueue] = weakref.WeakValueDictionary()
_queues_lock = threading.Lock()


def jsonl_tracker(logs_dir: str | os.PathLike[str]) -> TrackerQueue:
    """The one writer that this process has for a folder, behind its queue; call it on rank zero only."""
    path = Path(logs_dir).absolute()
    with _queues_lock:
        found = _queues.get(path)
        if found is None or found.closed:
            found = _queues[path] = TrackerQueue(JsonlTracker(path))
        return found


class JsonlTracker(Tracker):
    """Every line has `step` and is whole and in the file when the call returns.

    `metrics.jsonl` also has `wall_time` (seconds since 1970). A number that JSON lacks is one of the strings "NaN",
    "Infinity" and "-Infinity"; `read_metrics` turns them back.
    """

    name = "jsonl"
    is_local = True

    def __init__(self, logs_dir: str | os.PathLike[str]):
        self.directory = Path(logs_dir)
        self._own_start: dict[Path, int] = {}  # where in a file the lines of this object begin

    def begin(self, step: int) -> None:
        """Lines after `step` are superseded; at step 0, where a new run begins, also all that another process wrote."""
        for path in [self.directory / "metrics.jsonl", *sorted((self.directory / "tables").glob("*.jsonl"))]:
            if path.exists():
                self._supersede(path, step)

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        self._append(self.directory / "metrics.jsonl", [{"step": step, "wall_time": time.time(), **_others(scalars)}])

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        self._append(self.directory / "tables" / f"{name}.jsonl", [{"step": step, **_others(r)} for r in rows])

    def close(self) -> None:
        """Nothing is pending: every call has written and closed its file."""

    def _append(self, path: Path, rows: list[dict[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path not in self._own_start:
            _end_last_line(path)
            self._own_start[path] = path.stat().st_size if path.exists() else 0
        lines = [json.dumps(strict(row), allow_nan=False, ensure_ascii=False) + "\n" for row in rows]
        with path.open("ab") as file:
            file.write("".join(lines).encode("utf-8", "backslashreplace"))

    def _supersede(self, path: Path, step: int) -> None:
        own_start = self._own_start.get(path, path.stat().st_size)
        kept, dropped, kept_foreign_bytes, offset = [], [], 0, 0
        for line in path.read_bytes().splitlines(keepends=True):
            is_foreign = offset < own_start
            offset += len(line)
            line_step = _step_of(line)
            if line_step is None or line_step > step or (step == 0 and is_foreign):
                dropped.append(line)
                continue
            kept.append(line)
            kept_foreign_bytes += len(line) if is_foreign else 0
        if not dropped:
            return
        aside = self.directory / "superseded" / path.relative_to(self.directory)
        aside.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(aside)
        with aside.open("ab") as file:
            file.writelines(dropped)
        staged = path.with_suffix(".jsonl.new")
        staged.write_bytes(b"".join(kept))
        os.replace(staged, path)
        self._own_start[path] = kept_foreign_bytes


def read_metrics(logs_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The logs of the run in order, with NaN and infinities as floats again; a half-written last line is left out."""
    back = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    rows = _read(Path(logs_dir) / "metrics.jsonl")
    return [{k: back.get(v, v) if isinstance(v, str) else v for k, v in row.items()} for row in rows]


def read_table(logs_dir: str | os.PathLike[str], name: str) -> list[dict[str, Any]]:
    """All rows of a table in order; empty if there is none of that name."""
    return list(_read(Path(logs_dir) / "tables" / f"{name}.jsonl"))


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        if _step_of(line) is not None:
            yield json.loads(line)


def _step_of(line: bytes) -> int | None:
    """None for what is no line of ours: a write cut off by a crash."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None


def _end_last_line(path: Path) -> None:
    """So that a line cut off by a crash does not swallow the next one."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.write(b"\n")


def _others(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "step"}


def strict(value: Any) -> Any:
    """A copy that JSON can hold: what is not finite as text, see `JsonlTracker`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strict(item) for item in value]
    return value
