"""What a table's value becomes where only text and numbers are shown: messages a conversation, the rest JSON.

`jsonl` and `parquet` keep values as they are.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from preftune.callbacks.formatting import is_image, plain
from preftune.callbacks.trackers.base import Row

Cell = str | int | float | bool | None


def as_cell(value: Any) -> Cell:
    """Numbers, text and None as they are; messages as `role: content` lines; an image by its size; the rest as JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_image(value):
        return plain(value)
    if is_messages(value):
        return "\n".join(f"{message['role']}: {_content(message)}" for message in value)
    return _json(value)


def is_messages(value: Any) -> bool:
    """Whether the value is a list of chat messages."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_list and all(isinstance(message, Mapping) and "role" in message for message in value)


def columns_of(rows: Iterable[Row]) -> list[str]:
    """All columns of the rows, in the order in which they first occur."""
    return list(dict.fromkeys(column for row in rows for column in row))


def cells(rows: Iterable[Row], columns: Sequence[str]) -> list[list[Cell]]:
    """The rows as lists, None where a row lacks a column."""
    return [[as_cell(row.get(column)) for column in columns] for row in rows]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = [*(content if isinstance(content, list) else [content]), *(message.get("tool_calls") or [])]
    return " ".join(part if isinstance(part, str) else _block(part) for part in parts if part)


def _block(part: Any) -> str:
    """A block of a message as its text, or what stands for its image; anything else as JSON."""
    if isinstance(part, Mapping) and part.get("type") in ("text", "image"):
        return str(plain(part.get(part["type"])) or f"[{part['type']}]")
    return _json(part)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=plain)


def csv_text(rows: Sequence[Row]) -> str:
    """The rows as CSV with a header."""
    columns = columns_of(rows)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(cells(rows, columns))
    return text.getvalue()


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; breaks and bars within a cell stay in it."""
    columns = columns_of(rows)
    lines = [columns, ["---"] * len(columns), *cells(rows, columns)]
    return "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)


def _markdown_cell(value: Cell) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\r", "").replace("\n", "<br>")
