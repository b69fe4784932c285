"""LogCompletionsCallback: what the policy answers to the prompts of the eval set, as a table that grows with the run.

Generation happens isolated from training: the run ends with the same weights, bit for bit, with or without it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from preftune.callbacks.isolation import isolated
from preftune.callbacks.jsonl_log import FLUSH_TIMEOUT, logs_directory
from preftune.callbacks.prompts import Prompt, check_has_prompts, read_prompts
from preftune.callbacks.trackers.base import Tracker, TrackerQueue
from preftune.callbacks.trackers.jsonl import jsonl_tracker

DEFAULT_MAX_NEW_TOKENS = 128
TABLE = "completions"

Generate = Callable[[Any, PreTrainedTokenizerBase, Sequence[list[int]], GenerationConfig], list[list[int]]]
"""`(model, tokenizer, prompt_ids, generation_config) -> completion_ids`, one list each, in order."""


class LogCompletionsCallback(TrainerCallback):
    """Every `freq` steps, generates for the prompts and adds (step, prompt, completion) rows to table `completions`.

    The table goes to `{output_dir}/logs/tables/completions.jsonl`, and to the W&B run or Comet experiment that is open.
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
        ValueError: At construction: no eval set, no prompts in it, no tokenizer, an unknown generation option.
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
        self.trainer = trainer
        self.generation_config = generation_config
        self.generation_kwargs = generation_kwargs
        self.num_prompts = num_prompts
        self.freq = freq
        self._check_counts()
        self._dataset = trainer.eval_dataset if dataset is None else dataset
        if self._dataset is None:
            raise ValueError("the trainer has no eval_dataset to take prompts from; give it one, or give dataset= here")
        self._tokenizer = tokenizer_of(trainer.processing_class)
        with isolated():  # looking at a streamed set may draw random numbers
            check_has_prompts(self._dataset)
        self.effective_generation_config()
        self._generate = generate or functools.partial(
            generate_completions, batch_size=trainer.args.per_device_eval_batch_size
        )
        self._trackers = None if trackers is None else [_queued(tracker) for tracker in trackers]
        self._prompts: list[Prompt] | None = None

    def effective_generation_config(self) -> GenerationConfig:
        """What is generated with: the config given, else the model's, then the keyword arguments."""
        config = copy.deepcopy(self.generation_config or self._own_generation_config())
        unknown = config.update(**self.generation_kwargs)
        if unknown:
            raise ValueError(f"unknown generation options {sorted(unknown)}; wanted fields of GenerationConfig")
        if self.generation_config is None and not {"max_new_tokens", "max_length"} & self.generation_kwargs.keys():
            config.max_new_tokens = config.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        if config.max_new_tokens is not None:
            config.max_length = None
        if config.eos_token_id is None:
            own = self._own_generation_config().eos_token_id
            config.eos_token_id = self._tokenizer.eos_token_id if own is None else own
        if config.pad_token_id is None:
            config.pad_token_id = pad_id(self._tokenizer)
        return config

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._trackers is None:
            self._trackers = default_trackers(args)
        for tracker in self._trackers:
            tracker.begin(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self._every(state) == 0:
            self.log_completions(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for tracker in self._trackers or []:
            tracker.flush(FLUSH_TIMEOUT)

    def log_completions(self, step: int) -> list[dict[str, Any]]:
        """Generates now and logs under `step`; every rank must call it. Gives all rows, on every rank."""
        if self._prompts is None:
            with isolated(tokenizer=self._tokenizer):
                self._prompts = read_prompts(self._dataset, self._tokenizer, self.num_prompts)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with self.trainer.accelerator.split_between_processes(self._prompts) as split:
            mine = cast("list[Prompt]", split)
            with isolated(model, self._tokenizer, seed=self.trainer.args.seed), torch.no_grad():
                ids = self._generate(model, self._tokenizer, [p.ids for p in mine], self.effective_generation_config())
            rows = [self._row(step, prompt, completion) for prompt, completion in zip(mine, ids, strict=True)]
        rows = gather_object(rows)
        if self.trainer.is_world_process_zero():
            if self._trackers is None:  # outside of training
                self._trackers = default_trackers(self.trainer.args)
            for tracker in self._trackers:
                tracker.log_table(TABLE, rows, step)
        return rows

    def _row(self, step: int, prompt: Prompt, completion_ids: list[int]) -> dict[str, Any]:
        text = self._tokenizer.decode(completion_ids, skip_special_tokens=True)
        row = {"step": step, "prompt": prompt.text, "completion": text}
        return row if prompt.dataset is None else {**row, "dataset": prompt.dataset}

    def _every(self, state: TrainerState) -> int:
        return self.freq or state.eval_steps or max(1, -(-state.max_steps // 10))

    def _own_generation_config(self) -> GenerationConfig:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        config = model.generation_config if isinstance(model, PreTrainedModel) else vars(model).get("generation_config")
        return config if isinstance(config, GenerationConfig) else GenerationConfig()

    def _check_counts(self) -> None:
        for name, value in (("num_prompts", self.num_prompts), ("freq", self.freq)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; wanted 1 or more, or None for the default")


def generate_completions(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    config: GenerationConfig,
    *,
    batch_size: int,
) -> list[list[int]]:
    """Completions by `model.generate`, in the order of the prompts, each cut after its first end token."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    device = next(model.parameters()).device
    padding = pad_id(tokenizer)
    completions: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        width = max(len(ids) for ids in batch)
        input_ids = torch.tensor([[padding] * (width - len(ids)) + ids for ids in batch], device=device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch], device=device)
        output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config)
        completions += [_until_end(row, ends) for row in output[:, width:].tolist()]
    return completions


def _until_end(ids: list[int], ends: Sequence[int | None]) -> list[int]:
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids


def tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer itself, also where the trainer has a processor."""
    is_processor = isinstance(processing_class, ProcessorMixin)
    found = vars(processing_class).get("tokenizer") if is_processor else processing_class
    if not isinstance(found, PreTrainedTokenizerBase):
        raise ValueError(f"the trainer's processing_class is {type(found).__name__}; completions need a tokenizer")
    return found


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills the left of short prompts: masked out, so any token will do where none is for padding."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if isinstance(i, int)), 0)


def _queued(tracker: Tracker) -> TrackerQueue:
    return tracker if isinstance(tracker, TrackerQueue) else TrackerQueue(tracker)


def default_trackers(args: TrainingArguments) -> list[TrackerQueue]:
    """JSONL always; W&B and Comet where `report_to` names them or a run of theirs is open. Rank zero only."""
    trackers: list[TrackerQueue] = [jsonl_tracker(logs_directory(args))]
    reported = args.report_to if isinstance(args.report_to, list) else [args.report_to]
    wandb, comet = sys.modules.get("wandb"), sys.modules.get("comet_ml")
    if "wandb" in reported or (wandb is not None and wandb.run is not None):
        from preftune.callbacks.trackers.wandb import WandbTracker

        trackers.append(TrackerQueue(WandbTracker()))
    if "comet_ml" in reported or (comet is not None and comet.get_running_experiment() is not None):
        from preftune.callbacks.trackers.comet import CometTracker

        trackers.append(TrackerQueue(CometTracker()))
    return trackers
