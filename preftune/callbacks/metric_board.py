"""The metrics of a run in small tables, grouped by what stands before the first `/` and set side by side.

A board is never changed: `with_logs` gives a new one, which draws its lines once per width and then repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.segment import Segment
from rich.text import Text

from preftune.callbacks.formatting import as_number, clean, format_value, sparkline
from preftune.callbacks.metric_names import is_clock

GENERAL, TIMING, NOTES = "general", "timing", "notes"
HISTORY = 7
GUTTER = 3
FRAME = 9
"""Lines that the rest of the panel takes at most, with one left for what is printed above it."""
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
    _drawn: dict[Any, list[list[Segment]]] = field(default_factory=dict, compare=False, repr=False)

    def with_logs(self, logs: Mapping[str, Any]) -> MetricBoard:
        """The board after one more log; `eval_x` lands beside `x`."""
        metrics = dict(self.metrics)
        for key, value in logs.items():
            name = key.removeprefix("eval_")
            is_eval = name != key
            name = name.removeprefix("train_") if is_clock(name) else name
            old = metrics.get(name, Metric())
            if is_eval:
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
            elif is_clock(name):
                late[TIMING][rest or name] = metric
            else:
                groups.setdefault(group if slash else GENERAL, {})[rest if slash else name] = metric
        return {group: members for group, members in {**groups, **late}.items() if members}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # a live panel that is higher than the terminal loses its lower end
        room = console.height - FRAME if console.is_terminal and not console.is_jupyter else None
        key = (options.max_width, room, options.ascii_only)
        if key not in self._drawn:
            lines = self._layout(options, room)
            self._drawn[key] = console.render_lines(Group(*lines), options.update(height=None))
        for line in self._drawn[key]:
            yield from line
            yield Segment.line()

    def _layout(self, options: ConsoleOptions, room: int | None) -> list[Text]:
        """The first that fits, the last where none does: all, without times, without the little curves, neither."""
        groups = self.groups()
        notes = [_note(name, metric, options) for name, metric in groups.pop(NOTES, {}).items()]
        lines: list[Text] = []
        for curves, left_out in ((True, ""), (True, TIMING), (False, ""), (False, TIMING)):
            blocks = [
                _block(name, members, options.ascii_only, curves=curves and not options.ascii_only)
                for name, members in groups.items()
                if name != left_out or len(groups) == 1
            ]
            lines = _side_by_side(blocks, options.max_width)
            is_low = room is None or len(lines) + len(notes) <= room
            if is_low and all(line.cell_len <= options.max_width for line in lines):
                break
        return [*lines, *notes]


def _side_by_side(blocks: list[list[Text]], width: int) -> list[Text]:
    """As many columns as fit; each block goes under the shortest column so far."""
    widths = [max(line.cell_len for line in block) for block in blocks]
    columns: list[list[int]] = []
    for count in range(len(blocks), 0, -1):
        columns = _deal([len(block) - 1 for block in blocks], count)
        if sum(max(widths[i] for i in column) for column in columns) + GUTTER * (count - 1) <= width:
            break
    stacks = [_with_gaps([blocks[i] for i in column]) for column in columns]
    sizes = [max(widths[i] for i in column) for column in columns]
    return [
        _joined([stack[row] if row < len(stack) else Text() for stack in stacks], sizes, GUTTER)
        for row in range(max(map(len, stacks), default=0))
    ]


def _deal(heights: list[int], count: int) -> list[list[int]]:
    columns: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index, height in enumerate(heights):
        shortest = filled.index(min(filled))
        columns[shortest].append(index)
        filled[shortest] += height + 2  # its title and a gap
    return columns


def _with_gaps(blocks: list[list[Text]]) -> list[Text]:
    stacked: list[Text] = []
    for block in blocks:
        stacked += [Text(), *block] if stacked else block
    return stacked


def _joined(cells: list[Text], widths: list[int], gap: int, right: tuple[bool, ...] = ()) -> Text:
    """One line of cells, each padded to its width; `right` says which stand at the right of theirs."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        pad = " " * (width - cell.cell_len)
        before, after = (pad, "") if right and right[number] else ("", pad)
        last = number == len(cells) - 1
        line.append(before).append_text(cell).append("" if last else after + " " * gap)
    return line


def _block(group: str, members: Mapping[str, Metric], ascii_only: bool, *, curves: bool) -> list[Text]:
    """The lines of a group: its name over those of its metrics, the values beside."""
    with_train, with_eval = (any(getattr(m, f) for m in members.values()) for f in ("in_train", "in_eval"))
    with_curves = curves and any(len(m.history) > 1 for m in members.values())
    head = [Text(clean(group, max_length=24, ascii_only=ascii_only), style="bold cyan")]
    head += [Text("train" if with_eval else "", style="dim")] if with_train else []
    head += [Text()] if with_curves else []
    head += [Text("eval", style="dim")] if with_eval else []
    rows = [head]
    for name, metric in members.items():
        row = [Text(clean(name, max_length=LONGEST_NAME, ascii_only=ascii_only))]
        row += [_cell(metric.train, metric.in_train)] if with_train else []
        row += [Text(sparkline(metric.history), style="blue")] if with_curves else []
        row += [_cell(metric.eval, metric.in_eval)] if with_eval else []
        rows.append(row)
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    right = (False, *([True] * with_train), *([False] * with_curves), *([True] * with_eval))
    return [_joined(row, widths, 1, right) for row in rows]


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
