"""Pair accuracy on held-out pairs, with a bootstrap interval: the figure that DPO and reward training are to raise.

Summed scores compare log p(chosen) with log p(rejected); per-token scores divide each by its length first; a reward
model's scores are compared as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray

from preftune.models.reference_base import evaluating
from preftune.trainers.placing import placed
from preftune.types import PromptTree

if TYPE_CHECKING:
    from preftune.trainers.base import BaseTrainer, RawData


@dataclass(frozen=True)
class Share:
    """A share in [0, 1] of `n` trials, or another figure of `n` rows, with its 95 % bootstrap interval."""

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

    name: ClassVar[str] = "pair_accuracy"

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

    @property
    def shares(self) -> dict[str, Share]:
        return {"summed": self.summed, "per_token": self.per_token}

    def __str__(self) -> str:
        return f"pair accuracy: summed {self.summed}; per token {self.per_token}"


@dataclass(frozen=True)
class RewardTable:
    """Scores of held-out pairs under a reward model, one entry a pair."""

    name: ClassVar[str] = "pair_accuracy"

    chosen_scores: NDArray
    rejected_scores: NDArray

    @property
    def accuracy(self) -> Share:
        """Share with score(chosen) > score(rejected)."""
        return bootstrap_share(self.chosen_scores > self.rejected_scores)

    @property
    def shares(self) -> dict[str, Share]:
        return {"accuracy": self.accuracy}

    def __str__(self) -> str:
        chosen, rejected = self.chosen_scores.mean(), self.rejected_scores.mean()
        return f"pair accuracy: {self.accuracy}; mean score: chosen {chosen:.3f}, rejected {rejected:.3f}"


@torch.no_grad()
def score_rows(trainer: BaseTrainer, dataset: RawData, score: Callable[[PromptTree], torch.Tensor]) -> NDArray:
    """`[rows, k]` float64: what `score` gives (`[P, k]`) for the prompts of raw or prepared rows, in their order.

    Runs in eval mode and leaves no trace in training or metrics. All ranks call it; each scores its share of the rows.
    """
    rows: list[Any] = list(trainer._prepare_split(dataset, "scored"))
    rank, world, size = trainer.args.process_index, trainer.args.world_size, trainer.args.per_device_eval_batch_size
    table: dict[int, NDArray] = {}
    with placed(trainer), evaluating(trainer.model), trainer.accelerator.autocast():
        for start in range(0, len(rows), size * world):
            # every rank scores in every round: a sharded model needs all of them
            mine = range(len(rows))[start + rank * size :][:size] or range(len(rows))[-1:]
            batch: Any = trainer.data_collator([rows[i] for i in mine])
            table |= zip(mine, score(batch["tree"].to(trainer.args.device)).double().cpu().numpy())
    whole = dict(gather_object(list(table.items())))
    return np.stack([whole[i] for i in range(len(rows))])
