"""What entropy decides: which tokens learn (the most uncertain ones), and how much a bonus for it weighs.

The threshold is over all tokens of an optimizer step; the controller is the one thing with a state in `losses`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor


def entropy_threshold(entropy_T: Float[Tensor, " T"], kept: float) -> Float[Tensor, ""]:
    """The entropy from which on a token belongs to the `kept` share of most uncertain ones (arXiv:2506.01939).

    The (1 - kept) quantile, linear between neighbours, of any number of tokens. Infinity where there are none.

    Args:
        entropy_T: Of every scored token of the optimizer step, over all micro-batches and ranks.
        kept: `top_entropy_quantile`, in [0, 1]: 1 keeps all, 0 only the maximum.

    One fact to check: of entropies 0, 1, 2, 3, 4 with kept 0.25 the threshold is 3.
    """
    if entropy_T.numel() == 0:
        return entropy_T.new_tensor(math.inf)
    ordered_T = entropy_T.detach().double().sort().values
    place = (1 - kept) * (len(ordered_T) - 1)
    below, above = math.floor(place), min(math.floor(place) + 1, len(ordered_T) - 1)
    step = ordered_T[above] - ordered_T[below]
    return (ordered_T[below] + (place - below) * step).to(entropy_T.dtype)


def top_entropy_mask(
    entropy_BT: Float[Tensor, "B T"], mask_BT: Float[Tensor, "B T"], threshold: Float[Tensor, ""]
) -> Bool[Tensor, "B T"]:
    """Scored tokens whose entropy reaches the threshold."""
    return (entropy_BT >= threshold) & (mask_BT > 0)


@dataclass
class EntropyController:
    """The weight of the entropy bonus, fixed or steered towards a target (Skywork-OR1, arXiv:2505.22312, 4.3).

    Steered: the bonus acts in a step only if the mean entropy of the step before was at most `target`; after each step
    `coef` rises by `delta` where entropy was at most `target`, and falls by it elsewhere, within `[low, high]`.

    Attributes:
        coef: The weight, at first `entropy_coef`.
        adaptive: Whether it is steered; the rest is used only then.
        last_entropy: Mean entropy of the last optimizer step in nats a token, over all ranks; None before the first.

    One fact to check: steered, the first step has no bonus.
    """

    coef: float
    adaptive: bool = False
    target: float = 0.2
    delta: float = 0.005
    low: float = 0.0
    high: float = 1.0
    last_entropy: float | None = None

    @property
    def active_coef(self) -> float:
        """The weight that applies in the coming step."""
        if not self.adaptive:
            return self.coef
        is_low = self.last_entropy is not None and self.last_entropy <= self.target
        return self.coef if is_low else 0.0

    def update(self, mean_entropy: float) -> None:
        """Takes note of the mean entropy of the optimizer step that has just ended."""
        self.last_entropy = mean_entropy
        if self.adaptive:
            step = self.delta if mean_entropy <= self.target else -self.delta
            self.coef = min(max(self.coef + step, self.low), self.high)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"entropy_coef": self.coef, "last_world_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef, self.last_entropy = state["entropy_coef"], state["last_world_entropy"]
