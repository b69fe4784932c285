"""What the data reports of a run say about its health before any step, in words.

One finding names all sets in which it is seen. The thresholds are the constants here, docs/health.md explains them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from preftune.callbacks.findings import Finding
from preftune.data.report import REASONS, REMEDIES, Outcome

CUT_ROWS, DROPPED_ROWS, LONGER_CHOSEN = 0.1, 0.2, 1.3
LEAST_ROWS = 30  # of a set whose lengths are judged
SCORED = "scored"  # rows of the evaluation set once more

Report = Mapping[str, Any]


def data_findings(reports: Mapping[str, Report]) -> list[Finding]:
    """What the data reports (`DataReport.to_dict`, by split) say."""
    found: dict[str, Finding] = {}
    for split, report in reports.items():
        if split == SCORED:
            continue
        for finding in filter(None, (check(split, report) for check in _CHECKS)):
            first = found.get(finding.code)
            text = finding.text if first is None else f"{first.text} {finding.text}"
            found[finding.code] = Finding(finding.code, finding.title, text, (first or finding).remedy)
    return list(found.values())


def reason_of(name: str) -> str:
    """Why rows were dropped, in the words of the data report, from the name that `DataReport.to_dict` gives it."""
    return REASONS.get(Outcome.__members__.get(name.upper(), Outcome.KEPT), name.replace("_", " "))


def _rows_dropped(split: str, report: Report) -> Finding | None:
    read, kept = report.get("rows_in", 0), report.get("rows_out", 0)
    if not read or (read - kept) / read <= DROPPED_ROWS:
        return None
    counts = {name: tally["count"] for name, tally in report.get("dropped", {}).items()}
    reasons = "; ".join(f"{count:,} with {reason_of(name)}" for name, count in counts.items())
    most = Outcome.__members__.get(max(counts, key=counts.__getitem__, default="").upper(), Outcome.KEPT)
    return Finding(
        "rows_dropped",
        "Many rows are not used",
        f"Of {read:,} rows of {split!r}, {read - kept:,} were dropped ({reasons or 'no reason given'}).",
        REMEDIES.get(most, "Look at the rows named in the data report."),
    )


def _rows_cut(split: str, report: Report) -> Finding | None:
    kept, cut = report.get("rows_out", 0), report.get("cut", {}).get("count", 0)
    if not kept or cut / kept <= CUT_ROWS:
        return None
    return Finding(
        "rows_cut",
        "Many rows are cut",
        f"{cut:,} of {kept:,} rows of {split!r} lost tokens to max_length ({cut / kept:.0%}).",
        "Raise max_length, or leave long rows out, so that answers are learned with their ends.",
    )


def _chosen_longer(split: str, report: Report) -> Finding | None:
    middle = [report.get("lengths", {}).get(f"{side}_ids", {}).get("p50") for side in ("chosen", "rejected")]
    if report.get("rows_out", 0) < LEAST_ROWS or not all(middle) or middle[0] <= LONGER_CHOSEN * middle[1]:
        return None
    return Finding(
        "chosen_longer",
        "Chosen answers are much longer",
        f"In {split!r} the median chosen answer has {middle[0]} tokens, the rejected one {middle[1]}.",
        "The policy may learn to be long rather than good: balance lengths, or use ld_alpha or a loss that "
        "averages over tokens (ipo, sigmoid_norm).",
    )


_CHECKS: tuple[Callable[[str, Report], Finding | None], ...] = (_rows_dropped, _rows_cut, _chosen_longer)
