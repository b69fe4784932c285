"""Cells and tables of the report: Markdown from figures, and whether a wanted value was reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.summary import OURS, TRL

NAMES = {TRL: "TRL", OURS: "preftune"}
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}
NOISY, ENOUGH_STEPS = 0.1, 10


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def verdict(value: float, wanted: tuple[float, float] | None, less_is_better: bool = False) -> str:
    """The wanted values beside what was reached."""
    if wanted is None:
        return "-"
    must, aim = wanted
    sign = -1 if less_is_better else 1
    word = "aim reached" if sign * value >= sign * aim else "reached" if sign * value >= sign * must else "**short**"
    return f"{must:g}, aim {aim:g}: {word}"


def figure_of_ratio(r: dict[str, float] | None, kind: str) -> str:
    return f"**{r[kind]:.2f}** [{r[kind + '_low']:.2f}, {r[kind + '_high']:.2f}]" if r else "-"


def of_spread(values: tuple[float, float, float] | None) -> str:
    """`median [quartiles]` of a spread in seconds, with three digits below one."""
    if values is None:
        return "-"
    low, middle, high = (f"{v:.2f}" if v >= 1 else f"{v:.3f}" for v in values)
    return f"{middle} [{low}, {high}]"
