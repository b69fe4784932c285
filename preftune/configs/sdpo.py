"""Options of `SDPOTrainer`: what a failed attempt is told, and how much of the loss is the policy gradient's.

The teacher's prompt is the question with a successful attempt, feedback, or both.
"""

from __future__ import annotations

from dataclasses import dataclass

from preftune.configs.distillation import DistillationConfig, check_template
from preftune.configs.fields import option, with_default
from preftune.configs.online import RewardedConfig
from preftune.errors import ConfigError
from preftune.losses.names import IMPORTANCE_LEVELS, REWARD_SCALES

# Those whose surrogate is the clipped ratio; they differ in what the mean is over.
POLICY_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")


@dataclass(repr=False)
class SDPOConfig(DistillationConfig, RewardedConfig):
    """Self-distilled policy optimisation (arXiv:2601.20802)."""

    teacher_model_kind: str = with_default(DistillationConfig, "teacher_model_kind", "ema")
    distillation_mode: str = with_default(DistillationConfig, "distillation_mode", "sampled_token")
    distillation_alpha: float = with_default(DistillationConfig, "distillation_alpha", 1.0)
    distillation_topk: int | None = with_default(DistillationConfig, "distillation_topk", None)
    distillation_weight: float = option(
        1.0, "Share of the distillation in the loss; the rest is the policy gradient's.", low=0, high=1
    )
    loss_type: str = option("dapo", "How the policy gradient's loss is averaged over tokens.", choices=POLICY_LOSSES)
    beta: float = option(
        0.0, "Weight of the KL divergence from the teacher's weights in the policy gradient's loss.", low=0
    )
    epsilon: float = option(0.2, "How far the ratio of new to old policy may move from 1 before it is clipped.", low=0)
    epsilon_high: float | None = option(None, "The same upwards, where it differs. Unset: epsilon.", low=0)
    importance_sampling_level: str = option(
        "token",
        "Whether the ratio of new to old policy is a token's or a sequence's (GSPO, arXiv:2507.18071).",
        choices=IMPORTANCE_LEVELS,
    )
    scale_rewards: str | bool = option(
        "group",
        "What advantages are divided by: the standard deviation of the group (true), that of the batch, or none "
        "(false).",
        choices=REWARD_SCALES,
    )
    use_successful_as_teacher: bool = option(True, "Show the teacher a successful attempt of the same group.")
    success_reward_threshold: float = option(1.0, "The reward from which on an attempt is successful.")
    dont_reprompt_on_self_success: bool = option(
        True, "A successful attempt learns nothing from the teacher, and is never shown to itself."
    )
    max_reprompt_len: int | None = option(
        10240,
        "Most tokens of the teacher's prompt: solution and feedback lose their beginning, never the question. Unset: "
        "no limit.",
        low=1,
    )
    reprompt_template: str = option(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "The teacher's prompt (of a conversation: its last user turn), made of {prompt}, {solution} and {feedback}.",
    )
    solution_template: str = option(
        "\n\nA correct solution:\n\n{solution}", "What stands for a successful attempt in it; empty without one."
    )
    feedback_template: str = option(
        "\n\nFeedback on a failed attempt:\n\n{feedback}", "What stands for feedback in it; empty without any."
    )
    include_environment_feedback: bool = option(
        False, "Show the teacher the text in the column privileged_context of the row."
    )
    environment_feedback_only_without_solution: bool = option(
        False, "Show that text only where no successful attempt is shown."
    )
    remove_thinking_from_demonstration: bool = option(
        False, "Leave what an attempt says before </think> out of what the teacher is shown."
    )
    diagnostics_warning_interval: int = option(
        10, "Warn after so many rounds in a row without a success, a teacher or unequal rewards. 0: never.", low=0
    )
    diagnostics_flat_tolerance: float = option(
        1e-8, "Rewards of a group that differ by no more than this are equal, for those warnings.", low=0
    )

    def _normalise(self) -> None:
        super()._normalise()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"

    def _check(self) -> None:
        super()._check()
        check_template("reprompt_template", self.reprompt_template, ("prompt", "solution", "feedback"))
        check_template("solution_template", self.solution_template, ("solution",))
        check_template("feedback_template", self.feedback_template, ("feedback",))
        if self.environment_feedback_only_without_solution and not self.include_environment_feedback:
            raise ConfigError(
                "environment_feedback_only_without_solution=True changes nothing without "
                "include_environment_feedback=True. Set both or neither."
            )
        self._check_teacher()
        self._check_policy_gradient()

    def _check_teacher(self) -> None:
        """Someone must have something to say to the teacher."""
        alone = self.num_generations == 1 and self.dont_reprompt_on_self_success
        if self.distillation_weight > 0 and not self.include_environment_feedback:
            if not self.use_successful_as_teacher:
                raise ConfigError(
                    "use_successful_as_teacher=False and include_environment_feedback=False leave nothing to tell the "
                    "teacher. Set one of them to True, or distillation_weight=0."
                )
            if alone:
                raise ConfigError(
                    "num_generations=1 leaves no other attempt that a failed one could be shown. Set it to 2 or more, "
                    "or include_environment_feedback=True."
                )

    def _check_policy_gradient(self) -> None:
        if self.distillation_weight < 1 and self.num_generations == 1:
            raise ConfigError(
                f"distillation_weight={self.distillation_weight} leaves a share to the policy gradient, which compares "
                "completions of one prompt, and num_generations is 1. Set it to 2 or more, or distillation_weight=1."
            )
        if self.beta > 0 and self.distillation_weight == 1:
            raise ConfigError(
                f"beta={self.beta} would change nothing: the KL divergence belongs to the policy gradient's loss, "
                "whose share is 1 - distillation_weight = 0. Lower distillation_weight, or set beta=0."
            )
        if self.beta > 0 and self.teacher_model_kind == "live":
            raise ConfigError(
                f"beta={self.beta} weighs the distance from the teacher's weights, but the teacher 'live' has the "
                "student's. Set teacher_model_kind to 'base' or 'ema', or beta=0."
            )
