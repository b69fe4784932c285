"""Rewards for the form of a completion.

Only the form: what is said between the marks is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

from preftune.rewards.text import Completion, first_text


def think_format_reward(completions: Sequence[Completion], **_: object) -> list[float]:
    """1.0 where a completion begins with `<think>`, closes it with `</think>`, and opens no other; else 0.0.

    Of messages, the first is read. One fact to check: "<think>a</think>b" gives 1.0, " <think>a</think>b" gives 0.0.
    """
    return [1.0 if _is_well_formed(first_text(completion)) else 0.0 for completion in completions]


def _is_well_formed(text: str) -> bool:
    opening = "<think>"
    return text.startswith(opening) and "</think>" in text and text.count(opening) == 1
