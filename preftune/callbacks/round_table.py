"""The table of completions on a console: prompt, completion, rewards, advantage, whatever text a model writes.

Control characters of a completion never reach the terminal, and its brackets are no markup.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from preftune.callbacks.trackers.cells import as_cell

LONGEST_CELL = 600
_TEXTS = ("prompt", "completion")


def print_completions(rows: Sequence[Mapping[str, Any]], console: Console, *, title: str) -> None:
    """Prints rows of equal keys; the step is in the title, numbers are short, long texts lose their middle."""
    ascii_only = console.options.ascii_only
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.ASCII if ascii_only else box.ROUNDED,
        border_style="dim",
        show_lines=True,
        expand=True,
    )
    columns = [name for name in rows[0] if name != "step"]
    for name in columns:
        is_number = all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(
            Text(_readable(name, ascii_only)),
            justify="right" if is_number else "left",
            ratio=None if is_number else 2 if name in _TEXTS else 1,
            style="cyan" if name == "prompt" else "",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(_readable(row[name], ascii_only)) for name in columns))
    console.print(table)


def _readable(value: Any, ascii_only: bool) -> str:
    value = as_cell(value)
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    text = str(value)
    if len(text) > LONGEST_CELL:
        text = f"{text[: LONGEST_CELL * 2 // 3]} [...] {text[-LONGEST_CELL // 3 :]}"
    text = "".join("?" if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t" else c for c in text)
    return text.encode("ascii", "backslashreplace").decode() if ascii_only else text
