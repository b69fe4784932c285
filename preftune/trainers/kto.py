"""Kahneman-Tversky Optimization (arXiv:2402.01306): single completions, labelled good or bad, against a reference.

The algorithm is `loss`; its baseline is a mean over all rows of the optimizer step, taken where no gradient flows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from accelerate.utils import reduce
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from preftune.configs.kto import KTOConfig
from preftune.data.collate import UNPAIRED_COLUMNS, UnpairedCollator
from preftune.data.mismatched import MismatchedRows, MismatchedSampler, MismatchedStream, require_two_prompts
from preftune.data.multimodal import IMAGE_COLUMNS
from preftune.data.report import DataReport
from preftune.data.tree import select_branch
from preftune.data.unpaired import LABEL, prepare_unpaired
from preftune.errors import DataFormatError
from preftune.losses.names import NEEDS_BASELINE
from preftune.losses.unpaired import UNPAIRED_LOSSES, class_weights, imbalance, kl_baseline
from preftune.models.logprobs import token_scores
from preftune.trainers.base import EvalData, RawData
from preftune.trainers.labels import LabelTable
from preftune.trainers.offline import OfflineTrainer
from preftune.trainers.pairs import score_rows
from preftune.trainers.shares import Batch, CountedRows
from preftune.trainers.step import StepTotals
from preftune.trainers.unpaired import Baseline, EvaluatedRows, RowScores, first_branches, labels_of
from preftune.types import LossOutput, PromptTree, TokenScores

logger = logging.getLogger(__name__)

_OUTPUTS = frozenset({"entropy", "mean_logits"})


class KTOTrainer(OfflineTrainer):
    """Trains a policy on completions that are each labelled desirable or undesirable.

    Args:
        model: Name or folder of a causal language model, a model, or a PeftModel.
        ref_model: The frozen reference; by default the policy as it is at construction (its base model under a fresh
            adapter, its starting adapter for a PeftModel).
        args: A `KTOConfig`; by default `KTOConfig("{model}-KTO")`.
        train_dataset: Rows with `prompt, completion, label` (text or messages) or `messages, label`; preference pairs
            become two rows each. Rows of ids (`prompt_ids, completion_ids, label`) are taken as they are.
        eval_dataset: The same, or a dict of such sets.

    The first loss is 1/2 with weights of 1, whatever the labels and the form of the reference.
    """

    args: KTOConfig
    config_class = KTOConfig
    name = "KTO"
    needs_reference = True
    columns_read: ClassVar[tuple[str, ...]] = (*UNPAIRED_COLUMNS, LABEL, *IMAGE_COLUMNS)

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: nn.Module | str | None = None,
        args: KTOConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: RawData | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
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
        for metrics in (self.train_metrics, self.eval_metrics):
            metrics.differences["rewards/margins"] = ("rewards/chosen", "rewards/rejected")
        self._evaluated = EvaluatedRows()
        self._warn_of_imbalance()

    # The algorithm

    def loss(self, logps_B: Tensor, ref_logps_B: Tensor, is_desirable_B: Tensor, kl: Tensor) -> LossOutput:
        """The loss of each row, with the weight of its class. Override it for a loss of your own."""
        loss = UNPAIRED_LOSSES[self.args.loss_type]
        output = loss(logps_B, ref_logps_B, is_desirable_B, kl, beta=self.args.beta)
        desirable, undesirable = self.args.desirable_weight, self.args.undesirable_weight
        weights_B = class_weights(is_desirable_B, desirable_weight=desirable, undesirable_weight=undesirable)
        return replace(output, loss=output.loss * weights_B)

    @property
    def needs_baseline(self) -> bool:
        """Whether `loss` reads `kl`; if not, there are no mismatched completions and it is 0."""
        return self.args.loss_type in NEEDS_BASELINE

    # From a batch to its scores

    def batch_loss(self, model: nn.Module, batch: Batch, totals: StepTotals) -> Tensor:
        is_desirable_B, rows = batch[LABEL], totals.counts["rows"].float()
        scores = self._score(model, batch, totals.statistics)
        output = self.loss(scores.completions.branch_logps, scores.ref_logps_B, is_desirable_B, scores.kl)
        self._record(scores, is_desirable_B, output, is_own=not batch["repeated"])
        share = output.loss.sum() / rows
        aux_loss = scores.completions.aux_loss
        if aux_loss is not None and self.aux_loss_coef:
            share = share + self.aux_loss_coef * aux_loss * (len(is_desirable_B) / rows)
            self.metrics.add("aux_loss", aux_loss)
        return share

    def step_statistics(self, model: nn.Module, batches: list[Batch], totals: StepTotals) -> Baseline | None:
        """The baseline over all rows of the step, where its rows are spread over several forwards or ranks."""
        if not (self.needs_baseline and self.model.training) or self.is_one_forward(batches):
            return None
        total, ref_logps = totals.counts["rows"].new_zeros(()), []
        with torch.no_grad():
            for batch in batches:
                ref_logps_B = torch.zeros(batch["tree"].num_prompts, device=self.args.device)
                for part in self.micro_batches(batch):
                    ref_2B = self._reference_logps(model, part["tree"])
                    ref_logps_B[part["row"]] = ref_2B[0::2]
                    strays = (self._stray_logps(model, part["tree"]) - ref_2B[1::2]).double().sum()
                    total += strays * (not batch["repeated"])  # a forward that all ranks take
                ref_logps.append(ref_logps_B)
        if self.accelerator.num_processes > 1:
            total = cast(Tensor, reduce(total, "sum"))
        return Baseline(kl_baseline(total, totals.counts["rows"]), ref_logps)

    def _score(self, model: nn.Module, batch: Batch, baseline: Baseline | None) -> RowScores:
        tree: PromptTree = batch["tree"]
        zero = torch.zeros((), device=self.args.device)
        if baseline is not None:
            ref_logps_B = baseline.ref_logps[batch["micro_batch"]][batch["row"]]
            return RowScores(self._completion_scores(model, tree), ref_logps_B, baseline.kl)
        if batch["repeated"] and self.needs_baseline and self.model.training:
            # its reference was scored with the baseline, as on the other ranks, and counts for nothing
            completions = self._completion_scores(model, tree)
            return RowScores(completions, completions.branch_logps.detach(), zero)
        ref_logps = self._reference_logps(model, tree)
        if not self.needs_baseline:
            return RowScores(self._completion_scores(model, tree), ref_logps, zero)
        if self._fits_one_forward(tree):
            both = token_scores(model, tree, layout=self.layout, outputs=_OUTPUTS)
            completions, stray_B = first_branches(both), both.branch_logps.detach()[1::2]
        else:
            stray_B = self._stray_logps(model, tree)
            completions = self._completion_scores(model, tree)
        stray_B = stray_B - ref_logps[1::2]
        return RowScores(completions, ref_logps[0::2], kl_baseline(stray_B.double().sum(), len(stray_B)), stray_B)

    def _fits_one_forward(self, tree: PromptTree) -> bool:
        """Whether one pass over prompts and both completions costs less than one for each.

        With gradients, mismatched tokens in the pass cost a backward for nothing, prompts outside it a second forward.
        """
        if self.aux_loss_coef:
            return False  # the router is balanced over the rows' own completions
        prompts, strays = (sum(n) for n in zip(*((n, branches[1]) for n, branches in tree.layout)))
        return not torch.is_grad_enabled() or prompts > 2 * strays

    def _reference_logps(self, model: nn.Module, tree: PromptTree) -> Tensor:
        assert self.reference is not None
        return self.reference.branch_logps(model, tree, layout=self.layout)

    def _completion_scores(self, model: nn.Module, tree: PromptTree) -> TokenScores:
        own = select_branch(tree, 0) if self.needs_baseline else tree
        return token_scores(model, own, layout=self.layout, outputs=_OUTPUTS)

    @torch.no_grad()
    def _stray_logps(self, model: nn.Module, tree: PromptTree) -> Tensor:
        return token_scores(model, select_branch(tree, 1), layout=self.layout).branch_logps

    def count(self, batch: Batch) -> dict[str, float]:
        layout = batch["tree"].layout  # mismatched completions are nobody's tokens
        return {"rows": float(len(layout)), "sequence_tokens": float(sum(n + branches[0] for n, branches in layout))}

    # Metrics

    def _record(self, scores: RowScores, is_desirable_B: Tensor, output: LossOutput, is_own: bool) -> None:
        add, completions = self.metrics.add, scores.completions
        logps_B = completions.branch_logps.detach()
        rewards_B = self.args.beta * (logps_B - scores.ref_logps_B)
        is_desirable_T = is_desirable_B[completions.branch_index]
        assert completions.entropy is not None and completions.mean_logits is not None
        add("entropy", completions.entropy)
        sides = {"chosen": (is_desirable_B, is_desirable_T), "rejected": (~is_desirable_B, ~is_desirable_T)}
        for side, (of_B, of_T) in sides.items():
            # weights instead of picked rows: no wait for the device, and a side without rows is left out
            add(f"rewards/{side}", rewards_B, of_B)
            add(f"logps/{side}", logps_B, of_B)
            add(f"logits/{side}", completions.mean_logits, of_T)
        add("rewards/accuracies", torch.where(is_desirable_B, rewards_B > 0, rewards_B < 0).float())
        if self.model.training or scores.stray_B is None:
            add("kl", scores.kl.expand(len(logps_B)))
        else:
            add("kl", scores.stray_B)  # a mean over the whole set, see `evaluation_loop`
            if is_own:
                self._evaluated.add(scores, is_desirable_B, output.loss)
        for name, values in output.metrics.items():
            add(name, values)

    def begin_evaluation(self) -> None:
        self._evaluated = EvaluatedRows()

    def loss_across_batches(self) -> float:
        return self._evaluated.loss_across_batches(self.loss)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        assert output.metrics is not None
        if output.metrics[f"{metric_key_prefix}_kl"] < 0:
            output.metrics[f"{metric_key_prefix}_kl"] = 0.0
        return output

    def plain_logits(self, model: nn.Module, tree: PromptTree) -> tuple[Tensor, Tensor, Tensor]:
        return super().plain_logits(model, select_branch(tree, 0) if self.needs_baseline else tree)

    def score_rows(self, dataset: RawData) -> LabelTable:
        """Implicit rewards of raw or prepared rows under the policy as it is now; leaves no trace in training.

        All ranks call it; each scores its share of the rows.
        """
        rows = self._prepare_split(dataset, "scored")
        rows = rows if isinstance(rows, Dataset) else Dataset.from_list(list(rows))

        def score(tree: PromptTree) -> Tensor:
            own = token_scores(self.model, tree, layout=self.layout).branch_logps
            return self.args.beta * (own - self._reference_logps(self.model, tree))[:, None]

        return LabelTable(score_rows(self, rows, score)[:, 0], labels_of(rows))

    # Data

    def prepare_dataset(self, dataset: RawData, split: str) -> tuple[RawData, DataReport]:
        prepared = prepare_unpaired(
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
        if self.needs_baseline and isinstance(prepared.dataset, Dataset):
            require_two_prompts(prepared.dataset, split)
        return prepared.dataset, prepared.report

    def default_collator(self) -> UnpairedCollator:
        return UnpairedCollator(self.args.max_length, self.processor)

    def _get_dataloader(
        self, dataset: Any, *args: Any, sampler_fn: Callable | None = None, is_training: bool = False, **kwargs: Any
    ) -> Any:
        if self.needs_baseline and isinstance(dataset, IterableDataset):
            dataset = CountedRows(cast(Any, MismatchedStream(dataset, "train" if is_training else "eval")))
        elif self.needs_baseline:
            dataset = MismatchedRows(dataset)
            # stored log-probabilities are of the pairs that the set's own order makes, in every epoch
            if is_training and self.args.train_sampling_strategy == "random" and not self.stores_reference:
                seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
                sampler_fn = functools.partial(MismatchedSampler, seed=seed)
        return super()._get_dataloader(dataset, *args, sampler_fn=sampler_fn, is_training=is_training, **kwargs)

    def _trees(self, rows: Dataset, size: int) -> Iterator[PromptTree]:
        return super()._trees(cast(Dataset, MismatchedRows(rows)) if self.needs_baseline else rows, size)

    def _checked(self, batch: Any) -> Batch:
        batch = super()._checked(batch)
        tree: PromptTree = batch["tree"]
        wanted = 2 if self.needs_baseline else 1
        if tree.num_branches != tree.num_prompts * wanted or LABEL not in batch:
            raise DataFormatError(
                f"the data collator returned {tree.num_branches} branches for {tree.num_prompts} rows, and "
                f"{sorted(batch)}; loss_type={self.args.loss_type!r} needs 'label' and {wanted} a row (its completion"
                f"{', then that of another prompt' if wanted == 2 else ''}). Leave data_collator out, or build on "
                "preftune.data.collate.UnpairedCollator."
            )
        return batch

    def _warn_of_imbalance(self) -> None:
        if not isinstance(self.train_dataset, Dataset) or not self.is_world_process_zero():
            return
        desirable = int(labels_of(self.train_dataset).sum())
        weights = {"desirable_weight": self.args.desirable_weight, "undesirable_weight": self.args.undesirable_weight}
        warning = imbalance(desirable, len(self.train_dataset) - desirable, **weights)
        if warning is not None:
            logger.warning("train_dataset has %s", warning)
