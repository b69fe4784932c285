"""Options of `RLOOTrainer`: REINFORCE with the mean of the other completions as baseline.

Unlike GRPO's, its KL penalty is part of the reward.
"""

from __future__ import annotations

from dataclasses import dataclass

from preftune.configs.fields import option
from preftune.configs.online import OnlineConfig
from preftune.errors import ConfigError


@dataclass(repr=False)
class RLOOConfig(OnlineConfig):
    """REINFORCE leave-one-out (arXiv:2402.14740)."""

    num_generations: int = option(2, "Completions sampled for each prompt: the group that is compared.", low=2)
    beta: float = option(0.05, "Weight of the KL penalty, taken off the reward; 0: there is no reference model.", low=0)
    normalize_advantages: bool = option(
        False, "Subtract the mean of all advantages of a generation round and divide by their standard deviation."
    )
    reward_clip_range: list[float] | None = option(
        None, "Lowest and highest reward: the weighted sum is cut to it, before the KL penalty. Unset: no cut."
    )

    def _check(self) -> None:
        super()._check()
        bounds = self.reward_clip_range
        if bounds is not None and not (len(bounds) == 2 and bounds[0] < bounds[1]):
            raise ConfigError(f"reward_clip_range={bounds} must be two numbers, the lower one first, such as -1 1.")
