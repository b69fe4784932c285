"""A penalty for saying the same again, from token ids alone.

It works on n-grams of tokens, so it needs no language and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from preftune.errors import ConfigError


@dataclass(frozen=True)
class RepetitionPenalty:
    """See `get_repetition_penalty_reward`."""

    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        total = len(ids) - self.ngram_size + 1
        if total <= 0:
            return 0.0
        unique = len({tuple(ids[start : start + self.ngram_size]) for start in range(total)})
        return (1 - unique / total) * self.max_penalty


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenalty:
    """A reward of `(1 - unique / total) * max_penalty` over the n-grams of a completion's token ids.

    0 for a completion of fewer than `ngram_size` tokens (arXiv:2502.03373).

    Args:
        ngram_size: At least 1.
        max_penalty: At most 0; what a completion of one repeated token comes near to.

    Raises:
        ConfigError: outside these ranges.

    One fact to check: with `ngram_size=1` the ids [5, 5, 5, 6] give -0.5.
    """
    if ngram_size < 1:
        raise ConfigError(f"ngram_size={ngram_size!r}; wanted at least 1.")
    if not max_penalty <= 0:
        raise ConfigError(f"max_penalty={max_penalty!r}; wanted at most 0: a penalty, not a reward.")
    return RepetitionPenalty(ngram_size, max_penalty)
