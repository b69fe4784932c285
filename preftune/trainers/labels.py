"""How well held-out labelled rows are told apart by their implicit rewards, with bootstrap intervals: what KTO raises.

Desirable and undesirable rows have different prompts, so rewards against the reference are compared, not probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from preftune.trainers.pairs import Share


@dataclass(frozen=True)
class LabelTable:
    """Implicit rewards of held-out rows, and whether each is desirable."""

    name: ClassVar[str] = "row_accuracy"

    rewards: NDArray
    is_desirable: NDArray

    @property
    def separation(self) -> Share:
        """Chance that a desirable row has a higher reward than an undesirable one, ties counted half (the AUC).

        1/2 where rewards say nothing: of an untrained policy, whose rewards are all 0.
        """
        good, bad = self._sides()
        above = (good[:, None] > bad) + 0.5 * (good[:, None] == bad)
        return self._with_interval(lambda g, b: np.einsum("rg,gb,rb->r", g, above, b, optimize=True))

    @property
    def margin(self) -> Share:
        """Mean reward of desirable rows less that of undesirable ones."""
        good, bad = self._sides()
        return self._with_interval(lambda g, b: g @ good - b @ bad)

    @property
    def shares(self) -> dict[str, Share]:
        good, bad = self._sides()
        return {"separation": self.separation, "margin": self.margin} if len(good) and len(bad) else {}

    def _sides(self) -> tuple[NDArray, NDArray]:
        return self.rewards[self.is_desirable], self.rewards[~self.is_desirable]

    def _with_interval(
        self, figure: Callable[[NDArray, NDArray], NDArray], resamples: int = 2000, seed: int = 0
    ) -> Share:
        """`figure` of the weights `[resamples, rows]` of both sides, each row of which sums to 1."""
        generator = np.random.default_rng(seed)
        sides = [len(side) for side in self._sides()]
        if not all(sides):
            raise ValueError(f"{sides[0]} desirable and {sides[1]} undesirable rows: wanted some of each to compare.")
        even = [np.full((1, n), 1 / n) for n in sides]
        drawn = [generator.multinomial(n, np.full(n, 1 / n), resamples) / n for n in sides]
        low, high = np.quantile(figure(*drawn), [0.025, 0.975])
        return Share(float(figure(*even)[0]), float(low), float(high), sum(sides))

    def __str__(self) -> str:
        if not self.shares:
            return f"rewards: {len(self.rewards)} rows of one label have nothing to be told apart from"
        return f"rewards: desirable above undesirable {self.separation}; margin {self.margin}"
