"""What travels through a KTO step: scores of rows, the baseline of a step, and the rows of an eval set.

A tree of two branches a prompt holds each row's own completion first, then the completion of another prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from preftune.data.unpaired import LABEL
from preftune.losses.unpaired import kl_baseline
from preftune.types import LossOutput, TokenScores


@dataclass(frozen=True)
class Baseline:
    """What is known of a step before its first gradient: the baseline, and reference scores by micro-batch."""

    kl: Tensor
    ref_logps: Sequence[Tensor]


@dataclass(frozen=True)
class RowScores:
    """Scores of the rows of a batch.

    Attributes:
        completions: Of their own completions under the policy, with gradient.
        ref_logps_B: Summed log-probabilities of the same under the reference.
        kl: The baseline.
        stray_B: Log-ratios of the mismatched completions, where they were computed with this batch.
    """

    completions: TokenScores
    ref_logps_B: Tensor
    kl: Tensor
    stray_B: Tensor | None = None


class EvaluatedRows:
    """Numbers of all rows of an eval set, for a loss against their common baseline."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, ...]] = []

    def add(self, scores: RowScores, is_desirable_B: Tensor, losses_B: Tensor) -> None:
        """Adds a batch whose losses were taken against a baseline of its own."""
        assert scores.stray_B is not None
        rows = (scores.completions.branch_logps, scores.ref_logps_B, is_desirable_B, scores.stray_B, losses_B)
        self._batches.append(tuple(values.detach().cpu() for values in rows))

    def loss_across_batches(self, loss: Callable[[Tensor, Tensor, Tensor, Tensor], LossOutput]) -> float:
        """The mean loss against the common baseline less the mean of the losses added; a collective."""
        batches = [batch for rank in gather_object([self._batches]) for batch in rank]
        self._batches = []
        if not batches:
            return 0.0
        logps_B, ref_logps_B, is_desirable_B, stray_B, losses_B = (torch.cat(parts) for parts in zip(*batches))
        whole_B = loss(logps_B, ref_logps_B, is_desirable_B, kl_baseline(stray_B.double().sum(), len(stray_B))).loss
        return (whole_B.double().mean() - losses_B.double().mean()).item()


def first_branches(scores: TokenScores) -> TokenScores:
    """Scores of the first of the two branches of each prompt."""
    first_T = scores.branch_index % 2 == 0
    entropy, mean_logits = (None if v is None else v[first_T] for v in (scores.entropy, scores.mean_logits))
    return TokenScores(
        scores.logps[first_T], scores.branch_index[first_T] // 2, scores.num_branches // 2, entropy, mean_logits
    )


def labels_of(rows: Dataset) -> np.ndarray:
    """`[rows]` bool: which are desirable."""
    return np.asarray(rows.with_format("numpy")[LABEL][:]).astype(bool)
