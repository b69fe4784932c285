"""Trainers that learn from what the policy says itself: rounds of completions, their rewards, and steps on them.

A leaf writes `advantages` and `loss`. Prompts are computed once for all their completions, when drawn and when learned.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, ClassVar, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from preftune.callbacks.attach import moves_reference
from preftune.callbacks.round_completions import RoundCompletionsCallback, show_completions
from preftune.data.columns import column_names
from preftune.data.prompts import prepare_prompts
from preftune.data.report import DataReport
from preftune.data.rounds import MicroStep, RoundLoader, eval_loader, round_loader
from preftune.errors import CheckpointError, ConfigError
from preftune.losses.advantages import combine_rewards
from preftune.models.logprobs import scoring
from preftune.models.reference import ReferenceModel
from preftune.rollouts.base import RolloutBackend
from preftune.rollouts.choose import make_backend, sampling_of
from preftune.trainers.base import RawData, default_output_dir
from preftune.trainers.groups import Group, cut_into
from preftune.trainers.learning import (
    entropy_sums,
    learning_parts,
    policy_tokens,
    record_tokens,
    score_groups,
    stand_in,
    summed_gaps,
    with_logps,
    with_tokens,
)
from preftune.trainers.metrics import RunningMetrics
from preftune.trainers.placing import placed
from preftune.trainers.rounds import (
    NOT_FOR_REWARDS,
    Round,
    Scored,
    add_figures,
    completion_columns,
    completion_texts,
    groups_of,
    length_figures,
    reward_figures,
    reward_runner,
    seed_of,
    units_of_rank,
)
from preftune.trainers.shares import Batch
from preftune.trainers.step import StepTotals, StepTrainer
from preftune.types import LossOutput, PolicyTokens, Rollouts, Sampling, TokenScores

EVALUATION = 0xE7A1
"""First part of the keys of evaluation's random streams, which have two parts; those of training have four."""


