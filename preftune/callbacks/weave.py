"""WeaveCallback: at each evaluation, completions of the eval prompts go to Weave as traces, or as a scored evaluation.

Generating and scoring are isolated from training; writing happens in a thread of its own and never stops a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from preftune.callbacks.answers import PolicyAnswers
from preftune.callbacks.generation import Generate
from preftune.callbacks.jsonl_log import FLUSH_TIMEOUT
from preftune.callbacks.scoring import Scorer, ScorerRunner
from preftune.callbacks.trackers.base import TrackerQueue
from preftune.callbacks.trackers.weave import WeaveTracker
from preftune.models.adapters import peft_model
from preftune.models.load import model_name as name_of_model


class WeaveCallback(TrainerCallback):
    """Logs what the policy answers to the prompts of the eval set, at every evaluation, to Weave.

    Without scorers each answer is a trace. With scorers an evaluation run of each answer and its scores is logged, with
    the summary `total_predictions`, `successful_predictions` and `avg_{scorer}`. Model name, step and the generation
    config in effect are recorded with both.

    The client that is open is used; where none is, one is opened for the project of the open W&B run, else for
    `project_name`.

    Args:
        trainer: Gives model, tokenizer and eval set.
        project_name: `project` or `entity/project`.
        scorers: Functions of (prompt, completion) that return a number, plain or async, by name.
        generation_config: The default is the model's own, with 128 new tokens where it says nothing about length.
        num_prompts: The first so many prompts of each eval set; None takes all of them.
        dataset_name: The name recorded; of several eval sets, each adds its own.
        model_name: The name recorded; None takes the one under which the model was loaded.
        dataset: Rows, or a dict of named row sets, to take prompts from instead of the eval set.
        scorer_timeout: Seconds that each scorer may take for the completions of a process; None: no limit.
        generate: Produces completion ids; all ranks call it, perhaps with no prompt.
        **generation_kwargs: Fields of a generation config, such as `max_new_tokens`; these win.

    Raises:
        ImportError: At construction: weave is not installed.
        ValueError: At construction: no eval set, no prompts in it, no tokenizer, a model that cannot generate, an
            unknown generation option, a scorer that is no function.
    """

    def __init__(
        self,
        trainer: Trainer,
        project_name: str | None = None,
        scorers: Mapping[str, Scorer] | None = None,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        dataset_name: str = "eval_dataset",
        model_name: str | None = None,
        *,
        dataset: Any = None,
        scorer_timeout: float | None = 60.0,
        generate: Generate | None = None,
        **generation_kwargs: Any,
    ):
        self.trainer = trainer
        self.dataset_name = dataset_name
        self.answers = PolicyAnswers(
            trainer, generation_config, num_prompts, dataset=dataset, generate=generate, options=generation_kwargs
        )
        self._scorers = ScorerRunner(scorers, scorer_timeout) if scorers else None
        generation = self.answers.effective_generation_config().to_diff_dict()
        generation.pop("transformers_version", None)
        tracker = WeaveTracker(
            project_name,
            model_name or _loaded_name(trainer),
            self._scorers.names if self._scorers is not None else [],
            {"generation_config": generation},
        )
        self.tracker = TrackerQueue(tracker)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Of several eval sets this comes once for each, with its metrics."""
        names = dict.fromkeys(prompt.dataset for prompt in self.answers.prompts)  # on all ranks in one order
        evaluated = [name for name in names if name is not None and f"eval_{name}_runtime" in (metrics or {})]
        for name in evaluated or [None]:
            self._log(state, name)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._scorers is not None:
            self._scorers.close()
        if state.is_world_process_zero:
            self.tracker.flush(FLUSH_TIMEOUT)

    def _log(self, state: TrainerState, dataset: str | None) -> None:
        mine = self.answers.mine(dataset)
        rows: list[dict[str, Any]] = [{"prompt": a.prompt.text, "completion": a.text} for a in mine]
        if self._scorers is not None:
            done = [row for row in rows if row["completion"] is not None]
            scores = self._scorers.run([row["prompt"] for row in done], [row["completion"] for row in done])
            for row in rows:
                row |= dict.fromkeys(self._scorers.names)
            for row, found in zip(done, scores, strict=True):
                row |= found
        rows = self.answers.gathered(rows)
        if state.is_world_process_zero and rows:
            name = self.dataset_name if dataset is None else f"{self.dataset_name}_{dataset}"
            self.tracker.log_table(name, rows, state.global_step)


def _loaded_name(trainer: Trainer) -> str:
    model = trainer.accelerator.unwrap_model(trainer.model)
    peft = peft_model(model)
    return name_of_model(model if peft is None else peft.get_base_model())  # pyright: ignore[reportArgumentType]
