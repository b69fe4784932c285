"""What a run looks like: pure functions from a frozen `RunView` to a rich panel or to one plain line.

A view is replaced, never changed, so the thread that draws needs no lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from preftune.callbacks.formatting import clean, format_count, format_duration, format_value
from preftune.callbacks.metric_board import MetricBoard
from preftune.callbacks.metric_names import DRIFT, FACTS


def belongs_on_board(key: str) -> bool:
    """Whether a log value is a metric of the board, and not one of the facts above it; `eval_num_tokens` is none."""
    name = key.removeprefix("eval_")
    return name not in FACTS and name != DRIFT and not (name != key and name.endswith("_num_tokens"))


@dataclass(frozen=True)
class Bar:
    done: int = 0
    total: int | None = None


@dataclass(frozen=True)
class RunView:
    """Everything the panel shows; times are of `time.monotonic`.

    `steps_at_start` is where this process began (more than 0 after a resume): speed and time left count from there.
    """

    about: tuple[str, ...] = ()  # stands after the product's name
    subtitle: str = ""
    train: Bar | None = None
    evaluation: Bar | None = None
    started: float = field(default_factory=time.monotonic)
    finished: float | None = None
    steps_at_start: int = 0
    epoch: float | None = None
    num_tokens: float | None = None
    tokens_per_second: float | None = None
    drift: float | None = None
    moves: float | None = None
    last_move: float | None = None
    memory: str = ""
    board: MetricBoard = field(default_factory=MetricBoard)

    @property
    def elapsed(self) -> float:
        return (time.monotonic() if self.finished is None else self.finished) - self.started

    @property
    def seconds_per_step(self) -> float | None:
        """At the pace of this process so far, evaluations and saves included; None before its first step."""
        steps = self.train.done - self.steps_at_start if self.train is not None else 0
        return self.elapsed / steps if steps > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """None where there is nothing to tell it from, or nothing left."""
        if self.train is None or not self.train.total or self.seconds_per_step is None:
            return None
        return self.seconds_per_step * (self.train.total - self.train.done) or None


def render(view: RunView, *, ascii_only: bool = False) -> RenderableType:
    """The panel: bars, a line of facts, the reference if it moves, and the board of metrics."""
    parts: list[RenderableType] = [_bars(view)]
    parts += [line for line in (_facts(view, ascii_only), _reference(view, ascii_only)) if line]
    parts += [Text(), view.board] if view.board.metrics else []
    return Panel(
        Group(*parts),
        title=_title(view, ascii_only),
        title_align="left",
        subtitle=Text(clean(view.subtitle, ascii_only=ascii_only), style="dim") if view.subtitle else None,
        subtitle_align="right",
        border_style="cyan",
        box=box.ASCII if ascii_only else box.ROUNDED,
        padding=(0, 1),
    )


def _title(view: RunView, ascii_only: bool) -> Text:
    title = Text("preftune", style="bold cyan")
    for part in view.about:
        title.append(" | " if ascii_only else " · ", style="dim")
        title.append(clean(part, ascii_only=ascii_only), style="not bold default")
    return title


def plain_line(view: RunView, logs: Mapping[str, Any], *, ascii_only: bool = False) -> str:
    """One log as one line without control codes: `step 10/100 (10%) | epoch 0.5 | loss 0.6931 | 0:01:20 left`."""
    parts = []
    if view.train is not None:
        total = view.train.total
        parts.append(f"step {view.train.done}" + (f"/{total} ({100 * view.train.done // total}%)" if total else ""))
    if view.epoch is not None:
        parts.append(f"epoch {view.epoch:.4g}")
    parts += [
        f"{clean(key, ascii_only=ascii_only)} {format_value(value, ascii_only=ascii_only)}"
        for key, value in logs.items()
        if key not in ("epoch", "step", "total_flos") and not key.endswith("num_tokens")
    ]
    if view.num_tokens is not None and "num_tokens" in logs:
        parts.append(f"{format_count(view.num_tokens)} tokens")
    if view.tokens_per_second is not None:
        parts.append(f"{format_count(view.tokens_per_second)} tokens/s")
    if view.seconds_left is not None:
        parts.append(f"{format_duration(view.seconds_left)} left")
    return " | ".join(parts)


def _bars(view: RunView) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True, pad_edge=False)
    grid.add_column(style="bold")
    grid.add_column(ratio=1)
    for _ in range(3):
        grid.add_column(justify="right", no_wrap=True)
    if view.train is not None:
        grid.add_row("train", _bar(view.train, "cyan"), *_counts(view.train), _times(view))
    if view.evaluation is not None:
        grid.add_row("eval", _bar(view.evaluation, "magenta"), *_counts(view.evaluation), "")
    return grid


def _times(view: RunView) -> Text:
    elapsed = format_duration(view.elapsed)
    if view.finished is not None:
        return Text.assemble("took ", (elapsed, "bold"))
    if view.seconds_left is None:
        return Text(elapsed, style="dim")
    return Text.assemble((f"{elapsed}  ", "dim"), (format_duration(view.seconds_left), "bold"), " left")


def _bar(bar: Bar, style: str) -> ProgressBar:
    return ProgressBar(
        total=bar.total, completed=bar.done, complete_style=style, finished_style="green", pulse_style=style
    )


def _counts(bar: Bar) -> tuple[str, str]:
    if not bar.total:
        return f"{bar.done:,}", ""
    return f"{bar.done:,}/{bar.total:,}", f"{100 * bar.done // bar.total}%"


def _facts(view: RunView, ascii_only: bool) -> Text | None:
    facts: list[tuple[str, str]] = []
    if view.epoch is not None:
        facts.append((f"{view.epoch:.2f}", " epochs"))
    if view.tokens_per_second is not None:
        facts.append((format_count(view.tokens_per_second), " tokens/s"))
    pace = view.seconds_per_step
    if pace:
        facts.append((f"{pace:.3g}", " s/step") if pace >= 1 else (f"{1 / pace:.3g}", " steps/s"))
    if view.num_tokens:
        facts.append((format_count(view.num_tokens), " tokens"))
    if view.memory:
        facts.append((view.memory, ""))
    return _joined([Text.assemble((number, "bold"), (unit, "dim")) for number, unit in facts], ascii_only)


def _reference(view: RunView, ascii_only: bool) -> Text | None:
    """Only for a reference that moves: a fixed one logs none of this."""
    facts = []
    if view.drift is not None:
        facts.append(Text.assemble("drift ", (f"{view.drift:.4g}", "bold")))
    if view.moves is not None:
        facts.append(_synced(view.moves))
    if view.last_move is not None:
        facts.append(Text.assemble("last sync at step ", (f"{view.last_move:.0f}", "bold")))
    line = _joined(facts, ascii_only)
    return line and Text.assemble(("reference  ", "yellow"), line)


def _synced(moves: float) -> Text:
    if moves <= 1:
        return Text("synced once" if moves == 1 else "not synced yet")
    return Text.assemble("synced ", (f"{moves:.0f}", "bold"), " times")


def _joined(facts: list[Text], ascii_only: bool) -> Text | None:
    return Text(" | " if ascii_only else "  ·  ", style="dim").join(facts) if facts else None
