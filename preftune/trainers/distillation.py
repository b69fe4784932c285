"""Trainers whose teacher is the model itself with more in its prompt: who the teacher is, and how far the student is.

A leaf says by `extended` what the teacher is asked of each completion.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from preftune.errors import ConfigError
from preftune.losses.distillation import importance_weight
from preftune.losses.importance import masked_mean
from preftune.models.reference import CurrentPolicy, LiveReference, ReferenceModel
from preftune.trainers.groups import Group
from preftune.trainers.online import OnlineTrainer
from preftune.trainers.shares import Batch
from preftune.trainers.teaching import Lesson, taught_tokens
from preftune.types import LossOutput, PolicyTokens, TokenScores


class DistillationTrainer(OnlineTrainer):
    """The step of self-distillation: the teacher is `trainer.reference`, or (`live`) the student as it is.

    Attributes:
        metric_group: The first part of the names of the leaf's metrics.
    """

    metric_group: ClassVar[str]

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, **rest: Any) -> None:
        super().__init__(model, reward_funcs, args, **rest)
        if self.args.distillation_mode == "full_logits" and self.is_sharded:
            raise ConfigError(
                "distillation_mode='full_logits' needs the heads of student and teacher at one time, and FSDP and "
                "DeepSpeed spread their weights over ranks. Use 'topk_logits' or 'sampled_token'."
            )
        self._student = CurrentPolicy()

    def why_no_reference(self, args: Any) -> str | None:
        if args.teacher_model_kind != "live":
            return None
        return "the teacher 'live' is the student itself. Set teacher_model_kind='base'"

    @property
    def penalty_reference(self) -> ReferenceModel | None:
        return None

    @property
    def teacher(self) -> LiveReference:
        """Who is asked, with more in the prompt than the student sees."""
        reference = self.reference
        assert reference is None or isinstance(reference, LiveReference), "numbers stored beforehand teach nothing"
        return self._student if reference is None else reference

    @property
    def template_options(self) -> dict[str, Any] | None:
        """What the chat template is told; the config has turned text into a dict."""
        return self.args.chat_template_kwargs

    @property
    def lesson(self) -> Lesson:
        args = self.args
        return Lesson(
            mode=args.distillation_mode,
            alpha=args.distillation_alpha,
            topk=args.distillation_topk,
            add_tail=args.distillation_add_tail,
            temperature=args.temperature,
            layout=self.layout,
            max_tokens=args.max_tokens_per_micro_batch,
            everywhere=self.is_sharded,
        )

    def tokens_of(self, model: nn.Module, batch: Batch) -> tuple[PolicyTokens, TokenScores]:
        return taught_tokens(
            batch["groups"], model, self.teacher, self.lesson, on_policy=batch["on_policy"], device=self.args.device
        )

    def has_gradient(self, group: Group) -> bool:
        return bool(group.taught) or self.learns_from_flat

    def distillation(self, tokens: PolicyTokens) -> LossOutput:
        """`[B, T]` divergence from the teacher, weighted where the student has moved on since; logged by completion."""
        assert tokens.divergence is not None
        weight_BT = importance_weight(tokens.logps, tokens.old_logps, tokens.mask, clip=self.args.distillation_is_clip)
        loss_BT = tokens.divergence * weight_BT
        mean_B = masked_mean(loss_BT.detach(), tokens.mask)[:, 0]
        groups = ("self_distillation", self.metric_group)
        return LossOutput(loss_BT, {f"{group}/distillation_loss": mean_B for group in groups})
