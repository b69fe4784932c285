"""One optimizer step over trees of token ids, whatever the rows came from: totals, forward, backward, the finite check.

Losses are shares of the mean over the whole optimizer step, so that splitting rows into micro-batches, accumulation
steps or ranks cannot change the gradient.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, reduce
from datasets import IterableDataset
from torch import Tensor, nn
from transformers.trainer_utils import EvalLoopOutput

from preftune.errors import ConfigError
from preftune.models.distributed import size_of
from preftune.models.logprobs import scoring
from preftune.models.offload import offloading
from preftune.trainers.base import BaseTrainer
from preftune.trainers.evaluation import check_evaluated
from preftune.trainers.placing import placed
from preftune.trainers.shares import Batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepTotals:
    """What one optimizer step holds over all its micro-batches and ranks.

    Attributes:
        counts: Sums of `StepTrainer.count` ("rows", "tokens", ...), float64 scalars.
        statistics: What `StepTrainer.step_statistics` returned, or None.
    """

    counts: Mapping[str, Tensor]
    statistics: Any = None


# On a CPU smaller pieces take hardly more time (0 to 9 %), and only one piece's activations stand in memory.
_CPU_TOKENS = 1024


class StepTrainer(BaseTrainer):
    """The step that all trainers share: a family says what its batches hold, an algorithm what their loss is."""

    loss_unit: ClassVar[str] = "rows"  # the count that the loss is a mean over

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        self._has_small_pieces = self.args.device.type == "cpu" and not sharded
        if sharded and self.args.max_tokens_per_micro_batch is not None:
            raise ConfigError(
                "max_tokens_per_micro_batch deals a different number of micro-batches to each rank, which FSDP and "
                "DeepSpeed cannot run. Leave it out and use gradient_accumulation_steps."
            )
        self._step_batches: list[Batch] = []
        self._step_totals: StepTotals | None = None

    # What a family provides

    @abstractmethod
    def batch_loss(self, model: nn.Module, batch: Batch, totals: StepTotals) -> Tensor:
        """This batch's share of the step's mean loss (a sum over its rows, divided by a total), with gradient."""

    @abstractmethod
    def count(self, batch: Batch) -> dict[str, float]:
        """What of this batch goes into denominators, "rows" and "sequence_tokens" among it.

        Sums over the step come back as `totals.counts`.
        """

    @abstractmethod
    def micro_batches(self, batch: Batch) -> list[Batch]:
        """The batch of one accumulation step, cut into parts within the `token_budget`."""

    @abstractmethod
    def forwarded_tokens(self, batch: Batch) -> int:
        """Tokens that the model really sees of a batch; a shared prompt counts once."""

    def step_statistics(self, model: nn.Module, batches: list[Batch], totals: StepTotals) -> Any:
        """Statistics over all rows of the step that a row's loss needs, computed without gradient; None by default."""
        return None

    # The step

    @final
    def token_budget(self, largest: int) -> int | None:
        """Most tokens of a micro-batch, `largest` being those of the longest prompt with its completions; None: any."""
        if self.args.max_tokens_per_micro_batch is not None or not self._has_small_pieces:
            return self.args.max_tokens_per_micro_batch
        return max(_CPU_TOKENS, largest)

    @final
    def is_one_forward(self, batches: list[Batch]) -> bool:
        """Whether all rows of the step, of all ranks, meet in one forward."""
        return self.accelerator.num_processes == 1 and len(batches) == 1 and len(self.micro_batches(batches[0])) == 1

    @final
    def begin_step(self, batches: list[Batch], wanted: int) -> list[Batch]:
        """Takes note of the batches of an optimizer step; those of one that a stream does not fill are left out."""
        if 0 < len(batches) < wanted:  # of a stream; else what is left of an epoch is asked for, and is a step
            left_out = f"{len(batches)} of {wanted} micro-batches"
            logger.warning("the stream ended within a step: its last %s are left out", left_out)
            batches = []
        self._step_batches = batches
        self._step_totals = None
        return batches

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
        """Forward and backward of one accumulation step, in micro-batches within the `token_budget`."""
        model.train()
        if isinstance(self.optimizer, AcceleratedOptimizer):
            self.optimizer.train()  # schedule-free optimizers switch weights
        if self._step_totals is None:
            totals = self.totals_of(self._step_batches)
            with self.activation_context(), self.accelerator.autocast():
                statistics = self.step_statistics(model, self._step_batches, totals)
            self._step_totals = StepTotals(totals.counts, statistics)
            self.tokens_seen += totals.counts["sequence_tokens"]
        parts = self.micro_batches(inputs)
        loss = torch.zeros((), device=self.args.device)
        with scoring(model, self.layout), self.activation_context():
            for i, part in enumerate(parts):
                if i + 1 < len(parts):
                    with self.accelerator.no_sync(model):
                        loss += self._forward_backward(model, part)
                else:
                    loss += self._forward_backward(model, part)
        return loss

    def _forward_backward(self, model: nn.Module, batch: Batch) -> Tensor:
        assert self._step_totals is not None
        if not batch.get("learns", True):  # its gradient is exactly 0: only looked at
            with torch.no_grad(), self.accelerator.autocast():
                loss = self._share(model, batch, self._step_totals) * self.accelerator.num_processes
            return loss.float()
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
        return 6 * self.forwarded_tokens(inputs) * self._num_parameters

    @functools.cached_property
    def _num_parameters(self) -> int:
        return sum(size_of(p) for p in self.model.parameters())

    def activation_context(self) -> AbstractContextManager:
        """Keeps saved activations in host memory where `activation_offloading` asks for it."""
        if not self.args.activation_offloading:
            return nullcontext()
        return offloading(self.model)

    # Evaluation

    def begin_evaluation(self) -> None:
        """Called before the first batch of an eval set."""

    def loss_across_batches(self) -> float:
        """What the loss of all evaluated rows as one batch is above the mean over their batches (all ranks call it).

        0 where the loss of a row does not depend on the rows beside it.
        """
        return 0.0

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """HF's loop, with our metrics in the result, so that `metric_for_best_model` finds them."""
        self.eval_metrics.clear()
        self.begin_evaluation()
        self.gather_function = self.gathered_rows
        with placed(self):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        assert output.metrics is not None
        metrics = self.eval_metrics.reduce(f"{metric_key_prefix}_")
        check_evaluated(metrics, metric_key_prefix)
        metrics[f"{metric_key_prefix}_loss"] += self.loss_across_batches()
        output.metrics.update(metrics)
        output.metrics[f"{metric_key_prefix}_num_tokens"] = float(self.tokens_seen)
        return output

    def gathered_rows(self, values: Tensor) -> Tensor:
        """Rows of all ranks, which may have unlike numbers of them."""
        counts: Any = self.accelerator.gather(torch.tensor([len(values)], device=values.device))
        padded: Any = self.accelerator.pad_across_processes(values, dim=0)
        whole: Any = self.accelerator.gather(padded)
        parts = whole.split(len(padded))
        return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])
