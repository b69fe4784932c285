"""What is known of the completions of a round once they have their rewards: texts, figures to log, a checkpoint's part.

Figures are over all ranks: rows are gathered before anything is averaged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preftune.errors import ConfigError
from preftune.losses.advantages import is_flat
from preftune.rewards.base import RewardRunner, RewardTable
from preftune.rollouts.base import RolloutBackend
from preftune.trainers.groups import Group
from preftune.trainers.metrics import RunningMetrics
from preftune.types import Rollouts

logger = logging.getLogger(__name__)

NOT_FOR_REWARDS = ("prompt", "prompt_ids", "completion", "completion_ids")


@dataclass
class Round:
    """This rank's completions of a round, dealt to the micro-steps of one pass over them."""

    epoch: int
    number: int
    parts: list[list[Group]]

    def state_dict(self) -> dict[str, Any]:
        parts = {str(i): {str(j): g.state_dict() for j, g in enumerate(part)} for i, part in enumerate(self.parts)}
        return {"epoch": self.epoch, "number": self.number, "parts": parts}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Round:
        parts = [[Group.from_state(group) for group in part.values()] for part in state["parts"].values()]
        return cls(state["epoch"], state["number"], parts)


@dataclass(frozen=True)
class Scored:
    """Completions of one rank with their rewards; every list has one entry a completion.

    Attributes:
        prompts, completions: As reward functions saw them: texts or messages.
        lengths: Tokens that the policy drew.
        is_terminated: Whether it ended by itself.
        table: The rewards.
        metrics: What the rollout and the rewards have to log.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    lengths: np.ndarray
    is_terminated: np.ndarray
    table: RewardTable
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, prompts: Sequence[Any], completions: Sequence[Any], rollouts: Rollouts, table: RewardTable) -> Scored:
        drawn = rollouts.masks if rollouts.masks is not None else [[1] * len(ids) for ids in rollouts.completion_ids]
        lengths = np.array([sum(mask) for mask in drawn], np.float64)
        ended = np.array([reason == "stop" for reason in rollouts.finish_reasons], np.float64)
        return cls(prompts, completions, lengths, ended, table, {**rollouts.metrics, **table.metrics})

    def figures(self) -> np.ndarray:
        """`[rows, K + 2]`: rewards, length, terminated."""
        return np.column_stack([self.table.values, self.lengths, self.is_terminated])


def reward_runner(args: Any, reward_funcs: Any, processing_classes: Any) -> RewardRunner:
    """What rewards completions, as an `OnlineConfig` says.

    Raises:
        ConfigError: something that is no reward function, or not one weight for each.
    """
    runner = RewardRunner(
        reward_funcs,
        timeout=args.reward_timeout,
        on_error=args.on_reward_error,
        processes=args.reward_processes,
        processing_classes=processing_classes,
        model_options={
            "trust_remote_code": args.trust_remote_code,
            "chat_template_kwargs": args.chat_template_kwargs,
        },
    )
    weights = args.reward_weights
    if weights is not None and len(weights) != len(runner.names):
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers, and there are {len(runner.names)} reward functions: "
            f"{', '.join(runner.names)}. Give one weight for each, or none."
        )
    return runner


def check_backend(given: Any) -> None:
    """Raises a ConfigError where what is given for a rollout backend, if anything, is none."""
    if given is not None and not isinstance(given, RolloutBackend):
        raise ConfigError(
            f"rollout_backend is {given!r}; wanted a RolloutBackend object. Those that have a name are chosen by the "
            "config: rollout_backend='server' there."
        )


def say_left_over(rows: int, args: Any) -> None:
    """Says which prompts are in no round; without shuffling it is the same ones in every epoch."""
    rest = rows % args.round_prompts
    if rest and args.shuffle_dataset:
        logger.info("each epoch leaves %d of %d prompts out, others every time: they fill no round", rest, rows)
    elif rest:
        logger.warning(
            "the last %d of %d training prompts fill no round of %d and are never used. Set shuffle_dataset=True, "
            "which leaves others out in each epoch, or a generation_batch_size that makes whole rounds of them",
            *(rest, rows, args.round_prompts),
        )


def say_all_cut(rows: int, args: Any) -> None:
    """Says that not one completion of a round came to an end, so that rewards may see nothing to judge."""
    learned = ", and mask_truncated_completions leaves all of them out" if args.mask_truncated_completions else ""
    logger.warning(
        "all %d completions of a round ran out of max_completion_length=%d%s. Raise it, or see to it that the model "
        "ends its answers with one of its end tokens",
        *(rows, args.max_completion_length, learned),
    )


def seed_of(*numbers: int) -> int:
    """One seed of several numbers; neighbours have seeds that are nothing alike."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@dataclass(frozen=True)
