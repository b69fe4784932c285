"""Answers compared without a mathematics package: the same text, or the same last number.

Numbers are compared exactly, as fractions: 0.5 is 1/2, and 0.3333 is not 1/3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from preftune.errors import RewardError
from preftune.rewards.text import Completion, final_text

# Digits with or without commas between thousands, a decimal part; or a decimal part alone.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
# No number begins in a word, a power, an index, a date or a version.
_START = r"(?<![\w^])(?<![_^]\{)(?<![0-9][./])"
# A dash after a bracket takes away; it is no sign.
_SIGN = r"(?:(?<![)\]}])(?P<sign>[-\u2212+]))?[$\u20ac\u00a3]?"
_NUMBER = re.compile(
    rf"{_START}{_SIGN}(?P<number>{_DIGITS})"
    r"(?:[eE](?P<exponent>[-+]?[0-9]+)"
    r"|(?:[ ](?P<numerator>[0-9]+))?[ ]?/[ ]?(?P<denominator>[0-9]+)(?![0-9/]|\.[0-9]))?"
)
_LATEX_FRACTION = re.compile(
    r"[ ]?((?:(?<![\w)\]}])[-\u2212+])?)\\[dt]?frac[ ]?\{[ ]?([0-9]+)[ ]?\}[ ]?\{[ ]?([0-9]+)[ ]?\}"
)
# Beyond this many digits a number is a run of digits, not an answer, and costs time to read.
_MOST_DIGITS = 300


def exact_match_reward(
    completions: Sequence[Completion],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    **_: object,
) -> list[float | None]:
    """1.0 where a completion is the gold answer, else 0.0; white space counts as one blank, and not at the ends.

    Of messages, the assistant's last is read. The gold answer is the column `solution`, or else `answer`; None in it
    gives None.

    Raises:
        RewardError: there is no such column.
    """
    golds = _golds("exact_match_reward", solution, answer)
    return [
        None if gold is None else float(_squeezed(final_text(completion)) == _squeezed(str(gold)))
        for completion, gold in zip(completions, golds, strict=True)
    ]


def numeric_match_reward(
    completions: Sequence[Completion],
    solution: Sequence[Any] | None = None,
    answer: Sequence[Any] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **_: object,
) -> list[float | None]:
    """1.0 where the last number of a completion equals the gold number, else 0.0 (also where it has no number).

    Of messages, the assistant's last is read. The gold number is that of the column `solution`, or else `answer`: a
    number, or a text, where it is the last number after `####` (GSM8K) or, without that, of the whole. None, or a text
    without a number, gives None. `last_number` says what is a number. Logs the columns `gold_number` and `last_number`.

    Raises:
        RewardError: there is no such column.

    One fact to check: "so 1,234.50 dollars." matches "#### 1234.5".
    """
    golds = [_gold_number(gold) for gold in _golds("numeric_match_reward", solution, answer)]
    found = [last_number(final_text(completion)) for completion in completions]
    if log_extra is not None:
        log_extra("gold_number", [None if gold is None else str(gold) for gold in golds])
        log_extra("last_number", [None if number is None else str(number) for number in found])
    return [None if gold is None else float(number == gold) for number, gold in zip(found, golds, strict=True)]


def last_number(text: str) -> Fraction | None:
    """The last number written in a text, exactly; None where there is none (or it has more than 300 digits).

    Signs (also the minus sign U+2212), commas between thousands, decimals, exponents, fractions `3/4`, `1 3/4` and
    `\\frac{3}{4}` are understood; signs of currency before and units after a number are passed over, and "50%" is 50.
    """
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\!", "")
    text = _LATEX_FRACTION.sub(r" \1\2/\3 ", text)
    found = list(_NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def _value(match: re.Match[str]) -> Fraction | None:
    number = match["number"].replace(",", "")
    exponent, denominator = match["exponent"] or "0", match["denominator"] or "1"
    if len(number) + len(denominator) > _MOST_DIGITS or len(exponent) > 4:
        return None
    if int(denominator) == 0 or abs(int(exponent)) > _MOST_DIGITS:
        return None
    value = Fraction(number) * Fraction(10) ** int(exponent)
    if match["numerator"] is not None:  # 1 3/4
        value += Fraction(int(match["numerator"]), int(denominator))
    else:
        value /= int(denominator)
    return -value if match["sign"] in ("-", "\u2212") else value


def _gold_number(gold: Any) -> Fraction | None:
    return None if gold is None else last_number(str(gold).rpartition("####")[2])


def _golds(name: str, solution: Sequence[Any] | None, answer: Sequence[Any] | None) -> Sequence[Any]:
    golds = solution if solution is not None else answer
    if golds is None:
        raise RewardError(f"{name} needs a dataset column 'solution' or 'answer' with the gold answers.")
    return golds


def _squeezed(text: str) -> str:
    return " ".join(text.split())
