"""Messages in the shapes that people bring, turned into lists of `{"role": ..., "content": ...}`.

ShareGPT turns (`from`/`value`) and single turns given as one dict are understood; nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preftune.errors import DataFormatError

Message = dict[str, Any]

MESSAGE_COLUMNS = ("messages", "chosen", "rejected", "completion", "prompt")
# ShareGPT names of roles, by the name that chat templates use. Other names are left as they are.
ROLE_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


def is_conversational(example: Mapping[str, Any]) -> bool:
    """True where any of messages, chosen, rejected, completion or prompt is a non-empty list of role messages.

    So a text prompt beside lists of messages is conversational, whatever the order of the columns.
    """
    return any(_starts_with_turn(example.get(column), "role") for column in MESSAGE_COLUMNS)


def is_conversational_from_value(example: Mapping[str, Any]) -> bool:
    """True where `conversations` is a non-empty list of ShareGPT turns (`from` and `value`)."""
    turns = example.get("conversations") or [{}]
    return _starts_with_turn(turns, "from") and "value" in turns[0]


def maybe_convert_to_chatml(example: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which ShareGPT turns are role messages and `conversations` is called `messages`.

    Rows that hold no ShareGPT turns come back with equal values.
    """
    converted = dict(example)
    for column in (*MESSAGE_COLUMNS, "conversations"):
        if _starts_with_turn(converted.get(column), "from"):
            converted[column] = [_turn(turn) for turn in converted[column]]
    if "conversations" in converted:
        converted["messages"] = converted.pop("conversations")
    return converted


def is_turn(value: Any) -> bool:
    """One message: a mapping with a role, or a ShareGPT turn."""
    return isinstance(value, Mapping) and (isinstance(value.get("role"), str) or isinstance(value.get("from"), str))


def to_messages(value: Any, row: int, column: str) -> list[Message]:
    """`value`, a list of turns or one turn, as role messages.

    Raises:
        DataFormatError: it is neither, with the row, the column and what was found.
    """
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list):
        raise bad_value(row, column, value, "text or a list of messages")
    for turn in turns:
        if not is_turn(turn):
            raise bad_value(row, column, turn, "messages, each with 'role' and 'content' (or 'from' and 'value')")
    return [_turn(turn) for turn in turns]


def says_nothing(messages: list[Message]) -> bool:
    """No message has content, a tool call or reasoning."""
    return not any(value for message in messages for key, value in message.items() if key not in ("role", "name"))


def bad_value(row: int, column: str, found: Any, wanted: str, remedy: str = "") -> DataFormatError:
    """The error for one value of one row; `found` is shown by type and beginning."""
    shown = repr(found)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    if not remedy:
        remedy = "Mend or filter such rows." if found is not None else "Leave rows without a value out with filter()."
    return DataFormatError(
        f"row {row}, column {column!r}: found {type(found).__name__} {shown}; wanted {wanted}. {remedy}"
    )


def _starts_with_turn(value: Any, key: str) -> bool:
    return (
        isinstance(value, list) and len(value) > 0 and isinstance(value[0], Mapping) and value[0].get(key) is not None
    )


def _turn(turn: Mapping[str, Any]) -> Message:
    message = without_nulls(turn)
    if "role" not in message:
        role = message.pop("from")
        message = {"role": ROLE_NAMES.get(role, role), "content": message.pop("value", ""), **message}
    return message


def without_nulls(value: Any) -> Any:
    """`value` without the None entries of its dicts: Arrow fills in the keys that only other rows have, such as
    arguments of other tools, and a template would print them.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
