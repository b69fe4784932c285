"""What a completion says: a text as it is, or the content of one of its messages.

Conversational prompts make completions lists of messages, the others texts; both go through here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]


def first_text(completion: Completion) -> str:
    """The text, or the content of the first message."""
    if isinstance(completion, str):
        return completion
    return content_text(completion[0].get("content")) if completion else ""


def final_text(completion: Completion) -> str:
    """The text, or the content of the last message of the assistant: after tool calls, its answer."""
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role") == "assistant"]
    return content_text(said[-1].get("content")) if said else ""


def content_text(content: Any) -> str:
    """Content as text: of a list of blocks, those of text, joined; of none at all, ""."""
    if isinstance(content, str):
        return content
    return "".join(block.get("text") or "" for block in content or () if block.get("type") == "text")
