"""RoundCompletionsCallback: what an online trainer sampled and how it was rewarded, as a table at each log.

The trainer hands every round to callbacks that are `CompletionsObserver`s; without one, nothing is kept or gathered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
from accelerate.utils import gather_object
from rich.console import Console
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from preftune.callbacks.formatting import is_image
from preftune.callbacks.jsonl_log import FLUSH_TIMEOUT
from preftune.callbacks.round_table import print_completions
from preftune.callbacks.trackers.base import TrackerQueue
from preftune.callbacks.trackers.cells import is_messages
from preftune.callbacks.trackers.choose import default_trackers
from preftune.callbacks.trackers.parquet import ParquetTracker

TABLE = "completions"

Row = dict[str, Any]
Split = Literal["train", "eval"]


@dataclass(frozen=True)
class CompletionsRecord:
    """Completions of one rank that were compared; every list has one entry a completion.

    Attributes:
        split: "train", or "eval" for a batch of any evaluation.
        prompts, completions: As reward functions saw them: texts or messages.
        rewards: By reward function; NaN where it did not apply.
        advantages: One number each.
        columns: What reward functions handed to `log_extra`.
    """

    split: Split
    prompts: Sequence[Any]
    completions: Sequence[Any]
    rewards: Mapping[str, Sequence[float]]
    advantages: Sequence[float]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """`{"prompt", "completion", one entry a reward, one a further column, "advantage"}` of each; None for NaN."""
        columns: dict[str, Iterable[Any]] = {"prompt": self.prompts, "completion": self.completions}
        columns |= {_free(name, columns): map(_number, values) for name, values in self.rewards.items()}
        columns |= {_free(name, columns): values for name, values in self.columns.items()}
        columns |= {"advantage": map(_number, self.advantages)}
        return [dict(zip(columns, values)) for values in zip(*columns.values())]


class CompletionsObserver(TrainerCallback):
    """A callback that is shown the completions of each round and of each batch of an evaluation."""

    def on_completions(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        record: CompletionsRecord,
        **kwargs: Any,
    ) -> None:
        """Called on every rank with its own completions, before they are learned from. Leave the record as it is."""


def show_completions(trainer: Trainer, split: Split, scored: Any, groups: Iterable[Any]) -> None:
    """Hands completions to the observers among the callbacks of an online trainer.

    Args:
        split: "train" or "eval".
        scored: A `trainers.rounds.Scored`.
        groups: The `trainers.groups.Group`s with the advantages of its rows; none: of an evaluation that only fills up.
    """
    observers = [c for c in trainer.callback_handler.callbacks if isinstance(c, CompletionsObserver)]
    if not observers:
        return
    advantages = {number: a for group in groups for number, a in zip(group.numbers, group.advantages.tolist())}
    kept = sorted(advantages)
    table = scored.table
    record = CompletionsRecord(
        split,
        [scored.prompts[i] for i in kept],
        [scored.completions[i] for i in kept],
        {name: table.values[kept, k].tolist() for k, name in enumerate(table.names)},
        [advantages[i] if table.names else math.nan for i in kept],  # without rewards nothing was compared
        {name: [values[i] for i in kept] for name, values in table.columns.items()},
    )
    for observer in observers:
        observer.on_completions(trainer.args, trainer.state, trainer.control, record=record)


class RoundCompletionsCallback(CompletionsObserver):
    """At each log, the completions of the last round; after each evaluation, all of its completions.

    They go to the console (`num_completions_to_print` rows), to
    `{output_dir}/completions/completions_{step:05d}.parquet` (an evaluation's to `eval_completions_...`), to
    `{output_dir}/logs/tables/`, and to the experiment trackers of the run (one row a prompt with `log_unique_prompts`).
    Trainers attach it for `log_completions=True`.

    Args:
        trainer: A GRPO or RLOO trainer.
        console: Where to print; the default is standard output.
        trackers: Replaces the default ones.
    """

    def __init__(
        self, trainer: Trainer, *, console: Console | None = None, trackers: Sequence[TrackerQueue] | None = None
    ):
        self.trainer = trainer
        self._console = console
        self._pending: dict[Split, list[list[Row]]] = {}  # by batch
        options = vars(trainer.args)
        self._rows_to_print: int | None = options["num_completions_to_print"]
        self._unique_prompts: bool = options["log_unique_prompts"]
        self._with_images: bool = options["log_multimodal"]
        self._given = None if trackers is None else list(trackers)
        folder = Path(trainer.args.output_dir or ".") / "completions"
        self._files = TrackerQueue(ParquetTracker(folder, options.get("log_completions_hub_repo")))

    @property
    def trackers(self) -> list[TrackerQueue]:
        if self._given is not None:
            return self._given
        return [self._files, *default_trackers(self.trainer)]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            for tracker in self.trackers:
                tracker.begin(state.global_step)

    def on_completions(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        record: CompletionsRecord,
        **kwargs: Any,
    ) -> None:
        kept = [] if record.split == "train" else self._pending.get(record.split, [])
        self._pending[record.split] = [*kept, record.rows()]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        prefix = evaluated_prefix(logs or {})
        if prefix is not None:
            self._log(state, "eval", f"{prefix}_{TABLE}")
        elif "loss" in (logs or {}) or "train_loss" in (logs or {}):
            self._log(state, "train", TABLE)

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Nothing logs these metrics."""
        self._log(state, "eval", f"{evaluated_prefix(metrics or {}) or 'test'}_{TABLE}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._flush(state, self.trackers)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._flush(state, [tracker for tracker in self.trackers if tracker.is_local])

    def _flush(self, state: TrainerState, trackers: Iterable[TrackerQueue]) -> None:
        if state.is_world_process_zero:
            for tracker in trackers:
                tracker.flush(FLUSH_TIMEOUT)

    def _log(self, state: TrainerState, split: Split, name: str) -> None:
        """Every rank comes here with the same splits pending, so that they gather together."""
        if split not in self._pending:
            return
        ranks: list[list[list[Row]]] = gather_object([self._pending.pop(split)])
        # batches go round the ranks, so this is the order of the data set
        rows = [row for batches in zip_longest(*ranks, fillvalue=[]) for batch in batches for row in batch]
        if not state.is_world_process_zero or not rows:
            return
        if self._with_images:
            rows = images_beside(rows)
        columns = list(dict.fromkeys(column for row in rows for column in row if column != "advantage"))
        step = state.global_step
        rows = [
            {"step": step, **{column: row.get(column) for column in columns}, "advantage": row["advantage"]}
            for row in rows
        ]
        self._print(rows, step, title=f"{name}, step {step}")
        for tracker in self.trackers:
            whole = tracker.is_local or not self._unique_prompts
            tracker.log_table(name, rows if whole else one_per_prompt(rows), step)

    def _print(self, rows: list[Row], step: int, *, title: str) -> None:
        count = len(rows) if self._rows_to_print is None else min(self._rows_to_print, len(rows))
        if count <= 0:
            return
        # a generator of its own: printing must not move the random state of training
        chosen = np.random.default_rng([self.trainer.args.seed, step]).choice(len(rows), count, replace=False)
        shown = [rows[i] for i in sorted(chosen)]
        if self._console is not None:
            print_completions(shown, self._console, title=title)
            return
        console = Console()
        with console.capture() as text:
            print_completions(shown, console, title=title)
        print(text.get(), end="", flush=True)  # a console of its own would write into a live panel, print goes above it


def evaluated_prefix(logs: Mapping[str, Any]) -> str | None:
    """The prefix of an evaluation's metrics (`eval`, `eval_{name}`, `test`); None for a log of training."""
    found = (key.removesuffix("_runtime") for key in logs if key.endswith("_runtime"))
    return next((prefix for prefix in found if prefix != "train"), None)


def one_per_prompt(rows: Iterable[Row]) -> list[Row]:
    """The first row of each prompt."""
    seen: dict[str, Row] = {}
    for row in rows:
        seen.setdefault(json.dumps(row["prompt"], default=str), row)
    return list(seen.values())


def images_beside(rows: Iterable[Row]) -> list[Row]:
    """The rows with a column `images` of those in their prompts' messages, where a prompt has any."""
    shown = [(row, _images_of(row["prompt"])) for row in rows]
    if not any(images for _, images in shown):
        return [row for row, _ in shown]
    return [{"prompt": row["prompt"], "completion": row["completion"], "images": found} | row for row, found in shown]


def _images_of(prompt: Any) -> list[Any]:
    if not is_messages(prompt):
        return []
    blocks = [block for message in prompt if isinstance(message.get("content"), list) for block in message["content"]]
    return [block["image"] for block in blocks if isinstance(block, Mapping) and is_image(block.get("image"))]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """A reward called `prompt` must not hide the prompt."""
    return name if name not in taken and name not in ("step", "advantage") else f"{name}_reward"
