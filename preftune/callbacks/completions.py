"""LogCompletionsCallback: what the policy answers to the prompts of the eval set, as a table that grows with the run.

Generation happens isolated from training: the run ends with the same weights, bit for bit, with or without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import (
    GenerationConfig,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from preftune.callbacks.answers import Answer, PolicyAnswers
from preftune.callbacks.generation import Generate
from preftune.callbacks.jsonl_log import FLUSH_TIMEOUT
from preftune.callbacks.trackers.base import Tracker, TrackerQueue
from preftune.callbacks.trackers.choose import default_trackers

TABLE = "completions"
SCORES = ("logp", "ref_logp", "implicit_reward")


class LogCompletionsCallback(TrainerCallback):
    """Every `freq` steps, generates for the prompts and adds rows to the table `completions`.

    Columns: step, prompt, completion, images (of prompts that have some), dataset (of a dict of sets), and for a
    trainer with a reference the log-probability of the completion under policy and reference and the implicit reward
    beta (logp - ref_logp).

    The table goes to `{output_dir}/logs/tables/completions.jsonl` and to the trackers of the run (`docs/callbacks.md`).
    Sampling is seeded the same way each time, so completions change only with the policy. Prompts are split over ranks.

    Args:
        trainer: Gives model, tokenizer and eval set.
        generation_config: The default is the model's own, with 128 new tokens where it says nothing about length.
        num_prompts: The first so many prompts of each eval set; None takes all of them.
        freq: In optimizer steps. None: `eval_steps` where set, else a tenth of the run.
        dataset: Rows, or a dict of named row sets, to take prompts from instead of the eval set.
        generate: Produces completion ids; all ranks call it, perhaps with no prompt.
        trackers: Replaces the default ones.
        **generation_kwargs: Fields of a generation config, such as `max_new_tokens`; these win.

    Raises:
        ValueError: At construction: no eval set, no prompts in it, no tokenizer, a model that cannot generate, an
            unknown generation option.
    """

    def __init__(
        self,
        trainer: Trainer,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
        *,
        dataset: Any = None,
        generate: Generate | None = None,
        trackers: Sequence[Tracker] | None = None,
        **generation_kwargs: Any,
    ):
        if freq is not None and freq < 1:
            raise ValueError(f"freq={freq}; wanted 1 or more, or None for the default")
        self.trainer = trainer
        self.freq = freq
        self.answers = PolicyAnswers(
            trainer, generation_config, num_prompts, dataset=dataset, generate=generate, options=generation_kwargs
        )
        self._given = None if trackers is None else [_queued(tracker) for tracker in trackers]

    @property
    def trackers(self) -> list[TrackerQueue]:
        return default_trackers(self.trainer) if self._given is None else self._given

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            for tracker in self.trackers:
                tracker.begin(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._every(state) == 0:
            self.log_completions(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            for tracker in self.trackers:
                tracker.flush(FLUSH_TIMEOUT)

    def log_completions(self, step: int) -> list[dict[str, Any]]:
        """Generates now and logs under `step`; every rank must call it. Gives all rows, on every rank."""
        mine = [row_of(answer, step) for answer in self.answers.mine() if answer.ids is not None]
        rows = self.answers.gathered(mine)
        if rows and self.trainer.is_world_process_zero():
            for tracker in self.trackers:
                tracker.log_table(TABLE, rows, step)
        return rows

    def _every(self, state: TrainerState) -> int:
        return self.freq or state.eval_steps or max(1, -(-state.max_steps // 10))


def row_of(answer: Answer, step: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "prompt": answer.prompt.text, "completion": answer.text}
    if answer.prompt.images:
        row["images"] = list(answer.prompt.images)
    if answer.prompt.dataset is not None:
        row["dataset"] = answer.prompt.dataset
    scores = {name: vars(answer)[name] for name in SCORES}
    return row | {name: value for name, value in scores.items() if value is not None}


def _queued(tracker: Tracker) -> TrackerQueue:
    return tracker if isinstance(tracker, TrackerQueue) else TrackerQueue(tracker)
