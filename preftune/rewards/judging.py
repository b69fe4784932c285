"""Reading and comparing mathematical answers with math-verify: what the worker process of `accuracy` runs.

Importing it needs math-verify; that takes seconds, which is why it is not done within the limit of a comparison.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse, verify

_ANSWER = LatexExtractionConfig(
    boxed_match_priority=0,
    try_extract_without_anchor=False,
    normalization_config=LatexNormalizationConfig(units=True),
)


@lru_cache(maxsize=1000)  # the completions of a prompt have one solution
def _gold(gold: str) -> list[Any]:
    # No limits of math-verify's own: they are alarms, and a process that is late is killed.
    return parse(gold, parsing_timeout=None)  # pyright: ignore


def read_gold(gold: str) -> str | None:
    """What is read in a solution, as text; None if nothing can be."""
    read = _gold(gold)
    return str(read) if read else None


def compare(gold: str, text: str) -> tuple[bool, str]:
    """Whether the answer in `text` equals the solution, and what was read of it."""
    answer = parse(text, extraction_config=[_ANSWER], extraction_mode="first_match", parsing_timeout=None)  # pyright: ignore
    return verify(_gold(gold), answer, timeout_seconds=None), str(answer)
