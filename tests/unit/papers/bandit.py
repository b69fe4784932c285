"""Bandits for the checks of papers: a policy is a row of logits over actions, a completion is one action; float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from preftune.types import PairScores


def pairs(logps: Tensor, winners: Sequence[int], losers: Sequence[int]) -> PairScores:
    """The pairs (winner, loser) of actions under a policy with these log-probabilities."""
    chosen, rejected = logps[list(winners)], logps[list(losers)]
    ones = torch.ones_like(chosen)
    return PairScores(chosen, rejected, ones, ones, -chosen, ones[0])


def uniform(actions: int) -> Tensor:
    return torch.zeros(actions, dtype=torch.float64).log_softmax(0)


def descend(value: Callable[[Tensor], Tensor], logits: Tensor, *, steps: int, lr: float) -> Tensor:
    """Logits after plain gradient descent."""
    logits = logits.clone().requires_grad_()
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(value(logits), logits)
        with torch.no_grad():
            logits -= lr * gradient
    return logits.detach()


def minimise(value: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Logits at the minimum of a smooth function, to about 1e-8."""
    logits = logits.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([logits], max_iter=400, tolerance_grad=1e-12, tolerance_change=1e-16, history_size=20,
                                  line_search_fn="strong_wolfe")  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = value(logits)
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return logits.detach()
