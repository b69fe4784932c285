"""Exact gradients for losses that couple the rows of a step (sorting, ranking), without holding the whole step.

Scores of all rows come first, without gradient; the loss is differentiated with respect to the scores alone; the rows
are then forwarded again, micro-batch by micro-batch, with those numbers as the gradient of their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from preftune.types import LossOutput, PairScores


@dataclass(frozen=True)
class PairGradients:
    """Per micro-batch of this rank: losses `[B]` and their gradients `[B]` with respect to three scores."""

    losses: Sequence[Tensor]
    gradients: Sequence[dict[str, Tensor]]

    def surrogate(self, policy: PairScores, batch: dict[str, Any]) -> Tensor:
        """`[B]` the true losses, with the gradient of the coupled loss.

        The batch may be a part of a micro-batch: `batch["row"]` says which rows it holds.
        """
        rows, step = batch["row"], batch["micro_batch"]
        total = self.losses[step][rows]
        for name, score in _leaves(policy).items():
            total = total + self.gradients[step][name][rows] * (score - score.detach())
        return total


def without_rows(scores: PairScores) -> PairScores:
    """Scores of no rows at all: what a rank adds whose rows are repeated ones."""
    rows = {name: value[:0] for name, value in vars(scores).items() if value.ndim}
    return replace(scores, **rows)


def _leaves(scores: PairScores) -> dict[str, Tensor]:
    return {
        "chosen_logps": scores.chosen_logps,
        "rejected_logps": scores.rejected_logps,
        "chosen_nll": scores.chosen_nll,
    }


def _concatenate(parts: Sequence[PairScores | None], device: torch.device) -> PairScores | None:
    if parts[0] is None:
        return None

    def join(name: str) -> Tensor:
        return torch.cat([vars(p)[name].detach().to(device) for p in parts])

    names = ("chosen_logps", "rejected_logps", "chosen_lengths", "rejected_lengths", "chosen_nll")
    return PairScores(**{n: join(n) for n in names}, mean_chosen_length=parts[0].mean_chosen_length.to(device))


class EvaluatedPairs:
    """The scores of all pairs of an eval set, so that its loss is that of the whole set, however it was cut in batches.

    Held on the host: a few floats a pair.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[PairScores, PairScores | None, Tensor, Tensor]] = []

    def add(self, policy: PairScores, ref: PairScores | None, losses: Tensor, weights: Tensor) -> None:
        """A batch: `losses` are its own `[B]`, weighted with `weights`."""
        host = torch.device("cpu")
        parts = _concatenate([policy], host), _concatenate([ref], host), losses.detach().cpu(), weights.detach().cpu()
        self._batches.append(parts)  # pyright: ignore[reportArgumentType]

    def loss_across_batches(
        self, loss: Callable[[PairScores, PairScores | None], LossOutput], device: torch.device
    ) -> float:
        """The loss of all pairs as one batch less the mean of the losses added; a collective."""
        batches = [batch for rank in gather_object([self._batches]) for batch in rank]
        self._batches = []
        if not batches:
            return 0.0
        policies, refs, losses, weights = zip(*batches, strict=True)
        rows = [len(part) for part in losses]
        policy, ref = _concatenate(policies, device), _concatenate(refs, device)
        assert policy is not None
        chosen_tokens = torch.stack([n * part.mean_chosen_length for n, part in zip(rows, policies, strict=True)]).sum()
        policy = replace(policy, mean_chosen_length=(chosen_tokens / sum(rows)).to(device))
        whole = loss(policy, ref).loss * torch.cat(weights).to(device)
        return (whole.double().mean() - torch.cat(losses).to(device).double().mean()).item()


def coupled_pair_gradients(
    scored: Sequence[tuple[PairScores, PairScores | None]],
    loss: Callable[[PairScores, PairScores | None], LossOutput],
) -> PairGradients:
    """Losses and gradients of all rows of the step from (policy, reference) scores of each local micro-batch.

    A collective: scores of all ranks are gathered (a few floats a row). For a loss that does not couple rows the result
    is the ordinary gradient.
    """
    device = scored[0][0].chosen_logps.device
    host = torch.device("cpu")
    mine = tuple(_concatenate(side, host) for side in zip(*scored, strict=True))
    ranks = gather_object([mine])
    policy, ref = (_concatenate(side, device) for side in zip(*ranks, strict=True))
    assert policy is not None
    with torch.enable_grad():
        leaves = {name: value.clone().requires_grad_() for name, value in _leaves(policy).items()}
        losses = loss(replace(policy, **leaves), ref).loss
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    start = sum(len(pair[0].chosen_logps) for pair in ranks[: PartialState().process_index])
    sizes = [len(pair[0].chosen_logps) for pair in scored]

    def local(values: Tensor) -> Sequence[Tensor]:
        return values.detach()[start : start + sum(sizes)].split(sizes)

    by_name = {name: local(g) for name, g in zip(leaves, gradients, strict=True)}
    steps = [{name: parts[i] for name, parts in by_name.items()} for i in range(len(sizes))]
    return PairGradients(local(losses), steps)
