"""Self-distillation fine-tuning: to answer without a context as the model itself answers with it.

The student answers on its own; the teacher, which sees the privileged context, says how probable each token should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from preftune.configs.sdft import SDFTConfig
from preftune.data.mapping import PreparedData
from preftune.data.teacher_prompts import prepare_contexts
from preftune.losses.aggregate import sequence_mean
from preftune.rollouts.base import RolloutBackend
from preftune.trainers.base import EvalData, RawData
from preftune.trainers.distillation import DistillationTrainer
from preftune.trainers.groups import Group
from preftune.trainers.metrics import RunningMetrics
from preftune.trainers.rounds import Division, Scored, groups_of
from preftune.trainers.step import StepTotals
from preftune.types import LossOutput, PolicyTokens, Rollouts, Sampling


class SDFTTrainer(DistillationTrainer):
    """Trains a policy to answer without a context as it answers with one.

    Args:
        model: Name or folder of a causal language model, a model, or a PeftModel.
        args: An `SDFTConfig`; by default `SDFTConfig("{model}-SDFT")`.
        train_dataset: Rows with `prompt`, text or messages that end with the user's turn, and `privileged_context`.
        eval_dataset: The same, or a dict of such sets.

    With a context that adds nothing to the prompt, the first loss is 0.
    """

    args: SDFTConfig
    config_class = SDFTConfig
    name = "SDFT"
    metric_group = "sdft"
    learns_from_rewards: ClassVar[bool] = False

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: SDFTConfig | None = None,
        train_dataset: RawData | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        rollout_backend: RolloutBackend | None = None,
    ) -> None:
        super().__init__(
            model,
            None,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            rollout_backend=rollout_backend,
        )

    # The algorithm

    def advantages(self, rewards_PGK: Tensor, kl_PG: Tensor | None) -> Tensor:
        """0: nothing is compared."""
        return rewards_PGK.new_zeros(rewards_PGK.shape[:2])

    def loss(self, tokens: PolicyTokens) -> LossOutput:
        """The divergence of each token from the teacher."""
        return self.distillation(tokens)

    def reduce(self, loss: Tensor, mask_BT: Tensor, totals: StepTotals) -> Tensor:
        return sequence_mean(loss, mask_BT, rows=totals.counts["rows"].float())

    # What the teacher is asked

    def prepare_rows(self, dataset: RawData, split: str) -> PreparedData:
        return prepare_contexts(
            dataset,
            self.tokenizer,
            template=self.args.teacher_prompt_template,
            max_prompt_length=self.args.max_prompt_length,
            columns=self.column_map,
            chat_template_kwargs=self.template_options,
            keep_columns=("prompt",) if self.args.remove_unused_columns else None,
            name=split,
        )

    def rollout(
        self, rows: Sequence[Mapping[str, Any]], size: int, sampling: Sampling, stream: Sequence[tuple[int, ...]]
    ) -> Rollouts:
        if not self.args.generate_from_teacher:
            return super().rollout(rows, size, sampling, stream)
        asked = [row["teacher_prompt_ids"] for row in rows]
        rollouts = self.backend.generate(asked, size, sampling, stream=stream)
        # the sampler's log-probabilities are those after another prompt
        return replace(rollouts, prompt_ids=[row["prompt_ids"] for row in rows], logps=None)

    def grouped(self, rollouts: Rollouts, prompts: Sequence[int]) -> list[Group]:
        args = self.args
        skip = args.num_loss_tokens_to_skip
        return groups_of(rollouts, prompts, mask_truncated=args.mask_truncated_completions, skip=skip)

    def with_logps(self, groups: list[Group], old: bool) -> list[Group]:
        """Completions of the teacher's prompt are nobody's samples of the student's: no ratio is taken."""
        return super().with_logps(groups, old and not self.args.generate_from_teacher)

    def extended(
        self,
        groups: list[Group],
        rows: Sequence[Mapping[str, Any]],
        scored: Scored,
        metrics: RunningMetrics,
        division: Division | None = None,
    ) -> list[Group]:
        """Every completion has the teacher's prompt of its row."""
        each = len(scored.completions) // len(rows)
        asked = {i: rows[i // each]["teacher_prompt_ids"] for i in range(len(scored.completions))}
        return [group.with_teacher_prompts(asked) for group in groups]
