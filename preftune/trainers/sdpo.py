"""Self-distilled policy optimisation (arXiv:2601.20802): a failed attempt learns from what the model makes of it later.

The teacher is asked about the same tokens after a prompt with a successful attempt of the group, feedback, or both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from preftune.configs.sdpo import SDPOConfig
from preftune.data.mapping import PreparedData
from preftune.data.teacher_prompts import CONTEXT, prepare_questions
from preftune.losses.advantages import combine_rewards, group_advantages
from preftune.losses.aggregate import REDUCTION_OF, sequence_mean
from preftune.losses.policy_gradient import policy_loss
from preftune.models.reference import ReferenceModel
from preftune.models.structure import learned_position_limit, unwrap
from preftune.rollouts.base import RolloutBackend
from preftune.trainers.base import EvalData, RawData
from preftune.trainers.demonstrations import WARNINGS, Streaks, success_figures
from preftune.trainers.distillation import DistillationTrainer
from preftune.trainers.groups import Group
from preftune.trainers.metrics import RunningMetrics
from preftune.trainers.reprompts import Asked, Attempts, Reprompter
from preftune.trainers.rounds import Division, Figures, Scored
from preftune.trainers.shares import Batch
from preftune.trainers.step import StepTotals
from preftune.types import LossOutput, PolicyTokens

logger = logging.getLogger(__name__)


class SDPOTrainer(DistillationTrainer):
    """Trains a policy on its own attempts: failed ones learn from the model itself, told what would have been right.

    Args:
        model: Name or folder of a causal language model, a model, or a PeftModel.
        reward_funcs: One or several functions, names of built-in ones, or reward models; see `docs/rewards.md`.
        args: An `SDPOConfig`; by default `SDPOConfig("{model}-SDPO")`.
        train_dataset: Rows with `prompt`, text or messages that end with the user's turn; with feedback also
            `privileged_context`. Other columns go to the reward functions.
        eval_dataset: The same, or a dict of such sets.

    With `distillation_weight=0` it is GRPO with the loss that `loss_type` names.
    """

    args: SDPOConfig
    config_class = SDPOConfig
    name = "SDPO"
    metric_group: ClassVar[str] = "sdpo"

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: SDPOConfig | None = None,
        train_dataset: RawData | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        rollout_backend: RolloutBackend | None = None,
    ) -> None:
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            rollout_backend=rollout_backend,
        )
        limit = learned_position_limit(unwrap(self.model))
        self._reprompter = Reprompter(self.args, self.tokenizer, self.template_options, limit)
        self._streaks = Streaks(self.args.diagnostics_warning_interval)

    # The algorithm

    def advantages(self, rewards_PGK: Tensor, kl_PG: Tensor | None) -> Tensor:
        rewards_PG = combine_rewards(rewards_PGK, self.reward_weights)
        return group_advantages(rewards_PG, scale=str(self.args.scale_rewards))

    def loss(self, tokens: PolicyTokens) -> LossOutput:
        """The policy gradient's: the clipped surrogate of each token, plus beta times the KL."""
        args = self.args
        return policy_loss(
            tokens.logps,
            tokens.old_logps,
            tokens.ref_logps,
            tokens.advantages,
            tokens.mask,
            loss_type=args.loss_type,
            beta=args.beta,
            epsilon=args.epsilon,
            epsilon_high=args.epsilon_high,
            importance_sampling_level=args.importance_sampling_level,
        )

    def reduce(self, loss: Tensor, mask_BT: Tensor, totals: StepTotals) -> Tensor:
        return REDUCTION_OF[self.args.loss_type](
            loss,
            mask_BT,
            rows=totals.counts["rows"].float(),
            tokens=totals.counts["tokens"].float(),
            max_completion_length=self.args.max_completion_length,
        )

    def loss_share(self, tokens: PolicyTokens, totals: StepTotals) -> tuple[Tensor, LossOutput]:
        """(1 - w) times the policy gradient's loss, plus w times the mean over completions of the distillation's."""
        share, output = super().loss_share(tokens, totals)
        taught, weight = self.distillation(tokens), self.args.distillation_weight
        learned = sequence_mean(taught.loss, tokens.mask, rows=totals.counts["rows"].float())
        metrics = {**output.metrics, **taught.metrics, "self_distillation/policy_loss": output.loss}
        return (1 - weight) * share + weight * learned, LossOutput(taught.loss, metrics)

    @property
    def penalty_reference(self) -> ReferenceModel | None:
        """The teacher's weights, asked without anything more in the prompt."""
        return self.reference if self.args.beta != 0 else None

    # What has no gradient

    def has_gradient(self, group: Group) -> bool:
        by_policy = self.args.distillation_weight < 1 and not group.is_flat
        by_teacher = self.args.distillation_weight > 0 and bool(group.taught)
        return by_policy or by_teacher or self.learns_from_flat

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Attempts without a teacher are apart, where there is nothing else to learn from."""
        if self.args.distillation_weight == 1:
            parts = [(g, [i for i in range(g.rows) if i not in g.taught]) for g in batch["groups"]]
            apart = [g.select(rows) for g, rest in parts for rows in (g.taught, rest) if rows]
            batch = batch | {"groups": apart}
        return super().micro_batches(batch)

    # What the teacher is asked

    def prepare_rows(self, dataset: RawData, split: str) -> PreparedData:
        reads_feedback = self.args.include_environment_feedback
        kept = ("prompt", CONTEXT) if reads_feedback else ("prompt",)
        return prepare_questions(
            dataset,
            self.tokenizer,
            max_prompt_length=self.args.max_prompt_length,
            reads_feedback=reads_feedback,
            columns=self.column_map,
            chat_template_kwargs=self.template_options,
            keep_columns=kept if self.args.remove_unused_columns else None,
            name=split,
        )

    def extended(
        self,
        groups: list[Group],
        rows: Sequence[Mapping[str, Any]],
        scored: Scored,
        metrics: RunningMetrics,
        division: Division | None = None,
    ) -> list[Group]:
        """Attempts that have something to learn from get the teacher's prompt that shows it."""
        size = self.args.num_generations if division is not None else len(scored.completions) // len(rows)
        attempts = Attempts.of(scored, size, division)
        rewards_PG = combine_rewards(attempts.rewards_PGK, self.reward_weights)
        asked = self._reprompter.ask(rows, attempts, rewards_PG)
        self._record(metrics, attempts, rewards_PG, asked)
        if division is not None:
            self._diagnose(rewards_PG, asked)
        if self.args.distillation_weight == 0:
            return groups
        prompts = {i: one.prompt.ids for i, one in enumerate(asked) if one.prompt is not None}
        return [group.with_teacher_prompts(prompts) for group in groups]

    # What is logged

    def figures_of_rewards(self, names: Sequence[str], rewards_PGK: Tensor, combined_PG: Tensor) -> Figures:
        tolerance = self.args.diagnostics_flat_tolerance
        figures = super().figures_of_rewards(names, rewards_PGK, combined_PG)
        return figures | success_figures(names, rewards_PGK, combined_PG, tolerance=tolerance)

    def _record(self, metrics: RunningMetrics, attempts: Attempts, rewards_PG: Tensor, asked: Sequence[Asked]) -> None:
        succeeded_PG = rewards_PG >= self.args.success_reward_threshold
        own = torch.from_numpy(attempts.own)
        shares = {
            "success_group_fraction": succeeded_PG.any(-1)[own // succeeded_PG.shape[1]],
            "success_sample_fraction": succeeded_PG.flatten()[own],
            "feedback_available_fraction": torch.tensor([one.has_feedback for one in asked]),
            "feedback_used_fraction": torch.tensor([one.uses_feedback for one in asked]),
            "reprompt_sample_fraction": torch.tensor([one.prompt is not None for one in asked]),
            "reprompt_cut_fraction": torch.tensor([one.prompt is not None and one.prompt.cut > 0 for one in asked]),
        }
        for name, values in shares.items():
            metrics.add(f"self_distillation/{name}", values)

    def _diagnose(self, rewards_PG: Tensor, asked: Sequence[Asked]) -> None:
        """Says, on the main process, what has been so for too many rounds in a row."""
        spread = rewards_PG.nan_to_num(nan=-torch.inf).amax(-1) - rewards_PG.nan_to_num(nan=torch.inf).amin(-1)
        now = {
            "flat": bool((spread <= self.args.diagnostics_flat_tolerance).all()),
            "unsuccessful": not bool((rewards_PG >= self.args.success_reward_threshold).any()),
            "untaught": self.args.distillation_weight > 0 and all(one.prompt is None for one in asked),
        }
        for name in self._streaks.see(now):
            if self.is_world_process_zero():
                text = WARNINGS[name].format(n=self._streaks.interval, threshold=self.args.success_reward_threshold)
                logger.warning("SDPO: %s", text)
