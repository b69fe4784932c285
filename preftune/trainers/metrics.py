"""Running metrics: sums on the device, reduced over all ranks in one collective per log.

A metric is a weighted mean, a minimum or a maximum over everything seen since the last log, never a mean of means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor

Kind = Literal["mean", "min", "max"]


def merged(states: Iterable[dict[str, list]]) -> dict[str, list]:
    """The state of several accumulators together."""
    whole: dict[str, list] = {}
    for state in states:
        for name, (kind, total, weight) in state.items():
            if name not in whole:
                whole[name] = [kind, total, weight]
            elif kind == "mean":
                whole[name] = [kind, whole[name][1] + total, whole[name][2] + weight]
            else:
                pair = whole[name][1], total
                whole[name][1] = math.nan if any(map(math.isnan, pair)) else (min if kind == "min" else max)(pair)
    return whole


class RunningMetrics:
    """Accumulators by name; `state_dict` makes a window that a checkpoint cuts in two end with the same numbers.

    Attributes:
        differences: Metrics that are one mean less another, each over all it was added to, by name.
    """

    def __init__(self) -> None:
        self.differences: dict[str, tuple[str, str]] = {}
        self._kinds: dict[str, Kind] = {}
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignores what is added until exit."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def add(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Adds values of any shape, each of weight 1 or of the given weight. An empty tensor adds nothing."""
        if self._is_paused or values.numel() == 0:
            return
        values = values.detach().double()
        if weights is None:
            total, weight = values.sum(), torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
        else:
            weight_values = weights.detach().double()
            total, weight = (values * weight_values).sum(), weight_values.sum()
        self._kinds[name] = "mean"
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._weights[name] = self._weights[name] + weight if name in self._weights else weight

    def add_extreme(self, name: str, values: Tensor, kind: Literal["min", "max"]) -> None:
        """Keeps the smallest or the largest value seen."""
        if self._is_paused or values.numel() == 0:
            return
        value = (values.min() if kind == "min" else values.max()).detach().double()
        choose = torch.minimum if kind == "min" else torch.maximum
        self._kinds[name] = kind
        self._sums[name] = choose(self._sums[name], value) if name in self._sums else value
        self._weights[name] = torch.ones_like(value)

    def add_extremes(self, prefix: str, values: Tensor) -> None:
        """Keeps the smallest and the largest value seen, as `min_{prefix}` and `max_{prefix}`."""
        self.add_extreme(f"min_{prefix}", values, "min")
        self.add_extreme(f"max_{prefix}", values, "max")

    def state_dict(self) -> dict[str, list]:
        """`{name: [kind, sum, weight]}` of this rank as plain numbers, exact in JSON."""
        return {n: [self._kinds[n], self._sums[n].item(), self._weights[n].item()] for n in self._sums}

    def load_state_dict(self, state: dict[str, list]) -> None:
        self.clear()
        for name, (kind, total, weight) in state.items():
            self._kinds[name] = kind
            self._sums[name] = torch.tensor(total, dtype=torch.float64)
            self._weights[name] = torch.tensor(weight, dtype=torch.float64)

    def to(self, device: torch.device) -> None:
        self._sums = {n: t.to(device) for n, t in self._sums.items()}
        self._weights = {n: t.to(device) for n, t in self._weights.items()}

    def clear(self) -> None:
        self._kinds, self._sums, self._weights = {}, {}, {}

    def merged_state(self) -> dict[str, list]:
        """The state over all ranks (a collective: every rank must call it)."""
        return merged(gather_object([self.state_dict()]))

    def reduce(self, prefix: str = "") -> dict[str, float]:
        """The values over all ranks since the last call, then starts anew (a collective).

        A mean whose total weight is 0 is left out rather than logged as NaN, and so is a difference that needs it.
        """
        values = {}
        for name, (kind, total, weight) in self.merged_state().items():
            if kind != "mean":
                values[prefix + name] = total
            elif weight > 0 or math.isnan(weight):
                values[prefix + name] = total / weight
        for name, (plus, minus) in self.differences.items():
            if prefix + plus in values and prefix + minus in values:
                values[prefix + name] = values[prefix + plus] - values[prefix + minus]
        self.clear()
        return values
