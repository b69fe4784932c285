"""`preftune compare A B`: the first step and metric at which two runs differ, and what else is not the same.

Clocks are left out: what depends on how fast a machine was is no difference between runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preftune.callbacks.metric_names import is_clock
from preftune.cli.report.runs import Run, read_run

SAME, DIFFERENT = 0, 1
_PASSING = ("finished", "seconds", "started", "resumed", "output_dir", "logging_dir", "run_name", "callbacks")
_PARTS = ("trainer", "model", "parameters", "max_steps", "config", "seeds", "decisions", "environment", "data")


@dataclass(frozen=True)
class Difference:
    """One value that two runs do not share; None stands for what a run does not have."""

    name: str
    a: Any
    b: Any
    step: int | None = None

    def __str__(self) -> str:
        text = f"{self.name}: {_shown(self.a)} | {_shown(self.b)}"
        gap = _gap(self.a, self.b) if self.step is not None else None  # of options the values say enough
        return text if gap is None else f"{text}  (apart by {gap[0]:.3g}, relative {gap[1]:.3g})"


def main(words: list[str]) -> int:
    """The command: `preftune compare A B [--tolerance T]`; 0 where there are logs and they agree, else 1."""
    parser = argparse.ArgumentParser(prog="preftune compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("a", type=Path, help="output folder of a run")
    parser.add_argument("b", type=Path, help="output folder of another run")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="largest gap, absolute or relative to the larger value (0: exact)"
    )
    options = parser.parse_args(words)
    a, b = read_run(options.a), read_run(options.b)
    of_a = _without(a.entries, logged_alone(a.entries, b.entries))
    of_b = _without(b.entries, logged_alone(b.entries, a.entries))
    first = first_difference(of_a, of_b, options.tolerance) or first_difference(a.entries, b.entries, options.tolerance)
    for line in described(a, b, first, options.tolerance):
        print(line)
    return SAME if a.entries and b.entries and not first else DIFFERENT


def first_difference(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], tolerance: float = 0.0
) -> list[Difference]:
    """The metrics that differ at the first step at which any does; empty where the logs agree.

    Steps that only one run has count, except those after the other's last.

    Args:
        tolerance: Numbers x and y agree where |x - y| <= tolerance * max(1, |x|, |y|); NaN agrees with NaN.
    """
    by_step = _by_step(a), _by_step(b)
    common_end = min(max(steps, default=-1) for steps in by_step)
    for step in sorted({*by_step[0], *by_step[1]}):
        if step > common_end:
            break
        of_a, of_b = by_step[0].get(step), by_step[1].get(step)
        if of_a is None or of_b is None:
            return [Difference("(a log at this step)", of_a is not None, of_b is not None, step)]
        names = [name for name in dict.fromkeys([*of_a, *of_b]) if not is_passing(name)]
        found = [Difference(n, of_a.get(n), of_b.get(n), step) for n in names if not _agree(n, of_a, of_b, tolerance)]
        if found:
            return found
    return []


def logged_alone(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[str]:
    """Metrics that `a` logs and `b` never does: they say what a run was, not where it went another way."""
    of_b = {name for entry in b for name in entry}
    of_a = dict.fromkeys(name for entry in a for name in entry)
    return [name for name in of_a if name not in of_b and not is_passing(name)]


def _without(entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    dropped = set(names) - {"step"}
    return [{name: value for name, value in entry.items() if name not in dropped} for entry in entries]


def is_passing(name: str) -> bool:
    """Whether a logged value depends on clocks, or sums up a run that may have been longer than the other."""
    return is_clock(name) or name.startswith("train_") or name == "total_flos"


def manifest_differences(a: Run, b: Run) -> Iterator[Difference]:
    """What the manifests do not share, by path; where files lie and when a run was is left out."""
    for part in _PARTS:
        ours, theirs = (dict(_leaves((run.manifest or {}).get(part), part)) for run in (a, b))
        for name in dict.fromkeys([*ours, *theirs]):
            end = name.rpartition(".")[2]
            passing = end in _PASSING or (".lengths." in name and end != "p50")  # one length says that they differ
            if not passing and ours.get(name) != theirs.get(name):
                yield Difference(name, ours.get(name), theirs.get(name))


def described(a: Run, b: Run, first: Sequence[Difference], tolerance: float) -> Iterator[str]:
    """The comparison, line by line."""
    yield f"A: {a.path} ({len(a.entries)} logs, last step {a.last_step})"
    yield f"B: {b.path} ({len(b.entries)} logs, last step {b.last_step})"
    how = "exactly" if not tolerance else f"within {tolerance:g}"
    if first:
        yield f"The runs first differ at step {first[0].step}, in {first[0].name} (A | B):"
        yield from (f"  {difference}" for difference in first)
        for letter, names in (("A", logged_alone(a.entries, b.entries)), ("B", logged_alone(b.entries, a.entries))):
            if names:
                yield f"  logged by {letter} alone: {', '.join(names)}"
    elif min(len(a.entries), len(b.entries)) == 0:
        yield "There are no logs to compare."
    else:
        yield f"The logs agree {how} up to step {min(a.last_step, b.last_step)}."
    for run, letter in ((a, "A"), (b, "B")):
        if run.manifest is None:
            yield f"{letter} has no run.json: configs, versions and data are not compared."
            return
    others = list(manifest_differences(a, b))
    yield "Config, versions, hardware and data (A | B):" if others else "Config, versions, hardware and data are equal."
    of_one = _options_of_one(others) if any(difference.name == "trainer" for difference in others) else []
    yield from (f"  {difference}" for difference in others if difference not in of_one)
    for letter, lacking in (("A", "b"), ("B", "a")):
        names = [d.name.removeprefix("config.") for d in of_one if vars(d)[lacking] is None]
        if names:
            yield f"  options of {letter} alone: {', '.join(names)}"


def _options_of_one(differences: Sequence[Difference]) -> list[Difference]:
    """Those of options that one run does not have: many, where trainers differ, and their values say nothing."""
    return [d for d in differences if d.name.startswith("config.") and (d.a is None) != (d.b is None)]


def _by_step(entries: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Everything logged at a step as one mapping; of a name logged twice, the last value."""
    steps: dict[int, dict[str, Any]] = {}
    for entry in entries:
        steps.setdefault(entry["step"], {}).update({k: v for k, v in entry.items() if k != "step"})
    return steps


def _agree(name: str, a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float) -> bool:
    x, y = a.get(name), b.get(name)
    if isinstance(x, int | float) and isinstance(y, int | float):
        if math.isnan(x) or math.isnan(y):
            return math.isnan(x) and math.isnan(y)
        return x == y or abs(x - y) <= tolerance * max(1.0, abs(x), abs(y))
    return x == y


def _gap(x: Any, y: Any) -> tuple[float, float] | None:
    if not isinstance(x, int | float) or not isinstance(y, int | float) or isinstance(x, bool) or isinstance(y, bool):
        return None
    gap = abs(x - y)
    return (gap, gap / max(abs(x), abs(y))) if math.isfinite(gap) and gap else None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything below."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}")
    else:
        yield path, value


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
