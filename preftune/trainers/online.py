"""Trainers that learn from what the policy says itself: a policy-gradient loss on the completions of a round.

A leaf writes `advantages` and `loss`. Prompts are computed once for all their completions, when drawn and when learned.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import PredictionOutput

from preftune.callbacks.round_completions import show_completions
from preftune.data.rounds import eval_loader
from preftune.models.logprobs import scoring
from preftune.trainers.evaluation import untraced
from preftune.trainers.groups import Group
from preftune.trainers.learning import learning_parts, policy_tokens, record_tokens, stand_in, with_tokens
from preftune.trainers.round_trainer import RoundTrainer
from preftune.trainers.rounds import seed_of
from preftune.trainers.shares import Batch
from preftune.trainers.step import StepTotals
from preftune.types import LossOutput, PolicyTokens, TokenScores

EVALUATION = 0xE7A1
"""First part of the keys of evaluation's random streams, which have two parts; those of training have four."""


class OnlineTrainer(RoundTrainer):
    """The step on a round, shared by all online algorithms. An algorithm writes `advantages` and `loss`.

    Losses are per token or per completion; `reduce` says what they are a mean over.
    """

    # The algorithm

    @abstractmethod
    def loss(self, tokens: PolicyTokens) -> LossOutput:
        """Losses per token `[B, T]` (0 where the mask is), or per completion `[B]`, not reduced."""

    @abstractmethod
    def reduce(self, loss: Tensor, mask_BT: Tensor, totals: StepTotals) -> Tensor:
        """This batch's share of the step's loss; shares of all micro-batches and ranks add up to it."""

    # The step

    def count(self, batch: Batch) -> dict[str, float]:
        groups: list[Group] = batch["groups"]
        return {
            "rows": float(sum(group.rows for group in groups)),
            "tokens": float(sum(group.scored_tokens for group in groups)),
            "sequence_tokens": float(sum(group.sequence_tokens for group in groups)) * batch["is_first_pass"],
        }

    def forwarded_tokens(self, batch: Batch) -> int:
        return sum(group.flat_tokens for group in batch["groups"])

    @property
    def entropy_coef(self) -> float:
        """Weight of a bonus for entropy; 0 where the algorithm has none."""
        return 0.0

    def entropy_bonus(self, tokens: PolicyTokens, totals: StepTotals) -> Tensor:
        """This batch's share of the mean entropy of the step's tokens, with gradient."""
        assert tokens.entropy is not None
        return tokens.entropy.sum() / totals.counts["tokens"].float().clamp(min=1)

    @property
    def learns_from_flat(self) -> bool:
        """Whether completions whose advantage is 0 have a gradient all the same."""
        return self.penalty_reference is not None or bool(self.aux_loss_coef) or self.entropy_coef != 0

    def has_gradient(self, group: Group) -> bool:
        """Whether the policy can learn from a group; its gradient is exactly 0 otherwise, and it is only looked at."""
        return self.learns_from_flat or not group.is_flat

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Parts within the token budget; groups whose gradient is exactly 0 come first and are only looked at."""
        groups = with_tokens(batch["groups"])
        if not groups:
            return [batch | {"groups": [stand_in(batch["groups"])], "repeated": True}]
        backward_for_all = self.is_sharded or not self.model.training
        parts = learning_parts(
            groups,
            has_gradient=lambda group: backward_for_all or self.has_gradient(group),
            max_tokens=self.token_budget(max(group.flat_tokens for group in groups)),
        )
        return [batch | {"groups": few, "learns": learns} for few, learns in parts]

    def batch_loss(self, model: nn.Module, batch: Batch, totals: StepTotals) -> Tensor:
        tokens, scores = self.tokens_of(model, batch)
        share, output = self.loss_share(tokens, totals)
        if self.entropy_coef:
            rows = len(tokens.advantages) / totals.counts["rows"]
            self.metrics.add("policy_loss", share / rows, rows)
            self.metrics.add("entropy_coef", torch.full_like(rows, self.entropy_coef), rows)
            share = share - self.entropy_coef * self.entropy_bonus(tokens, totals)
        if scores.aux_loss is not None and self.aux_loss_coef:
            rows = len(tokens.advantages) / totals.counts["rows"].float()
            share = share + self.aux_loss_coef * scores.aux_loss * rows
            self.metrics.add("aux_loss", scores.aux_loss)
        if self.model.training and not batch["repeated"]:
            self.observe(tokens)
        record_tokens(self.metrics, tokens, output)
        return share

    def loss_share(self, tokens: PolicyTokens, totals: StepTotals) -> tuple[Tensor, LossOutput]:
        """`loss` as this batch's share of the step's, and what it reports."""
        output = self.loss(tokens)
        return self.reduce(output.loss, tokens.mask, totals), output

    def observe(self, tokens: PolicyTokens) -> None:
        """Called with what every micro-batch of a training step saw; does nothing unless an algorithm overrides it."""

    def tokens_of(self, model: nn.Module, batch: Batch) -> tuple[PolicyTokens, TokenScores]:
        """What the loss sees of a micro-batch, in one forward."""
        return policy_tokens(
            batch["groups"],
            model,
            layout=self.layout,
            temperature=self.args.temperature,
            on_policy=batch["on_policy"],
            entropy_has_grad=self.entropy_coef != 0,
            float32_head=self.float32_head,
            device=self.args.device,
        )

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            rows = cast(Any, self.eval_dataset)[rows]
        prompts = max(1, self.args.per_device_eval_batch_size // self.args.resolved_num_generations_eval)
        return eval_loader(cast(Any, rows), prompts=prompts, rank=self.args.process_index, world=self.args.world_size)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return self.get_eval_dataloader(test_dataset)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Metrics of completions of raw or prepared prompts, as in `evaluate`; there are no predictions beside them.

        Leaves no trace in training.
        """
        with untraced(self):
            rows = self._prepare_split(test_dataset, metric_key_prefix)
            return super().predict(rows, ignore_keys, metric_key_prefix)

    @final
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, None, None]:
        """Draws completions of the batch's prompts, the same ones at every evaluation but for the policy."""
        rows, size = inputs["rows"], self.args.resolved_num_generations_eval
        stream = [(EVALUATION, number) for number in inputs["numbers"]]
        counted = self.eval_metrics.paused() if inputs["repeated"] else nullcontext()
        with torch.no_grad(), counted:
            self._follow(self.model, self.state.global_step)
            rollouts = self.rollout(rows, size, self.sampling, stream)
            scored = self.score(rows, rollouts, seed_of(self.args.seed, EVALUATION, *inputs["numbers"]))
            groups = self.with_logps(self.grouped(rollouts, range(len(rows))), old=False)
            groups = self.compare(groups, scored, size, self.eval_metrics)
            groups = self.extended(groups, rows, scored, self.eval_metrics)
            show_completions(self, "eval", scored, [] if inputs["repeated"] else groups)
            for group in groups:
                batch = {"groups": [group], "on_policy": True, "is_first_pass": False, "repeated": False}
                totals = self.totals_of([batch], over_ranks=False)
                with scoring(model, self.layout), self.accelerator.autocast():
                    shares = [self._share(model, part, totals) for part in self.micro_batches(batch)]
                self.eval_metrics.add("loss", torch.stack(shares).sum(), totals.counts["rows"])
        return None, None, None
