"""Rewards that depend on how long a completion is, in tokens.

Lengths are those of `completion_ids`, with the end-of-sequence token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from preftune.errors import ConfigError
from preftune.rewards.accuracy import accuracy_reward, check_installed
from preftune.rewards.text import Completion


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """See `get_soft_overlong_punishment`."""

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        return [self._punishment(len(ids)) for ids in completion_ids]

    def _punishment(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        if length <= self.max_completion_len:
            return (free - length) / self.soft_punish_cache
        return -1.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """DAPO's soft punishment of long completions (arXiv:2503.14476, equation 13): 0, then linear down to -1.

    0 up to `max_completion_len - soft_punish_cache` tokens, -1 beyond `max_completion_len`.

    Raises:
        ConfigError: unless 0 <= soft_punish_cache <= max_completion_len.

    One fact to check: with 100 and 20, 80 tokens give 0, 90 give -0.5, 100 and more give -1.
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ConfigError(
            f"soft_punish_cache={soft_punish_cache!r}, max_completion_len={max_completion_len!r}; wanted "
            "0 <= soft_punish_cache <= max_completion_len."
        )
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


@dataclass(frozen=True)
class CosineScaled:
    """See `get_cosine_scaled_reward`."""

    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float
    __name__ = "cosine_scaled_reward"

    def __call__(
        self,
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        solution: Sequence[str | None],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **_: object,
    ) -> list[float | None]:
        correct = accuracy_reward(completions, solution, log_extra)
        return [None if c is None else self._scaled(c > 0.5, len(ids)) for c, ids in zip(correct, completion_ids)]

    def _scaled(self, is_correct: bool, length: int) -> float:
        low, high = self.max_value_wrong, self.min_value_wrong
        if is_correct:
            low, high = self.min_value_correct, self.max_value_correct
        progress = min(length / self.max_len, 1.0)
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * progress))


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> CosineScaled:
    """Correctness scaled by length along a cosine (arXiv:2502.03373): short is best when right, worst when wrong.

    A right answer earns `max_value_correct` at length 0 and `min_value_correct` from `max_len` tokens on; a wrong one
    `min_value_wrong` at length 0 and `max_value_wrong` from there on. What `accuracy_reward` gives None stays None.

    Raises:
        ConfigError: `max_len` below 1.
        ImportError: math-verify is not installed.
    """
    if max_len < 1:
        raise ConfigError(f"max_len={max_len!r}; wanted at least 1 token.")
    check_installed("get_cosine_scaled_reward")
    return CosineScaled(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)
