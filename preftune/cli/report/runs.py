"""A finished or running run, read from its output folder: logs, tables of completions, manifest.

What is missing or damaged is said in `problems` and never an error, so that a run that crashed can be looked at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preftune.callbacks.environment import MANIFEST, read_manifest
from preftune.callbacks.findings import Entry, is_training
from preftune.callbacks.trackers.jsonl import read_metrics, read_table
from preftune.errors import ConfigError

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a folder tells about a run.

    Attributes:
        path: The output folder.
        entries: Logs in order; of steps that were taken again after a resume only the last.
        tables: Rows by name; every row has its `step`.
        manifest: run.json, or None.
        resumed_at: Steps at which training went on after an interruption.
        problems: What could not be read, in words.
    """

    path: Path
    entries: Sequence[Entry] = ()
    tables: dict[str, list[Row]] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None
    resumed_at: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def last_step(self) -> int:
        return max((entry["step"] for entry in self.entries), default=0)


def read_run(path: str | Path) -> Run:
    """Reads an output folder.

    Raises:
        ConfigError: there is no such folder, or nothing of a run in it.
    """
    folder = Path(path)
    if folder.name == "logs" and (folder / "metrics.jsonl").exists():
        folder = folder.parent
    logs = folder / "logs"
    if not (logs / "metrics.jsonl").exists() and not (folder / MANIFEST).exists():
        raise ConfigError(_nothing_there(folder))
    problems: list[str] = []
    raw = read_metrics(logs)
    lines = _lines(logs / "metrics.jsonl")
    if lines > len(raw):
        problems.append(f"{lines - len(raw)} of {lines} lines of metrics.jsonl cannot be read and were left out.")
    entries, resumed = without_repeats(raw)
    if not entries:
        problems.append("Nothing has been logged.")
    manifest = read_manifest(folder)
    if manifest is None:
        state = "cannot be read" if (folder / MANIFEST).exists() else "is missing"
        problems.append(f"{MANIFEST} {state}: config, data report and environment are not known.")
    resumed |= {item["step"] for item in (manifest or {}).get("resumed", [])}
    tables = _tables(folder, problems)
    return Run(folder, entries, tables, manifest, tuple(sorted(resumed)), tuple(problems))


def without_repeats(entries: Sequence[Entry]) -> tuple[list[Entry], set[int]]:
    """The logs without those that a resumed run has taken again, and the steps from which it went on.

    A log of training whose step is not after that of the one before replaces everything from its step on.
    """
    kept: list[Entry] = []
    resumed: set[int] = set()
    last = -1
    for entry in entries:
        if is_training(entry):
            if entry["step"] <= last:
                kept = [earlier for earlier in kept if earlier["step"] < entry["step"]]
                resumed.add(max((earlier["step"] for earlier in kept), default=0))
            last = entry["step"]
        kept.append(entry)
    return kept, resumed


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """A short name for each: the last parts of its path, as many as tell the runs apart."""
    parts = [run.path.resolve().parts for run in runs]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [name if names.index(name) == i else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _tables(folder: Path, problems: list[str]) -> dict[str, list[Row]]:
    """Tables of the logs; those that are only there as Parquet files (`completions_00010.parquet`) from there."""
    tables = {}
    for path in sorted((folder / "logs" / "tables").glob("*.jsonl")):
        tables[path.stem] = read_table(folder / "logs", path.stem)
    files = [
        (re.fullmatch(r"(.+)_(\d+)", path.stem), path) for path in sorted((folder / "completions").glob("*.parquet"))
    ]
    for match, path in files:
        if match is None or (folder / "logs" / "tables" / f"{match[1]}.jsonl").exists():
            continue
        try:
            rows = _read_parquet(path)
        except (OSError, ValueError) as error:  # pyarrow's errors are these
            problems.append(f"{path.name} cannot be read ({error}).")
            continue
        tables.setdefault(match[1], []).extend({"step": int(match[2]), **row} for row in rows)
    return {name: sorted(rows, key=lambda row: row["step"]) for name, rows in tables.items() if rows}


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(path).to_pylist()
    return [row if isinstance(row.get("step"), int) else {k: v for k, v in row.items() if k != "step"} for row in rows]


def _lines(path: Path) -> int:
    if not path.exists():
        return 0
    return sum(1 for line in path.read_bytes().splitlines() if line.strip())


def _nothing_there(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is no folder. Give the output_dir of a run."
    below = sorted(p.parent.parent.relative_to(folder) for p in folder.glob("*/logs/metrics.jsonl"))
    if below:
        names = " ".join(str(folder / name) for name in below[:8])
        return f"{folder} is not the output_dir of a run, but there are runs below it: {names}"
    return f"{folder} has no logs/metrics.jsonl and no {MANIFEST}. Give the output_dir of a preftune run."
