"""Mathematical answers compared by math-verify (`pip install math-verify`).

Every comparison runs in a worker process and is killed at its limit: some answers would keep a computer busy for ever,
and the limits of math-verify itself hold in the main thread only.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Any

from preftune.rewards.processes import Call, Outcome, Worker, call_all
from preftune.rewards.text import Completion, first_text

# Seconds for reading a gold answer, and for reading and comparing a completion.
_GOLD_LIMIT = 5.0
_JUDGE_LIMIT = 8.0


def accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str | None],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **_: object,
) -> list[float | None]:
    """1.0 where the answer of a completion equals the solution mathematically, else 0.0.

    The solution is read with math-verify's defaults; None, and one in which nothing can be read, give None. The answer
    is read as LaTeX only, the first that is found, boxed ones first. Of messages, the first is read. What takes longer
    than some seconds is not equal. Logs the columns `solution`, `gold_parsed` and `answer_parsed`.

    Raises:
        ImportError: math-verify is not installed.
    """
    check_installed("accuracy_reward")
    return _judged([first_text(completion) for completion in completions], solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str | None],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **_: object,
) -> list[float | None]:
    """`accuracy_reward` of what follows the reasoning: the text after the last of the delimiters in it.

    A completion without any delimiter has not ended its reasoning and gets 0.0.

    Args:
        completions: Texts or messages.
        solution: Gold answers.
        reasoning_delimiters: Texts that end the reasoning; None is `["</think>"]`.
        log_extra: As in `accuracy_reward`.

    Raises:
        ImportError: math-verify is not installed.
    """
    check_installed("reasoning_accuracy_reward")
    delimiters = ["</think>"] if reasoning_delimiters is None else list(reasoning_delimiters)
    answers = [_after_last(first_text(completion), delimiters) for completion in completions]
    rewards = _judged(["" if answer is None else answer for answer in answers], solution, log_extra)
    return [0.0 if answer is None else reward for answer, reward in zip(answers, rewards, strict=True)]


def check_installed(name: str) -> None:
    """Says how to install what `name` needs.

    Raises:
        ImportError: math-verify is not there.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(
            f"{name} compares answers with math-verify, which is not installed: pip install 'preftune[math]' (or "
            "pip install math-verify). numeric_match_reward compares numbers without it."
        )


def _after_last(text: str, delimiters: Sequence[str]) -> str | None:
    ends = [text.rindex(delimiter) + len(delimiter) for delimiter in delimiters if delimiter in text]
    return text[max(ends) :] if ends else None


def _judged(
    texts: Sequence[str], golds: Sequence[str | None], log_extra: Callable[[str, list[Any]], None] | None
) -> list[float | None]:
    rewards: list[float | None] = []
    parsed: list[tuple[str | None, str | None]] = []
    unreadable: set[str] = set()
    for text, gold in zip(texts, golds, strict=True):
        reward, shown = _judge_row(text, gold, unreadable)
        rewards.append(reward)
        parsed.append(shown)
    if log_extra is not None:
        log_extra("solution", list(golds))
        log_extra("gold_parsed", [gold for gold, _ in parsed])
        log_extra("answer_parsed", [answer for _, answer in parsed])
    return rewards


def _judge_row(text: str, gold: str | None, unreadable: set[str]) -> tuple[float | None, tuple[str | None, str | None]]:
    from preftune.rewards import judging

    if gold is None or gold in unreadable:
        return None, (None, None)
    read = _JUDGE.call(judging.read_gold, gold, limit=_GOLD_LIMIT)
    if read is None:  # nothing in it can be read, or not in time
        unreadable.add(gold)
        return None, (None, None)
    judged = _JUDGE.call(judging.compare, gold, text, limit=_JUDGE_LIMIT)
    if judged is None:
        return 0.0, (read, None)
    equal, answer = judged
    return float(equal), (read, answer)


class _Judge:
    """The worker process of this process, made at the first question."""

    def __init__(self) -> None:
        self._worker = Worker()
        self._lock = threading.Lock()

    def call(self, function: Callable[..., Any], *args: Any, limit: float) -> Any:
        """The answer, or None where it did not come in time or could not be found."""
        with self._lock:
            outcome: Outcome = call_all([self._worker], [Call(function, args)], limit)[0]
        if isinstance(outcome.error, ImportError):
            raise outcome.error
        return outcome.value


_JUDGE = _Judge()
