"""Pair accuracy of a policy on held-out pairs, with a bootstrap interval: the figure that DPO is meant to raise.

Summed scores compare log p(chosen) with log p(rejected); per-token scores divide each by its length first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Share:
    """A share in [0, 1] of `n` trials with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.n}"


def bootstrap_share(hits: Sequence[bool] | NDArray, resamples: int = 2000, seed: int = 0) -> Share:
    """The mean of 0/1 values and the 2.5 % and 97.5 % quantiles of the means of resampled values.

    Draws from a generator of its own. With all hits equal the interval is a point.

    Raises:
        ValueError: no value at all.
    """
    values = np.asarray(hits, dtype=float)
    if values.size == 0:
        raise ValueError("no pairs were given; a share of nothing is not a number. Pass at least one held-out row.")
    draws = np.random.default_rng(seed).integers(0, values.size, (resamples, values.size))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return Share(float(values.mean()), float(low), float(high), values.size)


@dataclass(frozen=True)
class PairTable:
    """Scores of held-out pairs under a policy, one entry a pair: summed log-probabilities and token counts."""

    chosen_logps: NDArray
    rejected_logps: NDArray
    chosen_lengths: NDArray
    rejected_lengths: NDArray

    @property
    def summed(self) -> Share:
        """Share with log p(chosen) > log p(rejected)."""
        return bootstrap_share(self.chosen_logps > self.rejected_logps)

    @property
    def per_token(self) -> Share:
        """The same with each sum divided by its number of tokens."""
        chosen, rejected = self.chosen_logps / self.chosen_lengths, self.rejected_logps / self.rejected_lengths
        return bootstrap_share(chosen > rejected)

    def __str__(self) -> str:
        return f"pair accuracy: summed {self.summed}; per token {self.per_token}"
