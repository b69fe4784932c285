"""Medians, their spread, and intervals of ratios. Standard library only."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import TypedDict

RESAMPLES = 2000


class Ratio(TypedDict):
    """A speed ratio, slower over faster: of the medians, and the median of per-step ratios, each with 95 % bounds."""

    of_medians: float
    of_medians_low: float
    of_medians_high: float
    per_step: float
    per_step_low: float
    per_step_high: float


def interval(rows: Sequence[tuple[float, float]], statistic: Callable[[Sequence[tuple[float, float]]], float]) -> tuple:
    """Bootstrap bounds (2.5 %, 97.5 %) of a statistic of couples, resampled as couples; seeded."""
    source = random.Random(0)
    values = sorted(statistic(source.choices(rows, k=len(rows))) for _ in range(RESAMPLES))
    return values[int(0.025 * RESAMPLES)], values[int(0.975 * RESAMPLES) - 1]


def _of_medians(rows: Sequence[tuple[float, float]]) -> float:
    return median(a for a, _ in rows) / median(b for _, b in rows)


def _per_step(rows: Sequence[tuple[float, float]]) -> float:
    return median(a / b for a, b in rows)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The ratio of two series measured step by step on the same batches.

    Raises:
        ValueError: series of different or zero length.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"got {len(numerators)} and {len(denominators)} steps; wanted the same number, at least one")
    rows = list(zip(numerators, denominators, strict=True))
    low, high = interval(rows, _of_medians)
    step_low, step_high = interval(rows, _per_step)
    return Ratio(
        of_medians=_of_medians(rows),
        of_medians_low=low,
        of_medians_high=high,
        per_step=_per_step(rows),
        per_step_low=step_low,
        per_step_high=step_high,
    )


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; the value itself three times where there is only one."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high
