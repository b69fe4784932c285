"""Trainers that learn from a fixed dataset: one optimizer step over trees of token ids.

Losses are shares of the mean over the whole optimizer step, so that splitting rows into micro-batches, accumulation
steps or ranks cannot change the gradient.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, cast, final

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, reduce
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers.trainer_utils import EvalLoopOutput

from preftune.data.tree import split_by_tokens
from preftune.errors import ConfigError, DataFormatError
from preftune.models.distributed import size_of
from preftune.models.inputs import scoring_inputs
from preftune.models.logprobs import scoring
from preftune.models.stored import Stored
from preftune.trainers.base import BaseTrainer
from preftune.trainers.placing import placed
from preftune.trainers.shares import Batch, CountedRows, first_rows, own_rows, select_rows
from preftune.types import PromptTree

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepTotals:
    """What one optimizer step holds over all its micro-batches and ranks.

    Attributes:
        counts: Sums of `OfflineTrainer.count` ("rows", "tokens", ...), float64 scalars.
        statistics: What `OfflineTrainer.step_statistics` returned, or None.
    """

    counts: Mapping[str, Tensor]
    statistics: Any = None


class OfflineTrainer(BaseTrainer):
    """The step, shared by all offline algorithms. A family writes `batch_loss`, an algorithm `loss`."""

    loss_unit: ClassVar[str] = "rows"  # the count that the loss is a mean over

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if sharded and self.args.max_tokens_per_micro_batch is not None:
            raise ConfigError(
                "max_tokens_per_micro_batch deals a different number of micro-batches to each rank, which FSDP and "
                "DeepSpeed cannot run. Leave it out and use gradient_accumulation_steps."
            )
        self._step_batches: list[Batch] = []
        if isinstance(self.reference, Stored):
            self._fill_store(self.reference)

    def _fill_store(self, store: Stored) -> None:
        """Scores every row of train and eval sets once, then lets the model behind the numbers go."""
        evals = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        for split, rows in {"train": self.train_dataset, **evals}.items():
            if isinstance(rows, IterableDataset):
                raise ConfigError(
                    f"precompute_ref_log_probs=True needs rows that can be read twice, but the {split} set is an "
                    "IterableDataset (streaming). Load it without streaming, or set precompute_ref_log_probs=False."
                )
        size = self.args.precompute_ref_batch_size or self.args.per_device_train_batch_size
        with placed(self), scoring(self.model, self.layout), self.accelerator.autocast():
            for rows in [self.train_dataset, *evals.values()]:
                if rows is not None:
                    store.fill(
                        self._trees(rows, size),
                        self.model,
                        layout=self.layout,
                        ld_alpha=self.args.ld_alpha,
                        precision=self.accelerator.mixed_precision,
                    )
        store.release()

    def _trees(self, rows: Dataset, size: int) -> Iterator[PromptTree]:
        """This rank's share of the rows as trees of `size` rows; every rank yields as many."""
        rank, world = self.args.process_index, self.args.world_size
        for start in range(0, len(rows), size * world):
            mine = [min(start + rank * size + i, len(rows) - 1) for i in range(size)]
            mine = [i for n, i in enumerate(mine) if n == 0 or i != mine[n - 1]]
            yield self.data_collator([rows[i] for i in mine])["tree"].to(self.args.device)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        dataset = CountedRows(dataset) if isinstance(dataset, IterableDataset) else dataset
        return super()._get_dataloader(dataset, *args, **kwargs)

    # What a family provides

    @abstractmethod
    def batch_loss(self, model: nn.Module, batch: Batch, totals: StepTotals) -> Tensor:
        """This batch's share of the step's mean loss (a sum over its rows, divided by a total), with gradient."""

    def count(self, batch: Batch) -> dict[str, float]:
        """What of this batch goes into denominators; sums over the step come back as `totals.counts`."""
        tree: PromptTree = batch["tree"]
        sequence_tokens = sum(prompt * len(branches) + sum(branches) for prompt, branches in tree.layout)
        return {
            "rows": float(tree.num_prompts),
            "tokens": float(tree.target_index.shape[0]),
            "sequence_tokens": float(sequence_tokens),
        }

    def step_statistics(self, model: nn.Module, batches: list[Batch], totals: StepTotals) -> Any:
        """Statistics over all rows of the step that a row's loss needs, computed without gradient; None by default."""
        return None

    # The step

    @final
    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        size = self._train_batch_size
        batches = [self._own(b, size, i) for i, b in enumerate(islice(epoch_iterator, num_batches))]
        if 0 < len(batches) < num_batches:  # of a stream; else what is left of an epoch is asked for, and is a step
            left_out = f"{len(batches)} of {num_batches} micro-batches"
            logger.warning("the stream ended within a step: its last %s are left out", left_out)
            batches = []
        self._step_batches = batches
        self._step_totals: StepTotals | None = None
        return batches, None

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """Where to go on: passes over the data, and micro-batches of the next one to skip."""
        passes, skipped = super()._init_training_state(max_steps, *args)
        if (
            isinstance(self.train_dataset, IterableDataset)
            and self.state.global_step
            and not self.args.ignore_data_skip
        ):
            # transformers takes a stream for one that never ends
            passes = int(self.state.epoch or 0)
            share = (self.state.epoch or 0) - passes
            skipped = round(share * max_steps * self.args.gradient_accumulation_steps)
        return passes, skipped

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

    @final
    def totals_of(self, batches: list[Batch], over_ranks: bool = True) -> StepTotals:
        """Counts over some batches, and over all ranks where asked (one collective)."""
        counts = [(self.count(b), not b["repeated"]) for b in batches]
        names = sorted(counts[0][0])
        sums = torch.tensor([sum(c[n] for c, own in counts if own) for n in names], dtype=torch.float64)
        if over_ranks and self.accelerator.num_processes > 1:
            sums = cast(Tensor, reduce(sums.to(self.args.device), "sum"))
        return StepTotals(dict(zip(names, sums.to(self.args.device).unbind(), strict=True)))

    @final
    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one accumulation step, in micro-batches of at most `max_tokens_per_micro_batch`."""
        model.train()
        if isinstance(self.optimizer, AcceleratedOptimizer):
            self.optimizer.train()  # schedule-free optimizers switch weights
        if self._step_totals is None:
            totals = self.totals_of(self._step_batches)
            with self.activation_context(), self.accelerator.autocast():
                statistics = self.step_statistics(model, self._step_batches, totals)
            self._step_totals = StepTotals(totals.counts, statistics)
            self.tokens_seen += totals.counts["sequence_tokens"]
        groups = split_by_tokens(inputs["tree"], self.args.max_tokens_per_micro_batch)
        loss = torch.zeros((), device=self.args.device)
        with scoring(model, self.layout), self.activation_context():
            for i, group in enumerate(groups):
                part = inputs if len(groups) == 1 else select_rows(inputs, group)
                if i + 1 < len(groups):
                    with self.accelerator.no_sync(model):
                        loss += self._forward_backward(model, part)
                else:
                    loss += self._forward_backward(model, part)
        return loss

    def _forward_backward(self, model: nn.Module, batch: Batch) -> Tensor:
        assert self._step_totals is not None
        with self.accelerator.autocast():
            # ranks average their gradients; shares of a sum must be multiplied back
            loss = self._share(model, batch, self._step_totals) * self.accelerator.num_processes
        kwargs = {"scale_wrt_gas": False} if self.accelerator.distributed_type == DistributedType.DEEPSPEED else {}
        self.accelerator.backward(loss, **kwargs)
        return loss.detach().float()

    def _share(self, model: nn.Module, batch: Batch, totals: StepTotals) -> Tensor:
        if not batch["repeated"]:
            return self.batch_loss(model, batch, totals)
        with self.metrics.paused():
            return self.batch_loss(model, batch, StepTotals(totals.counts)) * 0.0

    @final
    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses: the loss of a batch is `batch_loss`, which knows the totals of the optimizer step."""
        raise TypeError("call batch_loss(model, batch, totals); override loss or batch_loss, not compute_loss")

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm; a step whose gradient is not finite stops the run before it spoils the weights."""
        norm: Any = super()._get_grad_norm(model, grad_norm)
        if norm is None or self.accelerator.scaler is not None or math.isfinite(float(norm)):
            return norm
        stepped = self.accelerator.distributed_type == DistributedType.DEEPSPEED  # inside its backward
        written = "DeepSpeed has already used it; go on from a checkpoint" if stepped else "The weights are as before"
        raise FloatingPointError(
            f"the gradient norm of step {self.state.global_step + 1} is {float(norm)}: the loss or a gradient is not "
            f"finite. {written}. Look at the rows of this step, lower learning_rate, or set max_grad_norm."
        )

    def floating_point_ops(self, inputs: Batch) -> int:
        """6 x parameters x tokens really forwarded (a shared prompt once)."""
        return 6 * inputs["tree"].num_tokens * self._num_parameters

    @functools.cached_property
    def _num_parameters(self) -> int:
        return sum(size_of(p) for p in self.model.parameters())

    def activation_context(self) -> AbstractContextManager:
        """Keeps saved activations in host memory where `activation_offloading` asks for it."""
        if not self.args.activation_offloading:
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.args.device.type == "cuda")

    # Evaluation

    @final
    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, Tensor | None, Tensor | None]:
        """Adds the batch to the eval metrics. Rows that a distributed sampler repeats to fill up are left out."""
        batch = self._own(inputs, self.args.eval_batch_size)
        counted = self.eval_metrics.paused() if batch["repeated"] else nullcontext()
        with torch.no_grad(), scoring(model, self.layout), self.accelerator.autocast(), counted:
            totals = self.totals_of([batch], over_ranks=False)
            statistics = self.step_statistics(model, [batch], totals)
            loss = self.batch_loss(model, batch, StepTotals(totals.counts, statistics))
            self.eval_metrics.add("loss", loss, totals.counts[self.loss_unit])
        if prediction_loss_only:
            return None, None, None
        logits, labels = self.plain_logits(model, batch["tree"])
        return (None, logits[:0], labels[:0]) if batch["repeated"] else (None, logits, labels)

    @torch.no_grad()
    def plain_logits(self, model: nn.Module, tree: PromptTree) -> tuple[Tensor, Tensor]:
        """Logits `[B, L, V]` and labels `[B, L]` (-100: not scored) of padded rows, for `compute_metrics` alone."""
        inputs = scoring_inputs(tree, "padded")
        with self.accelerator.autocast():
            logits = model(**inputs.keywords).logits
        labels = torch.full_like(inputs.keywords["input_ids"], -100)
        labels[inputs.rows, inputs.columns + 1] = tree.target_ids
        return logits.float(), labels

    def _gather_rows(self, values: Tensor) -> Tensor:
        """Rows of all ranks, which may have unlike numbers of them."""
        counts: Any = self.accelerator.gather(torch.tensor([len(values)], device=values.device))
        padded: Any = self.accelerator.pad_across_processes(values, dim=0)
        whole: Any = self.accelerator.gather(padded)
        parts = whole.split(len(padded))
        return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """HF's loop, with our metrics in the result, so that `metric_for_best_model` finds them."""
        self.eval_metrics.clear()
        self.gather_function = self._gather_rows
        with placed(self):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        assert output.metrics is not None
        output.metrics.update(self.eval_metrics.reduce(f"{metric_key_prefix}_"))
        output.metrics[f"{metric_key_prefix}_num_tokens"] = float(self.tokens_seen)
        return output
