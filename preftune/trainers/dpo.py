"""Direct Preference Optimization (arXiv:2305.18290) and its family of losses on pairs.

The algorithm is `loss`; everything above it turns a batch of pairs into summed log-probabilities of both models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from preftune.configs.dpo import DPOConfig
from preftune.data.collate import PreferenceCollator
from preftune.data.formats import PAIR_IDS
from preftune.data.multimodal import IMAGE_COLUMNS
from preftune.data.report import DataReport
from preftune.data.tokenize import prepare_preference
from preftune.data.tree import scored_lengths
from preftune.losses.names import BATCH_COUPLED, PAIR_HYPER
from preftune.losses.preference import implicit_rewards, resolve_pair_loss, weighted_pair_loss
from preftune.losses.reduce import pair_scores, reference_pair_scores, wpo_pair_weights
from preftune.models.logprobs import token_scores
from preftune.trainers.base import EvalData, RawData
from preftune.trainers.coupled import EvaluatedPairs, PairGradients, coupled_pair_gradients, without_rows
from preftune.trainers.offline import OfflineTrainer
from preftune.trainers.pairs import PairTable, score_rows
from preftune.trainers.shares import Batch
from preftune.trainers.step import StepTotals
from preftune.types import LossOutput, PairScores, PromptTree, TokenScores

PairLoss = Callable[..., LossOutput]


class DPOTrainer(OfflineTrainer):
    """Trains a policy on preference pairs, with or without a reference that moves.

    Args:
        model: Name or folder of a causal language model, a model, or a PeftModel.
        ref_model: The frozen reference; by default the policy as it is at construction (its base model under a fresh
            adapter, its starting adapter for a PeftModel).
        args: A `DPOConfig`; by default `DPOConfig("{model}-DPO")`.
        train_dataset: Preference rows, text or messages: `prompt, chosen, rejected`, or `chosen, rejected` that both
            begin with the prompt. Rows of ids (`prompt_ids, chosen_ids, rejected_ids`) are taken as they are.
        eval_dataset: The same, or a dict of such sets.
        loss: A function of pairs that replaces `args.loss_type`, see `docs/extending.md`.

    The first loss of `loss_type="sigmoid"` is log 2 = 0.6931 whatever the form of the reference.
    """

    args: DPOConfig
    config_class = DPOConfig
    name = "DPO"
    needs_reference = True
    columns_read: ClassVar[tuple[str, ...]] = (*PAIR_IDS, *IMAGE_COLUMNS)

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: nn.Module | str | None = None,
        args: DPOConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: RawData | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        loss: PairLoss | None = None,
    ) -> None:
        self._own_loss = loss
        super().__init__(
            model,
            args,
            ref_model=ref_model,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        names = [loss] if loss is not None else self.args.loss_type
        weights = self.args.loss_weights or [1.0] * len(names)
        self._losses = [(resolve_pair_loss(name), weight) for name, weight in zip(names, weights, strict=True)]
        self._evaluated = EvaluatedPairs()
        self._outputs = frozenset({"entropy", "mean_logits", "is_top1"})
        if self.args.use_weighting:
            self._outputs |= {"log_sum_sq_probs"}

    # The algorithm

    def loss(self, policy: PairScores, ref: PairScores | None) -> LossOutput:
        """The weighted sum of the losses of `loss_type`, one value a pair. Override it for a loss of your own."""
        hyper = {name: vars(self.args)[name] for name in PAIR_HYPER}
        return weighted_pair_loss(self._losses, policy, ref, **hyper)

    # From a batch to its scores

    def batch_loss(self, model: nn.Module, batch: Batch, totals: StepTotals) -> Tensor:
        policy, ref, scores = self._score(model, batch, totals)
        output = self.loss(policy, ref)
        if isinstance(totals.statistics, PairGradients):
            losses = totals.statistics.surrogate(policy, batch)
        else:
            losses = output.loss
        weights = wpo_pair_weights(scores) if self.args.use_weighting else torch.ones_like(losses)
        losses = losses * weights
        if not self.model.training and not batch["repeated"]:
            self._evaluated.add(policy, ref, losses, weights)
        self._record(policy, ref, scores, output)
        rows = totals.counts["rows"].float()
        share = losses.sum() / rows
        if scores.aux_loss is not None and self.aux_loss_coef:
            share = share + self.aux_loss_coef * scores.aux_loss * (batch["tree"].num_prompts / rows)
            self.metrics.add("aux_loss", scores.aux_loss)
        return share

    def _score(
        self, model: nn.Module, batch: Batch, totals: StepTotals
    ) -> tuple[PairScores, PairScores | None, TokenScores]:
        tree, ld_alpha = batch["tree"], self.args.ld_alpha
        ref_B = None
        if self.reference is not None:
            ref_B = self.reference.branch_logps(model, tree, layout=self.layout, ld_alpha=ld_alpha)
        scores = token_scores(model, tree, layout=self.layout, outputs=self._outputs)
        mean_length = totals.counts["chosen_tokens"] / totals.counts["rows"]
        policy = pair_scores(scores, ld_alpha=ld_alpha, mean_chosen_length=mean_length.clamp(min=1))
        ref = None if ref_B is None else reference_pair_scores(ref_B, policy, ld_alpha=ld_alpha)
        return policy, ref, scores

    def step_statistics(self, model: nn.Module, batches: list[Batch], totals: StepTotals) -> PairGradients | None:
        """Losses that rank pairs within the batch need the scores of the whole step before any row's gradient."""
        coupled = self._own_loss is None and bool(BATCH_COUPLED & set(map(str, self.args.loss_type)))
        if not coupled or not self.model.training or self.is_one_forward(batches):
            return None
        with torch.no_grad():
            scored = [self._score(model, batch, totals)[:2] for batch in batches]
        if batches[-1]["repeated"]:
            policy, ref = scored[-1]
            scored[-1] = (without_rows(policy), None if ref is None else without_rows(ref))
        return coupled_pair_gradients(scored, self.loss)

    def begin_evaluation(self) -> None:
        self._evaluated = EvaluatedPairs()

    def loss_across_batches(self) -> float:
        return self._evaluated.loss_across_batches(self.loss, self.args.device)

    def count(self, batch: Batch) -> dict[str, float]:
        scored = scored_lengths(batch["tree"])
        if scored is not None:
            chosen = sum(sum(of_prompt[0::2]) for of_prompt in scored)
        else:  # waits for the device: a collator of the user's leaves tokens out
            chosen = (batch["tree"].branch_index % 2 == 0).sum()
        return super().count(batch) | {"chosen_tokens": float(chosen)}

    # Metrics

    def _record(self, policy: PairScores, ref: PairScores | None, scores: TokenScores, output: LossOutput) -> None:
        add = self.metrics.add
        chosen, rejected = implicit_rewards(policy, ref, beta=self.args.beta)
        add("rewards/chosen", chosen)
        add("rewards/rejected", rejected)
        add("rewards/accuracies", (chosen > rejected).float())
        add("rewards/margins", chosen - rejected)
        add("logps/chosen", policy.chosen_logps)
        add("logps/rejected", policy.rejected_logps)
        is_chosen = scores.branch_index % 2 == 0
        assert scores.entropy is not None and scores.mean_logits is not None and scores.is_top1 is not None
        add("entropy", scores.entropy)
        # weights instead of picked tokens: picking would wait for the device
        add("logits/chosen", scores.mean_logits, is_chosen)
        add("logits/rejected", scores.mean_logits, ~is_chosen)
        add("mean_token_accuracy", scores.is_top1, is_chosen)
        for name, values in output.metrics.items():
            add(name, values)

    def score_pairs(self, dataset: RawData) -> PairTable:
        """Scores of raw or prepared pairs under the policy as it is now; leaves no trace in training or metrics.

        All ranks call it; each scores its share of the rows.
        """

        def score(tree: PromptTree) -> Tensor:
            scores = token_scores(self.model, tree, layout=self.layout)
            return torch.cat([scores.branch_logps.view(-1, 2), scores.branch_lengths.view(-1, 2)], dim=1)

        return PairTable(*score_rows(self, dataset, score).T)

    # Data

    def prepare_dataset(self, dataset: RawData, split: str) -> tuple[RawData, DataReport]:
        prepared = prepare_preference(
            dataset,
            self.tokenizer,
            max_length=self.args.max_length,
            truncation_mode=self.args.truncation_mode,
            columns=self.column_map,
            num_proc=self.args.dataset_num_proc,
            eos_token_ids=self.eos_token_ids,
            keep_columns=self.extra_columns(dataset),
            processor=self.processor,
            name=split,
        )
        return prepared.dataset, prepared.report

    def default_collator(self) -> PreferenceCollator:
        return PreferenceCollator(self.processor)
