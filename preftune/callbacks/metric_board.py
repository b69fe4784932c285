"""The metrics of a run in small tables, grouped by what stands before the first `/` and set side by side.

A board is never changed: `with_logs` gives a new one, which draws its lines once per width and then repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from preftune.callbacks.formatting import as_number, clean, format_value, sparkline

GENERAL, TIMING, NOTES = "general", "timing", "notes"
HISTORY = 7
GUTTER = 3
_TIMES = (
    "runtime",
    "samples_per_second",
    "steps_per_second",
    "seconds_per_sample",
    "preparation_time",
    "compilation_time",
    "round_time",
)
LONGEST_NAME = 36


@dataclass(frozen=True)
class Metric:
    """The last training value of a metric, its recent numbers, and the last value of its `eval_` twin."""

    train: Any = None
    eval: Any = None
    history: tuple[float, ...] = ()
    in_train: bool = False
    in_eval: bool = False

    @property
    def is_numeric(self) -> bool:
        return all(value is None or as_number(value) is not None for value in (self.train, self.eval))


@dataclass(frozen=True)
class MetricBoard:
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    _drawn: dict[tuple[int, bool], list[list[Segment]]] = field(default_factory=dict, compare=False, repr=False)

    def with_logs(self, logs: Mapping[str, Any]) -> MetricBoard:
        """The board after one more log; `eval_x` lands beside `x`."""
        metrics = dict(self.metrics)
        for key, value in logs.items():
            name = key.removeprefix("eval_")
            old = metrics.get(name, Metric())
            if name != key:
                metrics[name] = replace(old, eval=value, in_eval=True)
                continue
            number = as_number(value)
            history = old.history if number is None else (*old.history, number)[-HISTORY:]
            metrics[name] = replace(old, train=value, history=history, in_train=True)
        return MetricBoard(metrics)

    def groups(self) -> dict[str, dict[str, Metric]]:
        """`{"general": {"loss": ...}, "rewards": {"margins": ...}, ...}`; first general, last timing and notes."""
        groups: dict[str, dict[str, Metric]] = {GENERAL: {}}
        late: dict[str, dict[str, Metric]] = {TIMING: {}, NOTES: {}}
        for name, metric in self.metrics.items():
            group, slash, rest = name.partition("/")
            if not metric.is_numeric:
                late[NOTES][name] = metric
            elif name.endswith(_TIMES):
                late[TIMING][rest or name] = metric
            else:
                groups.setdefault(group if slash else GENERAL, {})[rest if slash else name] = metric
        return {group: members for group, members in {**groups, **late}.items() if members}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        key = (options.max_width, options.ascii_only)
        if key not in self._drawn:
            self._drawn[key] = console.render_lines(self._layout(console, options), options.update(height=None))
        for line in self._drawn[key]:
            yield from line
            yield Segment.line()

    def _layout(self, console: Console, options: ConsoleOptions) -> Group:
        groups = self.groups()
        notes = groups.pop(NOTES, {})
        tables = [_table(name, members, options.ascii_only) for name, members in groups.items()]
        parts = [_side_by_side(tables, console, options)] if tables else []
        return Group(*parts, *(_note(name, metric, options) for name, metric in notes.items()))


def _side_by_side(tables: list[Table], console: Console, options: ConsoleOptions) -> Table:
    """As many columns as fit; each table goes under the shortest column so far."""
    widths = [Measurement.get(console, options, table).maximum for table in tables]
    for count in range(len(tables), 0, -1):
        columns = _deal([table.row_count for table in tables], count)
        total = sum(max(widths[i] for i in column) for column in columns) + GUTTER * (count - 1)
        if total <= options.max_width or count == 1:
            break
    grid = Table.grid(padding=(0, GUTTER, 0, 0), pad_edge=False)
    for _ in columns:
        grid.add_column()
    grid.add_row(*(Group(*_with_gaps([tables[i] for i in column])) for column in columns))
    return grid


def _deal(heights: list[int], count: int) -> list[list[int]]:
    columns: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index, height in enumerate(heights):
        shortest = filled.index(min(filled))
        columns[shortest].append(index)
        filled[shortest] += height + 2  # its title and a gap
    return columns


def _with_gaps(tables: list[Table]) -> list[Table | Text]:
    stacked: list[Table | Text] = []
    for table in tables:
        stacked += [Text(), table] if stacked else [table]
    return stacked


def _table(group: str, members: Mapping[str, Metric], ascii_only: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False, header_style="")
    with_train, with_eval = (any(getattr(m, f) for m in members.values()) for f in ("in_train", "in_eval"))
    with_spark = not ascii_only and any(len(m.history) > 1 for m in members.values())
    table.add_column(Text(clean(group, max_length=24, ascii_only=ascii_only), style="bold cyan"), no_wrap=True)
    if with_train:
        table.add_column(Text("train" if with_eval else "", style="dim"), justify="right", no_wrap=True)
    if with_spark:
        table.add_column("", style="blue", no_wrap=True)
    if with_eval:
        table.add_column(Text("eval", style="dim"), justify="right", no_wrap=True)
    for name, metric in members.items():
        cells = [Text(clean(name, max_length=LONGEST_NAME, ascii_only=ascii_only))]
        cells += [_cell(metric.train, metric.in_train)] if with_train else []
        cells += [Text(sparkline(metric.history))] if with_spark else []
        cells += [_cell(metric.eval, metric.in_eval)] if with_eval else []
        table.add_row(*cells)
    return table


def _cell(value: Any, present: bool) -> Text:
    number = as_number(value)
    finite = number is None or math.isfinite(number)
    return Text(format_value(value) if present else "", style="bold" if finite else "bold red")


def _note(name: str, metric: Metric, options: ConsoleOptions) -> Text:
    """Strings and arrays get a line of their own."""
    room = max(10, options.max_width - len(name) - 2)
    value = metric.train if metric.in_train else metric.eval
    label = clean(name, ascii_only=options.ascii_only)
    shown = format_value(value, max_length=room, ascii_only=options.ascii_only)
    return Text.assemble((label, "cyan"), "  ", shown, no_wrap=True, overflow="crop")
