"""Trainers that learn from a fixed dataset: which rows are in a step, stored references, evaluation.

Every row of the data counts once, also where the last batch of a pass is filled up for the ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any, ClassVar, final

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers.trainer_utils import PredictionOutput

from preftune.data.tree import split_by_tokens
from preftune.errors import DataFormatError
from preftune.models.inputs import scoring_inputs
from preftune.models.load import read_chat_template, tokenizer_of, with_tokens
from preftune.models.logprobs import scoring
from preftune.models.stored import Stored
from preftune.trainers.evaluation import untraced
from preftune.trainers.placing import placed
from preftune.trainers.shares import Batch, CountedRows, first_rows, own_rows, select_rows
from preftune.trainers.step import StepTotals, StepTrainer
from preftune.types import PromptTree

logger = logging.getLogger(__name__)


class OfflineTrainer(StepTrainer):
    """Batches of fixed rows, shared by all offline algorithms. A family writes `batch_loss`, an algorithm `loss`."""

    needs_padding_token: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.reference, Stored):
            self._fill_store(self.reference)

    def _fill_store(self, store: Stored) -> None:
        """Scores every row of train and eval sets once, then lets the model behind the numbers go.

        Rows of a stream are scored when they come; the reference is kept for that.
        """
        known = [rows for rows in self.held_sets if isinstance(rows, Dataset)]
        self._store_rows(store, known)
        if len(known) < len(self.held_sets):
            store.expect_streams()
        else:
            store.release()

    def _store_rows(self, store: Stored, sets: list[Dataset]) -> None:
        size = self.args.precompute_ref_batch_size or self.args.per_device_train_batch_size
        with placed(self), scoring(self.model, self.layout), self.accelerator.autocast():
            store.fill(
                chain.from_iterable(self._trees(rows, size) for rows in sets),
                self.model,
                layout=self.layout,
                ld_alpha=vars(self.args).get("ld_alpha"),
                precision=self.accelerator.mixed_precision,
            )

    def _store_arrivals(self, rows: Any) -> None:
        """Rows that the constructor did not have: scored now, or an error before any of them is evaluated."""
        if not isinstance(self.reference, Stored):
            return
        if isinstance(rows, IterableDataset):
            self.reference.expect_streams()
        elif isinstance(rows, Dataset):
            self._store_rows(self.reference, [rows])

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        self._store_arrivals(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        self._store_arrivals(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _trees(self, rows: Dataset, size: int) -> Iterator[PromptTree]:
        """This rank's share of the rows as trees of `size` rows; every rank yields as many."""
        rank, world = self.args.process_index, self.args.world_size
        for start in range(0, len(rows), size * world):
            mine = [min(start + rank * size + i, len(rows) - 1) for i in range(size)]
            mine = [i for n, i in enumerate(mine) if n == 0 or i != mine[n - 1]]
            yield self.data_collator([rows[i] for i in mine])["tree"].to(self.args.device)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        dataset = CountedRows(dataset) if isinstance(dataset, IterableDataset) else dataset
        asked = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = asked and kwargs.get("is_training", False)  # no row escapes evaluation
        try:
            return super()._get_dataloader(dataset, *args, **kwargs)
        finally:
            self.args.dataloader_drop_last = asked

    @property
    def stores_reference(self) -> bool:
        return self.needs_reference and self.args.precompute_ref_log_probs

    def adapt_processing_class(self, processing_class: Any) -> Any:
        """With the config's `pad_token`, and where it has them `eos_token` and chat template: used, and saved."""
        options = vars(self.args)
        return with_tokens(
            processing_class,
            pad_token=self.args.pad_token,
            eos_token=options.get("eos_token"),
            chat_template=read_chat_template(options.get("chat_template_path"), tokenizer_of(processing_class)),
            pads=self.needs_padding_token,
        )

    # Batches

    def count(self, batch: Batch) -> dict[str, float]:
        """What of this batch goes into denominators; sums over the step come back as `totals.counts`."""
        tree: PromptTree = batch["tree"]
        sequence_tokens = sum(prompt * len(branches) + sum(branches) for prompt, branches in tree.layout)
        return {
            "rows": float(tree.num_prompts),
            "tokens": float(tree.target_index.shape[0]),
            "sequence_tokens": float(sequence_tokens),
        }

    def forwarded_tokens(self, batch: Batch) -> int:
        return batch["tree"].num_tokens

    def micro_batches(self, batch: Batch) -> list[Batch]:
        tree: PromptTree = batch["tree"]
        longest = max(prompt + sum(branches) for prompt, branches in tree.layout)
        groups = split_by_tokens(tree, self.token_budget(longest))
        return [batch] if len(groups) == 1 else [select_rows(batch, group) for group in groups]

    @final
    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        size = self._train_batch_size
        batches = [self._own(b, size, i) for i, b in enumerate(islice(epoch_iterator, num_batches))]
        return self.begin_step(batches, num_batches), None

    def _own(self, batch: Any, batch_size: int, micro_batch: int = 0) -> Batch:
        """The rows of the batch that count, with their place in the step.

        By "micro_batch" and "row" a part of the batch finds its rows in `totals.statistics`. A rank that has only
        repeated rows keeps one, so that it takes part in the step; "repeated" says that it counts nothing.
        """
        batch = self._checked(batch)
        rows = len(batch["row_lengths"]) if "row_lengths" in batch else batch["tree"].num_prompts
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        own = own_rows(rows, batch_size, self.accelerator.gradient_state, rank, world)
        if own < rows:
            batch = first_rows(batch, max(own, 1))
        index = torch.arange(batch["tree"].num_prompts, device=batch["tree"].input_ids.device)
        return batch | {"micro_batch": micro_batch, "row": index, "repeated": own == 0}

    def _checked(self, batch: Any) -> Batch:
        if not isinstance(batch, dict) or not isinstance(batch.get("tree"), PromptTree):
            raise DataFormatError(
                f"the data collator returned a {type(batch).__name__} without a PromptTree under 'tree'. Build it with "
                "preftune.data.tree.build_tree(prompts, branches), or leave data_collator out."
            )
        return batch

    # Evaluation

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Logits (after `preprocess_logits_for_metrics`), labels and metrics of raw or prepared rows; leaves no trace.

        Raises:
            TypeError: not a single dataset.
        """
        if not isinstance(test_dataset, Dataset | IterableDataset):
            raise TypeError(
                f"predict got a {type(test_dataset).__name__}; wanted a datasets.Dataset or IterableDataset. Of a dict "
                "of sets, pass one after the other."
            )
        with untraced(self):
            rows = self._prepare_split(test_dataset, metric_key_prefix)
            return super().predict(rows, ignore_keys, metric_key_prefix)

    @final
    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Adds the batch to the eval metrics. Rows that a distributed sampler repeats to fill up are left out."""
        batch = self._own(inputs, self.args.eval_batch_size)
        counted = self.eval_metrics.paused() if batch["repeated"] else nullcontext()
        with torch.no_grad(), scoring(model, self.layout), self.accelerator.autocast(), counted:
            totals = self.totals_of([batch], over_ranks=False)
            statistics = self.step_statistics(model, [batch], totals)
            loss = self.batch_loss(model, batch, StepTotals(totals.counts, statistics))
            self.eval_metrics.add("loss", loss, totals.counts[self.loss_unit])
        wanted = self.args.include_for_metrics
        loss = loss if "loss" in wanted else None
        if prediction_loss_only and "inputs" not in wanted:
            return loss, None, None
        logits, labels, inputs["input_ids"] = self.plain_logits(model, batch["tree"])  # HF looks for them there
        own = slice(0 if batch["repeated"] else None)
        inputs["input_ids"] = inputs["input_ids"][own]
        return (loss, None, None) if prediction_loss_only else (loss, logits[own], labels[own])

    @torch.no_grad()
    def plain_logits(self, model: nn.Module, tree: PromptTree) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `[B, L, V]`, labels and ids `[B, L]` (-100: not scored; no token) of padded rows, for
        `compute_metrics` alone."""
        inputs = scoring_inputs(tree, "padded")
        ids = inputs.keywords["input_ids"]
        with self.accelerator.autocast():
            logits = model(**inputs.keywords).logits[:, -ids.shape[1] :]  # prompt learning puts tokens before them
        labels = torch.full_like(ids, -100)
        labels[inputs.rows, inputs.columns + 1] = tree.target_ids
        return logits.float(), labels, ids.masked_fill(inputs.keywords["attention_mask"] == 0, -100)
