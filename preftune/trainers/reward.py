"""Reward modelling: a scalar head learns to score the chosen answer of each pair above the rejected one.

The algorithm is `loss`, on two scores a pair; prompt and answers of a pair are forwarded once, in one tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, TrainerCallback

from preftune.configs.reward import RewardConfig
from preftune.data.report import DataReport
from preftune.data.reward import MARGIN, REWARD_IDS, RewardCollator, prepare_reward
from preftune.losses.reward import bradley_terry
from preftune.models.inputs import scoring_inputs
from preftune.models.logprobs import branch_values
from preftune.models.reward_model import agree_on_padding, load_reward_model, warn_of_frozen_head, with_score_head
from preftune.trainers.base import EvalData, RawData
from preftune.trainers.offline import OfflineTrainer
from preftune.trainers.pairs import RewardTable, score_rows
from preftune.trainers.shares import Batch
from preftune.trainers.step import StepTotals
from preftune.types import LossOutput, PromptTree


class RewardTrainer(OfflineTrainer):
    """Trains a reward model (sequence classification with one label) on preference pairs.

    Args:
        model: Name or folder of a reward model or a causal language model (which gets a new score head), a sequence
            classification model with one label, or a PeftModel of one.
        args: A `RewardConfig`; by default `RewardConfig("{model}-Reward")`.
        train_dataset: Preference rows, text or messages: `prompt, chosen, rejected`, or `chosen, rejected` that hold
            the prompt; with a column `margin` where chosen is to win by that much. Rows of ids (`chosen_ids`,
            `rejected_ids`, perhaps after `prompt_ids`) are taken as they are.
        eval_dataset: The same, or a dict of such sets.
        compute_metrics: Gets predictions `[rows, 2]` (scores of chosen and rejected) and labels 0, the better column.
        peft_config: An adapter to train; the score head is always trained and saved with it.

    The tokenizer is left as it was given: a copy of it gets `pad_token` (without one: the EOS token), `eos_token` and
    the chat template, and is saved with the model.
    """

    args: RewardConfig
    config_class = RewardConfig
    name = "Reward"
    auto_class = AutoModelForSequenceClassification
    columns_read: ClassVar[tuple[str, ...]] = (*REWARD_IDS, MARGIN)
    needs_padding_token: ClassVar[bool] = True

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: RewardConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: RawData | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        super().__init__(
            model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=with_score_head(peft_config),
        )
        warn_of_frozen_head(self.model)

    # The algorithm

    def loss(self, chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | None) -> LossOutput:
        """One loss per pair from its two scores. Override it for a loss of your own."""
        coefficient = self.args.center_rewards_coefficient
        return LossOutput(bradley_terry(chosen_B, rejected_B, margin_B, center_rewards_coefficient=coefficient))

    def batch_loss(self, model: nn.Module, batch: Batch, totals: StepTotals) -> Tensor:
        scores_B2 = self._scores(model, batch["tree"])
        chosen_B, rejected_B = scores_B2.unbind(1)
        output = self.loss(chosen_B, rejected_B, batch.get(MARGIN))
        self.metrics.add("mean_reward", scores_B2)
        self.metrics.add_extremes("reward", scores_B2)
        self.metrics.add("accuracy", (chosen_B > rejected_B).float())
        self.metrics.add("margin", chosen_B - rejected_B)
        for name, values in output.metrics.items():
            self.metrics.add(name, values)
        return output.loss.sum() / totals.counts["rows"].float()

    def _scores(self, model: nn.Module, tree: PromptTree) -> Tensor:
        """`[B, 2]` scores of chosen and rejected."""
        return branch_values(model, tree, layout=self.layout).view(-1, 2)

    # Evaluation

    @torch.no_grad()
    def plain_logits(self, model: nn.Module, tree: PromptTree) -> tuple[Tensor, Tensor, Tensor]:
        """Scores `[B, 2]` of chosen and rejected, labels `[B]` (0: column 0 is the better) and ids `[B, L, 2]`."""
        with self.accelerator.autocast():
            scores_B2 = self._scores(model, tree)
        labels_B = torch.zeros(len(scores_B2), dtype=torch.long, device=scores_B2.device)
        rows = scoring_inputs(tree, "padded").keywords
        ids = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
        return scores_B2, labels_B, ids.view(len(scores_B2), 2, -1).transpose(1, 2)

    def score_pairs(self, dataset: RawData) -> RewardTable:
        """Scores of raw or prepared pairs under the model as it is now; leaves no trace in training or metrics.

        All ranks call it; each scores its share of the rows.
        """
        return RewardTable(*score_rows(self, dataset, lambda tree: self._scores(self.model, tree)).T)

    # Model and data

    def load_policy(self, model: str | PreTrainedModel, quantization_config: Any) -> nn.Module:
        policy = load_reward_model(
            model,
            init_kwargs=cast("dict[str, Any] | None", self.args.model_init_kwargs),
            trust_remote_code=self.args.trust_remote_code,
            quantization_config=quantization_config,
            seed=self.args.seed,
        )
        agree_on_padding(policy, self.tokenizer)
        return policy

    def prepare_dataset(self, dataset: RawData, split: str) -> tuple[RawData, DataReport]:
        prepared = prepare_reward(
            dataset,
            self.tokenizer,
            max_length=self.args.max_length,
            overlong=self.args.overlong,
            truncation_mode=self.args.truncation_mode,
            columns=self.column_map,
            num_proc=self.args.dataset_num_proc,
            eos_token_ids=self.eos_token_ids,
            keep_columns=self.extra_columns(dataset),
            name=split,
        )
        return prepared.dataset, prepared.report

    def default_collator(self) -> RewardCollator:
        return RewardCollator()
