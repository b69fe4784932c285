"""Options of trainers with rewards, and those that GRPO and RLOO share: the policy's trust region, the reference.

A reference exists where `beta` is above 0, and only then can it move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from preftune.configs.fields import option
from preftune.configs.reference import ReferenceConfig
from preftune.configs.rollout import RolloutConfig
from preftune.errors import ConfigError

ON_REWARD_ERROR = ("raise", "none")


@dataclass(repr=False)
class RewardedConfig(RolloutConfig):
    """How the policy's own completions are given rewards."""

    reward_weights: list[float] | None = option(None, "A weight for each reward function. Unset: 1 each.")
    reward_timeout: float | None = option(
        None, "Seconds that one call of a reward function may take. Unset: any time.", above=0
    )
    on_reward_error: str = option(
        "raise",
        "When a reward function fails or takes too long: raise, or none (it then gives no reward in this round).",
        choices=ON_REWARD_ERROR,
    )
    reward_processes: int = option(
        0, "Processes for reward functions that are busy on the CPU. 0: they run in the trainer's.", low=0
    )

    def _check(self) -> None:
        super()._check()
        for weight in self.reward_weights or []:
            if not math.isfinite(weight):
                raise ConfigError(f"reward_weights has {weight!r}; give a finite number for each reward function.")


@dataclass(repr=False)
class OnlineConfig(RewardedConfig, ReferenceConfig):
    """Learning from rewards of the policy's own completions."""

    learning_rate: float = option(1e-6, "Peak learning rate of the optimizer.", low=0)
    beta: float = option(0.0, "Weight of the KL divergence from the reference; 0: there is no reference model.", low=0)
    epsilon: float = option(0.2, "How far the ratio of new to old policy may move from 1 before it is clipped.", low=0)
    epsilon_high: float | None = option(None, "The same upwards, where it differs. Unset: epsilon.", low=0)

    def _check(self) -> None:
        super()._check()
        if self.moving_reference is not None and self.beta == 0:
            raise ConfigError(
                f"{self.moving_reference}=True moves the reference model, but with beta=0 there is none. Set beta "
                f"above 0 (0.04 is usual), or {self.moving_reference}=False."
            )