class Division:
    """How the completions of a round are dealt to the ranks, in units of one prompt.

    Attributes:
        units: (prompt, part of its group) of each unit that this rank draws.
        size: Completions of a unit.
        order: Where each completion of the round, prompts in order, stands among those gathered from the ranks.
        own: The numbers of this rank's completions in the round.
    """

    units: list[tuple[int, int]]
    size: int
    order: np.ndarray
    own: np.ndarray

    @classmethod
    def of(cls, args: Any, prompts: int) -> Division:
        """The division of a round of `prompts` prompts under an `OnlineConfig`.

        A micro-step takes neighbouring prompts over all ranks, so that what is in a step does not depend on how many
        ranks there are. A rank's part of it need not be whole groups.
        """
        rank, world, batch = args.process_index, args.world_size, args.per_device_train_batch_size
        size = math.gcd(args.resolved_generation_batch_size // world, args.num_generations)
        units = [(prompt, part) for prompt in range(prompts) for part in range(args.num_generations // size)]
        together = math.lcm(batch, size) // size  # units of a rank that fill whole micro-steps
        owner = np.arange(len(units)) // together % world
        gathered = np.argsort(owner, kind="stable")  # units as they come from the ranks
        order = _rows(np.argsort(gathered), size)
        own = np.flatnonzero(owner == rank)
        return cls([units[i] for i in own], size, order, _rows(own, size))


def _rows(units: np.ndarray, size: int) -> np.ndarray:
    return (units[:, None] * size + np.arange(size)).reshape(-1)


def groups_of(rollouts: Rollouts, prompts: Sequence[int], *, mask_truncated: bool, skip: int = 0) -> list[Group]:
    """Completions by prompt, numbered in order, without advantages yet.

    A rollout may give each completion a prompt of its own (an environment had something to say): neighbours of the same
    number become one group where their prompts are equal.

    Args:
        prompts: The number of each unit's prompt.
        mask_truncated: Whether completions that ran out of their budget are left out of the loss.
        skip: How many of the first tokens that the policy drew are not learned from.
    """
    count = len(rollouts.completion_ids)
    per_unit, per_prompt = count // len(prompts), rollouts.num_generations
    groups = []
    for (_, prompt_ids), numbers in groupby(
        range(count), lambda i: (prompts[i // per_unit], rollouts.prompt_ids[i // per_prompt])
    ):
        rows = list(numbers)
        masks = [_learned(rollouts, i, mask_truncated, skip) for i in rows]
        logps = {}
        if rollouts.logps is not None:
            drawn = [np.asarray(rollouts.logps[i], np.float32) for i in rows]
            logps["sampler"] = [values[mask] for values, mask in zip(drawn, masks, strict=True)]
        ids = [rollouts.completion_ids[i] for i in rows]
        groups.append(Group(prompt_ids, ids, masks, np.zeros(len(rows)), rows, logps))
    return groups


def _learned(rollouts: Rollouts, row: int, mask_truncated: bool, skip: int) -> np.ndarray:
    length = len(rollouts.completion_ids[row])
    if mask_truncated and rollouts.finish_reasons[row] == "length":
        return np.zeros(length, bool)
    drawn = np.ones(length, bool) if rollouts.masks is None else np.asarray(rollouts.masks[row], bool)
    return drawn & (drawn.cumsum() > skip)


def completion_texts(tokenizer: Any, prompts: Sequence[Any], rollouts: Rollouts) -> list[Any]:
    """Completions as reward functions see them: text, or one assistant message where the prompt is messages."""
    given = rollouts.columns.get("completions")
    if given is not None:
        return list(given)
    texts = tokenizer.batch_decode([list(ids) for ids in rollouts.completion_ids], skip_special_tokens=True)
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts)
    ]


def completion_columns(rows: Sequence[Mapping[str, Any]], rollouts: Rollouts) -> dict[str, list[Any]]:
    """The columns of the data, and those the rollout added, one entry a completion."""
    names = dict.fromkeys(name for row in rows for name in row if name not in NOT_FOR_REWARDS)
    columns = {name: [row.get(name) for row in rows] for name in names}
    own = {name: list(values) for name, values in rollouts.columns.items() if name not in ("completions", "prompts")}
    return columns | own


Figures = dict[str, tuple[float, float]]
"""Name -> value and weight; where the last part of a name begins or ends with min or max it is an extreme, without
weight.
"""


def reward_figures(names: Sequence[str], rewards_PGK: Tensor, combined_PG: Tensor) -> Figures:
    """Means and sample deviations over all completions of a round; rows to which nothing applied are left out."""
    figures: Figures = {}
    for k, name in enumerate(names):
        figures |= _mean_and_std(rewards_PGK[..., k], f"rewards/{name}/mean", f"rewards/{name}/std")
    figures |= _mean_and_std(combined_PG, "reward", "reward_std")
    return figures | {"frac_reward_zero_std": (is_flat(combined_PG).double().mean().item(), len(combined_PG))}


def length_figures(lengths: np.ndarray, is_terminated: np.ndarray) -> Figures:
    """Lengths of all completions, and of those that ended by themselves, if any did."""
    figures: Figures = {"completions/clipped_ratio": (float(1 - is_terminated.mean()), len(lengths))}
    for kind, values in (("length", lengths), ("terminated_length", lengths[is_terminated > 0])):
        if len(values):
            figures[f"completions/mean_{kind}"] = float(values.mean()), len(values)
            figures[f"completions/min_{kind}"] = float(values.min()), 1
            figures[f"completions/max_{kind}"] = float(values.max()), 1
    return figures


def add_figures(metrics: RunningMetrics, figures: Figures) -> None:
    """Means by their weights; the extremes over all that is added until the next log."""
    for name, (value, weight) in figures.items():
        words = name.rpartition("/")[2].split("_")
        kind = words[0] if words[0] in ("min", "max") else words[-1]
        if kind == "min" or kind == "max":
            metrics.add_extreme(name, torch.tensor(value), kind)
        else:
            metrics.add(name, torch.tensor(value), torch.tensor(float(weight)))


def _mean_and_std(values: Tensor, mean: str, std: str) -> Figures:
    values = values[~values.isnan()]
    if not len(values):
        return {}
    spread = values.std().item() if len(values) > 1 else 0.0
    return {mean: (values.mean().item(), len(values)), std: (spread, len(values))}
