"""Losses of single tokens from their log-probability: what SFT minimises.

One value a token, not reduced: the trainer divides the sum by the scored tokens of the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor


def nll(logps_T: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Negative log-likelihood, -log p, in nats; at least 0.

    One fact to check: 0 where p = 1, log 2 where p = 1/2.
    """
    return -logps_T


def dft(logps_T: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Dynamic fine-tuning, -sg(p) log p with sg = stop-gradient (arXiv:2508.05629).

    Undoes the weight 1/p that likelihood puts on improbable tokens. In [0, 1/e].

    One fact to check: its gradient with respect to any parameter is p times that of `nll`.
    """
    return -logps_T.detach().exp() * logps_T


TOKEN_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"nll": nll, "dft": dft}
