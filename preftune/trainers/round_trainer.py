"""Rounds of completions for trainers that learn from what the policy says itself: drawn, rewarded, compared, kept.

What a completion is depends on (seed, epoch, round, prompt, sample) and the weights alone. The rest of a round is in
the checkpoint.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, cast, final

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn

from preftune.callbacks.attach import moves_reference
from preftune.callbacks.round_completions import RoundCompletionsCallback, show_completions
from preftune.data.columns import column_names
from preftune.data.mapping import PreparedData
from preftune.data.prompts import prepare_prompts
from preftune.data.report import DataReport
from preftune.data.rounds import MicroStep, RoundLoader, check_learns, check_rows, round_loader
from preftune.errors import CheckpointError, ConfigError
from preftune.losses.advantages import combine_rewards
from preftune.models.reference import ReferenceModel
from preftune.rewards.base import RewardRunner, RewardTable
from preftune.rollouts.base import RolloutBackend
from preftune.rollouts.choose import make_backend, sampling_of
from preftune.rollouts.weights import Follow
from preftune.trainers.arguments import own_config
from preftune.trainers.base import RawData
from preftune.trainers.groups import Group, cut_into
from preftune.trainers.learning import score_groups, summed_gaps, with_logps
from preftune.trainers.metrics import RunningMetrics
from preftune.trainers.placing import placed
from preftune.trainers.rounds import (
    NOT_FOR_REWARDS,
    Division,
    Figures,
    Round,
    Scored,
    add_figures,
    check_backend,
    completion_columns,
    completion_texts,
    groups_of,
    length_figures,
    reward_figures,
    reward_runner,
    say_all_cut,
    say_left_over,
    seed_of,
)
from preftune.trainers.shares import Batch
from preftune.trainers.step import StepTrainer
from preftune.types import Rollouts, Sampling

logger = logging.getLogger(__name__)


class RoundTrainer(StepTrainer):
    """Draws, rewards and compares the completions of rounds, and deals them to the micro-steps that learn from them.

    A round: every rank draws its part of `generation_batch_size` completions (`num_generations` of each prompt), gives
    them rewards, compares them over all ranks, and then takes `steps_per_generation * num_iterations` micro-steps on
    them. What a completion is depends on (seed, epoch, round, prompt, sample) and the weights alone.

    Attributes:
        rollout_columns: What `rollout` hands to reward functions beside the dataset's columns; None: known only then.
        float32_head: Whether every log-probability comes from a product of the head in float32.
    """

    rollout_columns: tuple[str, ...] | None = ()
    float32_head: bool = False
    columns_read: ClassVar[tuple[str, ...]] = ()
    learns_from_rewards: ClassVar[bool] = True
    needs_old_logps: ClassVar[bool] = False  # before advantages can be computed

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *,
        reward_processing_classes: Any = None,
        rollout_backend: RolloutBackend | None = None,
        callbacks: list[Any] | None = None,
        **rest: Any,
    ) -> None:
        args = cast(Any, own_config(self.config_class, args, model, self.name))
        without = self.why_no_reference(args)
        self.needs_reference = without is None
        if without is not None and any(map(moves_reference, callbacks or [])):
            raise ConfigError(f"a callback moves the reference model, and {without}, or leave the callback out.")
        check_backend(rollout_backend)
        # before the model is loaded: a reward function that cannot be called is known by now
        self.rewards: RewardRunner | None = None
        if self.learns_from_rewards:
            self.rewards = reward_runner(args, reward_funcs, reward_processing_classes)
        self._round: Round | None = None
        self._is_mid_round = False
        self._said_all_cut = False
        self._step_began = 0.0
        super().__init__(model, args, callbacks=callbacks, **rest)
        for reward_model in self.rewards.models if self.rewards is not None else ():
            reward_model.model.to(self.args.device)
        self.sampling = sampling_of(self.args, self.eos_token_ids)
        self.backend = rollout_backend or make_backend(self.args, self.model, self.tokenizer, self.accelerator)
        self._follow = Follow(self.backend)
        self._loader: RoundLoader | None = None
        if isinstance(self.train_dataset, Dataset):
            check_rows(len(self.train_dataset), self.args.round_prompts)
        if self.args.log_completions:
            self.add_callback(RoundCompletionsCallback(self))

    # The reference

    def why_no_reference(self, args: Any) -> str | None:
        """None where these options ask for a reference; else why there is none, and what to do to get one."""
        return None if args.beta != 0 else "with beta=0 there is none. Set beta above 0"

    @property
    def penalty_reference(self) -> ReferenceModel | None:
        """The reference whose log-probabilities are part of the loss, if any."""
        return self.reference

    # Rounds

    @abstractmethod
    def advantages(self, rewards_PGK: Tensor, kl_PG: Tensor | None) -> Tensor:
        """`[P, G]` advantages of the whole round over all ranks, float64.

        Args:
            rewards_PGK: `[P, G, K]` what each reward function gave; NaN where it did not apply.
            kl_PG: `[P, G]` summed log p_old - log p_ref of each completion where `needs_old_logps`, else None.
        """

    def get_train_dataloader(self) -> RoundLoader:
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        self._loader = round_loader(
            cast(Any, self.train_dataset),
            round_prompts=self.args.round_prompts,
            steps_per_round=self.args.steps_per_round,
            seed=seed,
            shuffle=self.args.shuffle_dataset,
        )
        if isinstance(self.train_dataset, Dataset) and self.is_world_process_zero():
            say_left_over(len(self.train_dataset), self.args)
        return self._loader

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        passes, skipped = super()._init_training_state(max_steps, *args)
        if self._loader is not None:
            self._loader.set_epoch(passes)  # transformers does not tell it to a stream of which it skips a part
        return passes, skipped

    @final
    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        self._step_began = time.perf_counter()
        items = list(islice(epoch_iterator, num_batches))
        if 0 < len(items) < num_batches:  # of a stream that has ended: the step is left out, so nothing is drawn for it
            check_learns(items, num_batches)
            return self.begin_step(cast(Any, items), num_batches), None
        batches = []
        for item in items:
            if item.rows:
                self._round = self.draw_round(item)
            batches.append(self._batch_of(item))
            self._is_mid_round = item.step + 1 < self.args.steps_per_round
        return self.begin_step(batches, num_batches), None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)  # once an optimizer step, before it
        self.train_metrics.add("step_time", torch.tensor(time.perf_counter() - self._step_began))
        return norm

    def _batch_of(self, item: MicroStep) -> Batch:
        if self._round is None or (self._round.epoch, self._round.number) != (item.epoch, item.round):
            raise CheckpointError(
                f"the run goes on in the middle of round {item.round} of epoch {item.epoch}, and the checkpoint does "
                "not hold its completions. Resume with the data and options of the run that wrote it."
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
        division = Division.of(self.args, len(item.rows))
        rows = [item.rows[prompt] for prompt, _ in division.units]
        stream = [(item.epoch, item.round, prompt, part) for prompt, part in division.units]
        first, window = item.round * self.args.steps_per_round, self.args.gradient_accumulation_steps
        is_reused = (first + self.args.steps_per_round - 1) // window != first // window  # after an update
        self._follow(self.model, self.state.global_step)
        rollouts = self.rollout(rows, division.size, self.sampling, stream)
        groups = self.grouped(rollouts, [prompt for prompt, _ in division.units])
        known: list[list[Group]] = []
        seed = seed_of(self.args.seed, item.epoch, item.round, self.args.process_index)
        scored = self.score(rows, rollouts, seed, lambda: known.append(self.with_logps(groups, old=is_reused)))
        groups = self.compare(known[0], scored, self.args.num_generations, self.train_metrics, division)
        groups = self.extended(groups, rows, scored, self.train_metrics, division)
        show_completions(self, "train", scored, groups)
        parts = cut_into(groups, self.args.per_device_train_batch_size)
        self.train_metrics.add("round_time", torch.tensor(time.perf_counter() - started))
        return Round(item.epoch, item.round, parts)

    def rollout(
        self, rows: Sequence[Mapping[str, Any]], size: int, sampling: Sampling, stream: Sequence[tuple[int, ...]]
    ) -> Rollouts:
        """`size` completions of each row's prompt. Override it for another way to get them."""
        return self.backend.generate([row["prompt_ids"] for row in rows], size, sampling, stream=stream)

    def score(
        self,
        rows: Sequence[Mapping[str, Any]],
        rollouts: Rollouts,
        seed: int,
        meanwhile: Callable[[], object] = bool,
    ) -> Scored:
        """Rewards of this rank's completions and what to log of them.

        Args:
            seed: For functions that draw numbers.
            meanwhile: Called once, while async functions wait for their answers.
        """
        repeated = [row for row in rows for _ in range(len(rollouts.completion_ids) // len(rows))]
        prompts = rollouts.columns.get("prompts") or [row.get("prompt", "") for row in repeated]
        completions = completion_texts(self.tokenizer, prompts, rollouts)
        if self.rewards is None:
            meanwhile()
            return Scored.of(prompts, completions, rollouts, RewardTable(np.zeros((len(completions), 0)), []))
        table = self.rewards.run(
            prompts=prompts,
            completions=completions,
            completion_ids=[list(ids) for ids in rollouts.completion_ids],
            columns=completion_columns(repeated, rollouts),
            trainer_state=self.state,
            seed=seed,
            meanwhile=meanwhile,
        )
        return Scored.of(prompts, completions, rollouts, table)

    def grouped(self, rollouts: Rollouts, prompts: Sequence[int]) -> list[Group]:
        """Completions by prompt, with the tokens that are learned from; `prompts` has the number of each unit's."""
        return groups_of(rollouts, prompts, mask_truncated=self.args.mask_truncated_completions)

    def compare(
        self,
        groups: list[Group],
        scored: Scored,
        size: int,
        metrics: RunningMetrics,
        division: Division | None = None,
    ) -> list[Group]:
        """Groups with their advantages, and what the completions were like in `metrics`.

        With a `division` completions of all ranks are compared; without (in evaluation) every group is on one rank.
        """
        figures, functions = scored.figures(), len(scored.table.names)
        kl = summed_gaps(groups, "old", "ref") if self.needs_old_logps else None
        if kl is not None:
            figures = np.column_stack([figures, kl])
        mine = torch.from_numpy(figures).to(self.args.device)
        whole = mine.cpu() if division is None else cast(Tensor, self.accelerator.gather(mine)).cpu()[division.order]
        add_figures(metrics, length_figures(*whole[:, functions : functions + 2].numpy().T))
        if division is not None and not whole[:, functions + 1].any() and not self._said_all_cut:
            self._said_all_cut = True
            if self.is_world_process_zero():
                say_all_cut(len(whole), self.args)
        for name, value in scored.metrics.items():
            metrics.add(name, torch.tensor(value), torch.tensor(float(len(mine))))
        rewards_PGK = whole[:, :functions].unflatten(0, (-1, size))
        kl_PG = None if kl is None else whole[:, -1].unflatten(0, (-1, size))
        advantages = self.advantages(rewards_PGK, kl_PG).flatten().numpy()
        advantages = advantages if division is None else advantages[division.own]
        if functions:
            combined_PG = combine_rewards(rewards_PGK, self.reward_weights)
            add_figures(metrics, self.figures_of_rewards(scored.table.names, rewards_PGK, combined_PG))
        return [group.with_advantages(advantages) for group in groups]

    def figures_of_rewards(self, names: Sequence[str], rewards_PGK: Tensor, combined_PG: Tensor) -> Figures:
        """What to log of the rewards of a whole round over all ranks."""
        return reward_figures(names, rewards_PGK, combined_PG)

    def extended(
        self,
        groups: list[Group],
        rows: Sequence[Mapping[str, Any]],
        scored: Scored,
        metrics: RunningMetrics,
        division: Division | None = None,
    ) -> list[Group]:
        """Groups with what else an algorithm has to know of them before they are learned from; unchanged by default.

        Args:
            rows: The row of each unit of completions: of n completions, number i belongs to row i // (n / len(rows)).
            metrics, division: As for `compare`.
        """
        return groups

    @property
    def reward_weights(self) -> Tensor:
        weights, names = self.args.reward_weights, self.rewards.names if self.rewards is not None else []
        return torch.tensor(weights if weights is not None else [1.0] * len(names), dtype=torch.float64)

    # Log-probabilities of a round

    def with_logps(self, groups: list[Group], old: bool) -> list[Group]:
        """Groups with the log-probabilities that the loss compares with; with `old` those of the policy as it is."""
        return with_logps(
            groups,
            self._score_groups,
            old=old or self.needs_old_logps,
            reference=self.penalty_reference,
            trusts_sampler=self.sampling.is_plain and self.accelerator.mixed_precision == "no",
            everywhere=lambda mine: all(gather_object([mine])),
        )

    def _score_groups(self, groups: list[Group], reference: ReferenceModel | None = None) -> dict[int, np.ndarray]:
        with placed(self), self.accelerator.autocast():
            return score_groups(
                groups,
                self.model,
                reference=reference,
                layout=self.layout,
                temperature=self.args.temperature,
                float32_head=self.float32_head,
                rows=self.args.per_device_train_batch_size,
                max_tokens=self.args.max_tokens_per_micro_batch,
                device=self.args.device,
            )

    # State and data

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._follow = Follow(self.backend)  # steps are counted anew
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.rewards is not None:
                self.rewards.close()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._follow = Follow(self.backend)  # these are the weights of another step

    def rank_state(self) -> dict[str, Any]:
        """The round that is being learned from, where steps on it are still to come."""
        if self._round is None or not self._is_mid_round:
            return {}
        return {"round": self._round.state_dict()}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        self._round = Round.from_state(state["round"]) if "round" in state else None

    def prepare_dataset(self, dataset: RawData, split: str) -> tuple[RawData, DataReport]:
        prepared = self.prepare_rows(dataset, split)
        if self.rollout_columns is not None and self.rewards is not None:
            columns = [name for name in column_names(prepared.dataset) if name not in NOT_FOR_REWARDS]
            self.rewards.check_columns([*columns, *self.rollout_columns])
        return prepared.dataset, prepared.report

    def prepare_rows(self, dataset: RawData, split: str) -> PreparedData:
        """Rows with the ids of their prompts, beside the columns that reward functions and `rollout` read."""
        kept = ("prompt", "image", "images") if self.args.remove_unused_columns else None
        return prepare_prompts(
            dataset,
            self.tokenizer,
            columns=self.column_map,
            chat_template_kwargs=self.args.chat_template_kwargs,
            keep_columns=kept,
            name=split,
        )

    def default_collator(self) -> None:
        return None  # rounds are never collated: groups become trees when they are scored