class OnlineTrainer(StepTrainer):
    """Rounds of rollouts, shared by all online algorithms. An algorithm writes `advantages` and `loss`.

    A round: every rank draws its part of `generation_batch_size` completions (`num_generations` of each prompt), gives
    them rewards, compares them over all ranks, and then takes `steps_per_generation * num_iterations` micro-steps on
    them. What a completion is depends on (seed, epoch, round, prompt, sample) and the weights alone.
    """

    columns_read: ClassVar[tuple[str, ...]] = ()
    needs_old_logps: ClassVar[bool] = False  # before advantages can be computed

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: Any = None,
        *,
        reward_processing_classes: Any = None,
        rollout_backend: RolloutBackend | None = None,
        callbacks: list[Any] | None = None,
        **rest: Any,
    ) -> None:
        if args is None:
            args = self.config_class(output_dir=default_output_dir(model, self.name))
        self.needs_reference = args.beta != 0
        if not self.needs_reference and any(map(moves_reference, callbacks or [])):
            raise ConfigError(
                "a callback moves the reference model, and with beta=0 there is none. Set beta above 0, or leave the "
                "callback out."
            )
        # before the model is loaded: a reward function that cannot be called is known by now
        self.rewards = reward_runner(args, reward_funcs, reward_processing_classes)
        self._round: Round | None = None
        self._is_mid_round = False
        super().__init__(model, args, callbacks=callbacks, **rest)
        for reward_model in self.rewards.models:
            reward_model.model.to(self.args.device)
        self.sampling = sampling_of(self.args, self.eos_token_ids)
        self.backend = rollout_backend or make_backend(self.args, self.model, self.tokenizer)
        self._loader: RoundLoader | None = None
        if self.args.log_completions:
            self.add_callback(RoundCompletionsCallback(self))

    # The algorithm

    @abstractmethod
    def advantages(self, rewards_PGK: Tensor, kl_PG: Tensor | None) -> Tensor:
        """`[P, G]` advantages of the whole round over all ranks, float64.

        Args:
            rewards_PGK: `[P, G, K]` what each reward function gave; NaN where it did not apply.
            kl_PG: `[P, G]` summed log p_old - log p_ref of each completion where `needs_old_logps`, else None.
        """

    @abstractmethod
    def loss(self, tokens: PolicyTokens) -> LossOutput:
        """Losses per token `[B, T]` (0 where the mask is), or per completion `[B]`, not reduced."""

    @abstractmethod
    def reduce(self, loss: Tensor, mask_BT: Tensor, totals: StepTotals) -> Tensor:
        """This batch's share of the step's loss; shares of all micro-batches and ranks add up to it."""

    # Rounds

    def get_train_dataloader(self) -> RoundLoader:
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        self._loader = round_loader(
            cast(Any, self.train_dataset),
            round_prompts=self.args.round_prompts,
            steps_per_round=self.args.steps_per_round,
            seed=seed,
            shuffle=self.args.shuffle_dataset,
        )
        return self._loader

    @final
    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        if self._loader is not None:
            self._loader.set_epoch(int(self.state.epoch or 0))  # a resumed stream is not told by transformers
        batches = []
        for item in islice(epoch_iterator, num_batches):
            if item.rows:
                self._round = self.draw_round(item)
            batches.append(self._batch_of(item))
            self._is_mid_round = item.step + 1 < self.args.steps_per_round
        self._step_batches = batches
        self._step_totals = None
        self._entropy_sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        return batches, None

    def _batch_of(self, item: MicroStep) -> Batch:
        if self._round is None:
            raise CheckpointError(
                f"the run goes on in the middle of round {item.round}, and its completions were not saved. Resume from "
                "a checkpoint that preftune wrote."
            )
        per_generation = self.args.resolved_steps_per_generation
        first = item.round * self.args.steps_per_round
        window = self.args.gradient_accumulation_steps
        return {
            "groups": self._round.parts[item.step % per_generation],
            "on_policy": (first + item.step) // window == first // window,  # no update since they were drawn
            "is_first_pass": item.step < per_generation,
            "repeated": False,
        }

    def draw_round(self, item: MicroStep) -> Round:
        """Draws, rewards and compares the completions of a round; this rank's part of them, ready for its steps."""
        started = time.perf_counter()
        units, size = units_of_rank(self.args, len(item.rows))
        rows = [item.rows[prompt] for prompt, _ in units]
        stream = [(item.epoch, item.round, prompt, part) for prompt, part in units]
        first, window = item.round * self.args.steps_per_round, self.args.gradient_accumulation_steps
        is_reused = (first + self.args.steps_per_round - 1) // window != first // window  # after an update
        rollouts = self.rollout(rows, size, self.sampling, stream)
        scored = self.score(rows, rollouts, seed_of(self.args.seed, item.epoch, item.round, self.args.process_index))
        groups = self._groups_of(rollouts, [prompt for prompt, _ in units])
        groups = self._with_logps(groups, old=is_reused)
        groups = self.compare(groups, scored, self.args.num_generations, self.train_metrics)
        show_completions(self, "train", scored, groups)
        order = np.random.default_rng([self.args.seed, item.epoch, item.round]).permutation(len(groups))
        parts = cut_into([groups[i] for i in order], self.args.per_device_train_batch_size)
        self.train_metrics.add("round_time", torch.tensor(time.perf_counter() - started))
        return Round(item.epoch, item.round, parts)

    def rollout(
        self, rows: Sequence[Mapping[str, Any]], size: int, sampling: Sampling, stream: Sequence[tuple[int, ...]]
    ) -> Rollouts:
        """`size` completions of each row's prompt. Override it for another way to get them."""
        return self.backend.generate([row["prompt_ids"] for row in rows], size, sampling, stream=stream)

    def score(self, rows: Sequence[Mapping[str, Any]], rollouts: Rollouts, seed: int) -> Scored:
        """Rewards of this rank's completions and what to log of them; `seed` is for functions that draw numbers."""
        repeated = [row for row in rows for _ in range(rollouts.num_generations)]
        prompts = [row.get("prompt", "") for row in repeated]
        completions = completion_texts(self.tokenizer, prompts, rollouts)
        table = self.rewards.run(
            prompts=prompts,
            completions=completions,
            completion_ids=[list(ids) for ids in rollouts.completion_ids],
            columns=completion_columns(repeated, rollouts),
            trainer_state=self.state,
            seed=seed,
        )
        return Scored.of(prompts, completions, rollouts, table)

    def _groups_of(self, rollouts: Rollouts, prompts: Sequence[int]) -> list[Group]:
        return groups_of(rollouts, prompts, mask_truncated=self.args.mask_truncated_completions)

    def compare(self, groups: list[Group], scored: Scored, size: int, metrics: RunningMetrics) -> list[Group]:
        """Groups with their advantages, and what the completions were like in `metrics`.

        In training completions of all ranks are compared; in evaluation every group is on one rank.
        """
        figures = scored.figures()
        kl = summed_gaps(groups, "old", "ref") if self.needs_old_logps else None
        if kl is not None:
            figures = np.column_stack([figures, kl])
        mine = torch.from_numpy(figures).to(self.args.device)
        is_training = metrics is self.train_metrics
        whole = cast(Tensor, self.accelerator.gather(mine)).cpu() if is_training else mine.cpu()
        functions = len(scored.table.names)
        rewards_PGK = whole[:, :functions].unflatten(0, (-1, size))
        kl_PG = None if kl is None else whole[:, -1].unflatten(0, (-1, size))
        advantages = self.advantages(rewards_PGK, kl_PG).flatten().numpy()
        advantages = advantages[len(mine) * self.args.process_index if is_training else 0 :][: len(mine)]
        combined_PG = combine_rewards(rewards_PGK, self.reward_weights)
        add_figures(metrics, reward_figures(scored.table.names, rewards_PGK, combined_PG))
        add_figures(metrics, length_figures(*whole[:, functions : functions + 2].numpy().T))
        add_figures(metrics, {name: (value, len(mine)) for name, value in scored.table.metrics.items()})
        return [group.with_advantages(advantages) for group in groups]

    @property
    def reward_weights(self) -> Tensor:
        weights = self.args.reward_weights
        return torch.tensor(weights if weights is not None else [1.0] * len(self.rewards.names), dtype=torch.float64)

    # Log-probabilities of a round

    def _with_logps(self, groups: list[Group], old: bool) -> list[Group]:
        return with_logps(
            groups,
            self._score_groups,
            old=old or self.needs_old_logps,
            reference=self.reference,
            trusts_sampler=self.sampling.is_plain and self.accelerator.mixed_precision == "no",
        )

    def _score_groups(self, groups: list[Group], reference: ReferenceModel | None = None) -> dict[int, np.ndarray]:
        with placed(self), self.accelerator.autocast():
            return score_groups(
                groups,
                self.model,
                reference=reference,
                layout=self.layout,
                temperature=self.args.temperature,
                rows=self.args.per_device_train_batch_size,
                max_tokens=self.args.max_tokens_per_micro_batch,
                device=self.args.device,
            )

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
        return self.reference is not None or bool(self.aux_loss_coef) or self.entropy_coef != 0

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Parts within the token budget; groups whose gradient is exactly 0 come first and are only looked at."""
        groups = with_tokens(batch["groups"])
        if not groups:
            return [batch | {"groups": [stand_in(batch["groups"])], "repeated": True}]
        parts = learning_parts(
            groups,
            keep_flat=self.learns_from_flat or self.is_sharded or not self.model.training,
            max_tokens=self.args.max_tokens_per_micro_batch,
        )
        return [batch | {"groups": few, "learns": learns} for few, learns in parts]

    def batch_loss(self, model: nn.Module, batch: Batch, totals: StepTotals) -> Tensor:
        tokens, scores = self.tokens_of(model, batch)
        output = self.loss(tokens)
        share = self.reduce(output.loss, tokens.mask, totals)
        if self.entropy_coef:
            share = share - self.entropy_coef * self.entropy_bonus(tokens, totals)
        if scores.aux_loss is not None and self.aux_loss_coef:
            rows = len(tokens.advantages) / totals.counts["rows"].float()
            share = share + self.aux_loss_coef * scores.aux_loss * rows
            self.metrics.add("aux_loss", scores.aux_loss)
        if self.model.training:
            self._entropy_sums += entropy_sums(tokens)
        record_tokens(self.metrics, tokens, output)
        return share

    def tokens_of(self, model: nn.Module, batch: Batch) -> tuple[PolicyTokens, TokenScores]:
        """What the loss sees of a micro-batch, in one forward."""
        return policy_tokens(
            batch["groups"],
            model,
            layout=self.layout,
            temperature=self.args.temperature,
            on_policy=batch["on_policy"],
            entropy_has_grad=self.entropy_coef != 0,
            device=self.args.device,
        )

    def step_entropy(self) -> float:
        """Mean entropy of a token over the optimizer step so far, in nats, over all ranks (a collective)."""
        total, count = cast(Tensor, self.accelerator.reduce(self._entropy_sums, "sum")).tolist()
        return total / max(count, 1)

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            rows = cast(Any, self.eval_dataset)[rows]
        prompts = max(1, self.args.per_device_eval_batch_size // self.args.resolved_num_generations_eval)
        return eval_loader(cast(Any, rows), prompts=prompts, rank=self.args.process_index, world=self.args.world_size)

    @final
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, None, None]:
        """Draws completions of the batch's prompts, the same ones at every evaluation but for the policy."""
        rows, size = inputs["rows"], self.args.resolved_num_generations_eval
        stream = [(EVALUATION, number) for number in inputs["numbers"]]
        counted = self.eval_metrics.paused() if inputs["repeated"] else nullcontext()
        with torch.no_grad(), counted:
            rollouts = self.rollout(rows, size, self.sampling, stream)
            scored = self.score(rows, rollouts, seed_of(self.args.seed, EVALUATION, *inputs["numbers"]))
            groups = self._with_logps(self._groups_of(rollouts, range(len(rows))), old=False)
            groups = self.compare(groups, scored, size, self.eval_metrics)
            show_completions(self, "eval", scored, [] if inputs["repeated"] else groups)
            for group in groups:
                batch = {"groups": [group], "on_policy": True, "is_first_pass": False, "repeated": False}
                totals = self.totals_of([batch], over_ranks=False)
                with scoring(model, self.layout), self.accelerator.autocast():
                    for part in self.micro_batches(batch):
                        loss = self._share(model, part, totals)
                        self.eval_metrics.add("loss", loss, totals.counts["rows"])
        return None, None, None

    # State and data

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            self.rewards.close()

    def rank_state(self) -> dict[str, Any]:
        """The round that is being learned from, where steps on it are still to come."""
        if self._round is None or not self._is_mid_round:
            return {}
        return {"round": self._round.state_dict()}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        self._round = Round.from_state(state["round"]) if "round" in state else None

    def prepare_dataset(self, dataset: RawData, split: str) -> tuple[RawData, DataReport]:
        kept = ("prompt", "image", "images") if self.args.remove_unused_columns else None
        prepared = prepare_prompts(
            dataset,
            self.tokenizer,
            columns=self.column_map,
            chat_template_kwargs=self.args.chat_template_kwargs,
            keep_columns=kept,
            name=split,
        )
        columns = column_names(prepared.dataset)
        self.rewards.check_columns(name for name in columns if name not in NOT_FOR_REWARDS)
        return prepared.dataset, prepared.report

    def default_collator(self) -> None:
        return None  # rounds are never collated: groups become trees when they are scored
