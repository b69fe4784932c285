"""The page: what is known of some runs as data in a script element that is not run, and our script, which draws it.

Nothing that a run wrote is markup: the script sets text and never HTML, and the page's policy lets nothing else run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from preftune.callbacks.data_findings import data_findings, reason_of
from preftune.callbacks.findings import is_training, number, scan
from preftune.callbacks.trackers.cells import as_cell, is_messages
from preftune.cli.report.curves import events_of, grouped, series_of
from preftune.cli.report.runs import Row, Run, distinct_names

ROWS_OF_TABLE, ROWS_OF_STEP, LONGEST_TEXT = 2000, 250, 6000
HEADLINES = (
    "loss", "eval_loss", "rewards/accuracies", "accuracy", "rewards/margins", "reward", "kl", "reference/drift",
    "entropy", "completions/mean_length",
)  # fmt: skip
_TEXTS = ("prompt", "completion")


def html_of(runs: Sequence[Run], docs: str = "docs") -> str:
    """The whole page as text.

    Args:
        docs: Where the documentation is, as a folder or an address, for the links of findings.
    """
    uplot, script = _asset("uPlot.iife.min.js"), _asset("report.js")
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in (uplot, script))
    data = json.dumps(payload(runs, docs), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    parts = {
        "{policy}": f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'",
        "{style}": _asset("uPlot.min.css") + _asset("report.css"),
        "{data}": data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        "{uplot}": uplot,
        "{script}": script,
    }
    before, *pieces = _pieces(_asset("report.html"), parts)
    return before + "".join(parts[name] + text for name, text in pieces)


def payload(runs: Sequence[Run], docs: str) -> dict[str, Any]:
    """All that the script draws, as JSON-able values."""
    described = [describe(run, name) for run, name in zip(runs, distinct_names(runs), strict=True)]
    metrics = dict.fromkeys(metric for run in described for metric in run["series"])
    return {
        "generated": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "docs": docs.rstrip("/"),
        "runs": described,
        "groups": grouped(metrics),
        "tables": [
            {"run": i, "name": name, **table_of(rows)}
            for i, run in enumerate(runs)
            for name, rows in run.tables.items()
            if any("completion" in row for row in rows)
        ],
    }


def describe(run: Run, name: str) -> dict[str, Any]:
    """One run: curves, events, findings, and what its manifest says."""
    manifest = run.manifest or {}
    series = series_of(run.entries)
    data = manifest.get("data", {})
    result = manifest.get("result")
    return {
        "name": name,
        "path": str(run.path),
        "problems": list(run.problems),
        "series": {metric: list(points) for metric, points in series.items()},
        "events": [asdict(event) for event in events_of(run.entries, run.manifest, run.resumed_at)],
        "findings": [
            asdict(finding) | {"severe": finding.is_severe}
            for finding in [*scan(run.entries), *data_findings(data.get("reports", {}))]
        ],
        "facts": _facts(run, manifest, result),
        "headlines": _headlines(run, series),
        "config": {field: as_text(value) for field, value in manifest.get("config", {}).items()},
        "changed": manifest.get("config_changed", []),
        "decisions": {k: as_text(v) for k, v in {**manifest.get("decisions", {}), **manifest.get("seeds", {})}.items()},
        "environment": {k: as_text(v) for k, v in manifest.get("environment", {}).items()},
        "data": [_split(split, report) for split, report in data.get("reports", {}).items()],
        "identity": {k: as_text(v) for k, v in (data.get("train") or {}).items()},
        "order": as_text((data.get("row_order") or {}).get("sha256")),
    }


def table_of(rows: Sequence[Row]) -> dict[str, Any]:
    """`{"rows": [{"step", "prompt", "completion", "extra"}], "left_out"}`: steps evenly spread, both ends kept."""
    by_step: dict[int, list[Row]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    steps = list(by_step)
    size = max(1, min(ROWS_OF_STEP, max(map(len, by_step.values()), default=1)))
    most = max(2, ROWS_OF_TABLE // size)
    if len(steps) > most:
        steps = [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]
    kept = [_cells(row) for step in steps for row in by_step[step][:ROWS_OF_STEP]]
    return {"rows": kept, "left_out": len(rows) - len(kept)}


def as_text(value: Any) -> str:
    """A value of a config for reading: `true`, `0.1`, `a, b`, `-` for nothing."""
    if value is None or value == [] or value == {}:
        return "-"
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(as_text, value))
    if isinstance(value, bool | list | Mapping):
        return json.dumps(value, default=str)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cells(row: Row) -> dict[str, Any]:
    texts = {name: _cut(_text(row.get(name))) for name in _TEXTS}
    extra = {}
    for name, value in row.items():
        if name not in (*_TEXTS, "step") and value is not None:
            cell = as_cell(value)
            extra[str(name)] = f"{cell + 0.0:.4g}" if isinstance(cell, float) else _cut(str(cell))
    return {"step": row["step"], **texts, "extra": extra}


def _text(value: Any) -> str:
    """A conversation with its roles, a single answer without."""
    text = str(as_cell(value) or "")
    return text.removeprefix("assistant: ") if is_messages(value) and len(value) == 1 else text


def _cut(text: str) -> str:
    more = len(text) - LONGEST_TEXT
    return text if more <= 0 else f"{text[:LONGEST_TEXT]} [{more:,} more characters]"


def _facts(run: Run, manifest: Mapping[str, Any], result: Mapping[str, Any] | None) -> dict[str, str]:
    """The few things that one wants to know first."""
    training = [entry for entry in run.entries if is_training(entry)]
    planned = manifest.get("max_steps")
    steps = f"{run.last_step:,}" if not planned or planned == run.last_step else f"{run.last_step:,} of {planned:,}"
    facts = {"trainer": manifest.get("trainer", "?"), "model": manifest.get("model") or "?", "steps": steps}
    parameters = manifest.get("parameters") or {}
    if parameters:
        facts["trained parameters"] = f"{parameters['trainable']:,} of {parameters['all']:,}"
    clock = [entry["wall_time"] for entry in training if number(entry.get("wall_time")) is not None]
    if result is not None:
        facts["time"] = duration(result.get("seconds", 0))
    elif len(clock) > 1:
        facts["time"] = f"{duration(clock[-1] - clock[0])} between first and last log"
    tokens = [entry["num_tokens"] for entry in training if number(entry.get("num_tokens")) is not None]
    if tokens:
        facts["tokens"] = f"{tokens[-1]:,.0f}"
    if "started" in manifest:
        facts["started"] = manifest["started"].replace("T", " ").replace("+00:00", " UTC")
    facts["state"] = "finished" if result is not None else "not finished" if manifest else "unknown"
    if result is None and clock:
        facts["last log"] = f"{duration(max(0.0, time.time() - clock[-1]))} before this page"
    return facts


def duration(seconds: float) -> str:
    """`14.2 s`, `3 min 20 s`, `5 h 12 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60) if seconds >= 3600 else int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60} min" if seconds >= 3600 else f"{minutes} min {seconds % 60:.0f} s"


def _headlines(run: Run, series: Mapping[str, Any]) -> list[dict[str, Any]]:
    """First and last value of the metrics that matter most."""
    found = []
    for name in HEADLINES:
        values = [value for value in series[name][1] if value is not None] if name in series else []
        if values:
            found.append({"name": name, "first": values[0], "last": values[-1]})
    return found


def _split(name: str, report: Mapping[str, Any]) -> dict[str, Any]:
    counts = {"rows read": report.get("rows_in", 0), "rows kept": report.get("rows_out", 0)}
    for reason, tally in report.get("dropped", {}).items():
        counts[f"dropped: {reason_of(reason)}"] = _tally(tally)
    for key, label in (("cut", "cut to max_length"), ("boundary_moved", "boundary moved"), ("unended", "without end")):
        if report.get(key, {}).get("count"):
            counts[label] = _tally(report[key])
    return {"name": name, "counts": {k: str(v) for k, v in counts.items()}, "lengths": report.get("lengths", {})}


def _tally(tally: Mapping[str, Any]) -> str:
    rows = tally.get("rows", [])
    return f"{tally.get('count', 0):,}" + (f" (rows {', '.join(map(str, rows))}, ...)" if rows else "")


def _asset(name: str) -> str:
    return resources.files("preftune.cli.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _pieces(template: str, parts: Mapping[str, str]) -> list[Any]:
    """The text before the first placeholder, then (placeholder, text after it): what is put in is not searched."""
    places = sorted((template.index(name), name) for name in parts)
    ends = [place for place, _ in places[1:]] + [len(template)]
    rest = [(name, template[place + len(name) : end]) for (place, name), end in zip(places, ends, strict=True)]
    return [template[: places[0][0]], *rest]
