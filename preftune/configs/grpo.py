"""Options of `GRPOTrainer`: which loss, how advantages are scaled, what corrects stale or foreign samples.

A combination that its papers advise against warns; one without meaning is refused.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from preftune.configs.base import deprecated
from preftune.configs.fields import option
from preftune.configs.online import OnlineConfig
from preftune.errors import ConfigError
from preftune.losses.names import (
    IMPORTANCE_LEVELS,
    POLICY_LOSS_NAMES,
    REWARD_AGGREGATIONS,
    REWARD_SCALES,
    SAMPLER_CORRECTIONS,
)

# Their average over tokens gives a sequence's ratio the weight of its length again.
_AVERAGES_TOKENS = ("bnpo", "dr_grpo", "dapo", "cispo")


@dataclass(repr=False)
class GRPOConfig(OnlineConfig):
    """Group relative policy optimisation (arXiv:2402.03300) and its family of losses."""

    loss_type: str = option(
        "dapo",
        "The loss and how it is averaged: grpo, bnpo, dr_grpo and dapo clip the ratio of each token, luspo of each "
        "sequence; cispo caps it, sapo and vespo fade it out.",
        choices=POLICY_LOSS_NAMES,
    )
    importance_sampling_level: str = option(
        "token",
        "Whether the ratio of new to old policy is a token's or a sequence's (GSPO, arXiv:2507.18071).",
        choices=IMPORTANCE_LEVELS,
    )
    epsilon_high: float | None = option(
        None,
        "The same upwards, where it differs. Unset: epsilon. For cispo the cap of the ratio itself. Unset: 5.",
        low=0,
    )
    delta: float | None = option(
        None,
        "Cap of the unclipped ratio (two-sided clip, arXiv:2505.07291); above 1 + epsilon_high. Unset: none.",
        above=0,
    )
    scale_rewards: str | bool = option(
        "group",
        "What advantages are divided by: the standard deviation of the group (true), that of the batch, or none "
        "(false).",
        choices=REWARD_SCALES,
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "Several rewards: sum_then_normalize, or normalize_then_sum (each in its group, GDPO, arXiv:2601.05242; "
        "scale_rewards then has no effect).",
        choices=REWARD_AGGREGATIONS,
    )
    use_bias_correction_kl: bool = option(
        True, "Multiply the KL of a token by its ratio, which makes the gradient of the KL unbiased (arXiv:2512.02556)."
    )
    sapo_temperature_neg: float = option(1.05, "sapo: how fast it fades where the advantage is negative.", above=0)
    sapo_temperature_pos: float = option(1.0, "sapo: the same where it is positive.", above=0)
    vespo_k_pos: float = option(2.0, "vespo: the power k of the ratio where the advantage is positive.", low=0)
    vespo_lambda_pos: float = option(3.0, "vespo: the decay lambda where the advantage is positive.", low=0)
    vespo_k_neg: float = option(3.0, "vespo: the power k where the advantage is negative.", low=0)
    vespo_lambda_neg: float = option(2.0, "vespo: the decay lambda where the advantage is negative.", low=0)
    top_entropy_quantile: float = option(
        1.0, "Share of tokens, those of highest entropy, that learn (arXiv:2506.01939). 1: all.", low=0, high=1
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus; with use_adaptive_entropy, at the start.")
    use_adaptive_entropy: bool = option(
        False, "Steer entropy_coef so that the mean entropy of a token stays near entropy_target (arXiv:2505.22312)."
    )
    entropy_coef_min: float = option(0.0, "Lowest entropy_coef when it is steered.")
    entropy_coef_max: float = option(1.0, "Highest entropy_coef when it is steered.")
    entropy_coef_delta: float = option(0.005, "What entropy_coef changes by in a step when it is steered.", low=0)
    entropy_target: float = option(0.2, "Mean entropy of a token, in nats, that is steered to.", low=0)
    off_policy_mask_threshold: float | None = option(
        None,
        "Drop completions with negative advantage whose tokens the policy has made less probable by this many nats "
        "on average (arXiv:2512.02556). Unset: none.",
        low=0,
    )
    max_tool_calling_iterations: int | None = option(
        None, "Most rounds of tool calls within a completion. Unset: any number.", low=0
    )
    tool_timeout: float | None = option(
        None, "Seconds that one call of a tool may take; past it the model reads an error. Unset: any time.", above=0
    )
    cast_lm_head_to_fp32: bool = option(
        False,
        "Compute the head's product of hidden states and weight in float32 where weights or autocast are bfloat16 or "
        "float16, in training and in rollouts of this process. Softmax and log-probabilities are float32 always.",
    )
    vllm_importance_sampling_correction: bool = option(
        True, "Weigh the loss by how the trainer's probabilities differ from those of a vLLM that sampled."
    )
    vllm_importance_sampling_mode: str = option(
        "sequence_mask",
        "That weight is a token's or a sequence's (its product, which grows with length), and beyond its bounds is "
        "cut to them (truncate) or 0 (mask).",
        choices=SAMPLER_CORRECTIONS,
    )
    vllm_importance_sampling_clip_max: float | None = option(
        3.0, "Upper bound of that weight. none: no bound.", above=0
    )
    vllm_importance_sampling_clip_min: float | None = option(None, "Lower bound of that weight. none: no bound.", low=0)
    vllm_importance_sampling_cap: float | None = option(
        None, "Deprecated: set vllm_importance_sampling_clip_max instead.", above=0
    )
    log_completions_hub_repo: str | None = option(
        None, "A dataset repository on the hub that the completions are uploaded to; needs log_completions."
    )

    def _normalise(self) -> None:
        super()._normalise()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if self.vllm_importance_sampling_cap is not None:
            deprecated("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max takes its place")
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
            self.vllm_importance_sampling_cap = None

    def _check(self) -> None:
        super()._check()
        self._check_sampler_bounds()
        if not self.entropy_coef_min <= self.entropy_coef_max:
            raise ConfigError(
                f"entropy_coef_min={self.entropy_coef_min} is above entropy_coef_max={self.entropy_coef_max}. "
                "Swap them."
            )
        if self.use_adaptive_entropy and not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
            raise ConfigError(
                f"entropy_coef={self.entropy_coef} is not between entropy_coef_min={self.entropy_coef_min} and "
                f"entropy_coef_max={self.entropy_coef_max}, where use_adaptive_entropy=True steers it."
            )
        if self.log_completions_hub_repo is not None and not self.log_completions:
            raise ConfigError(
                f"log_completions_hub_repo={self.log_completions_hub_repo!r} uploads nothing without "
                "log_completions=True. Set both or neither."
            )
        for advice in self._advice():
            warnings.warn(advice, stacklevel=2)

    def _check_sampler_bounds(self) -> None:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}."
            )
        mode = self.vllm_importance_sampling_mode
        if low is None and high is None and mode.endswith("truncate"):
            raise ConfigError(
                f"vllm_importance_sampling_mode={mode!r} cuts to vllm_importance_sampling_clip_min and _clip_max, and "
                "both are none. Set one of them."
            )

    def _advice(self) -> list[str]:
        """What can be trained with, but is seldom meant."""
        by_sequence = self.importance_sampling_level == "sequence"
        advice = []
        if self.loss_type == "luspo" and not by_sequence:
            advice.append(
                "loss_type='luspo' sums the loss of a completion's tokens, which suits the ratio of a sequence. Set "
                "importance_sampling_level='sequence'; with 'token' long completions dominate."
            )
        if self.loss_type == "vespo" and by_sequence:
            advice.append(
                "loss_type='vespo' has a ratio of its own, of the whole sequence: "
                "importance_sampling_level='sequence' changes only the correction of the KL."
            )
        if self.loss_type in _AVERAGES_TOKENS and by_sequence:
            advice.append(
                f"importance_sampling_level='sequence' with loss_type={self.loss_type!r} weighs a sequence by its "
                "length. For GSPO set loss_type='grpo'."
            )
        if self.loss_type == "cispo" and self.epsilon_high is not None and self.epsilon_high < 1:
            advice.append(
                f"epsilon_high={self.epsilon_high} is the cap of the ratio itself in loss_type='cispo': every update "
                f"shrinks to {self.epsilon_high} of its size. Leave it unset for a cap of 5."
            )
        upper = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        if self.delta is not None and self.delta <= upper and self.loss_type not in ("cispo", "sapo", "vespo"):
            advice.append(
                f"delta={self.delta} is not above 1 + epsilon_high = {upper}: it then takes the place of the clip. "
                "2 to 4 is usual."
            )
        return advice
