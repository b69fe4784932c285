"""What every trainer shares: construction, the reference, metrics, evaluation of raw data, whole checkpoints.

An algorithm never touches this file: it overrides `loss` (or `batch_loss` for a new family) in its leaf.
"""

from __future__ import annotations

import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast, final

import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from preftune.callbacks.attach import moves_reference, reference_callbacks
from preftune.callbacks.handler import RefModelCallbackHandler
from preftune.callbacks.jsonl_log import JsonlLogCallback
from preftune.callbacks.progress import replace_default_progress
from preftune.configs.base import BaseConfig
from preftune.data.report import DataReport
from preftune.errors import ConfigError, DataFormatError
from preftune.models.adapters import is_our_reference
from preftune.models.attention import Layout
from preftune.models.load import (
    disable_dropout,
    enable_router_loss,
    eos_token_ids,
    load_model,
    load_processing_class,
    model_name,
    tokenizer_of,
    wrap_peft,
)
from preftune.models.logprobs import choose_layout
from preftune.models.reference import MovableReference, ReferenceModel, make_reference
from preftune.trainers import state as checkpoints
from preftune.trainers.extras import load_running_state, save_running_state
from preftune.trainers.metrics import RunningMetrics

logger = logging.getLogger(__name__)

RawData = Dataset | IterableDataset
EvalData = RawData | DatasetDict | IterableDatasetDict | dict[str, RawData]


def check_output_dir(folder: str) -> None:
    """Refuses, before anything is loaded, a folder that could not be written at the end."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        kind = "a folder that cannot be written" if existing.is_dir() else "a file"
        raise ConfigError(f"output_dir={folder!r}: {existing} is {kind}. Give a folder that you may write.")


class _RestoreRunningTotals(TrainerCallback):
    """Puts loss sums back after the training loop has set them to zero, so that a log window may span a resume."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._restore_running_totals()


class BaseTrainer(Trainer, ABC):
    """Construction in one order for all: config, tokenizer, data, model, adapter, layout, HF's trainer, reference.

    Data come before weights, so that a wrong column costs no loading time.
    """

    args: Any  # a BaseConfig; leaves say which
    model: PreTrainedModel
    model_wrapped: nn.Module
    layout: Layout
    config_class: ClassVar[type[BaseConfig]]
    name: ClassVar[str]  # as in "DPO"
    auto_class: ClassVar[Any] = AutoModelForCausalLM
    columns_read: ClassVar[tuple[str, ...]]  # of the prepared dataset
    needs_reference: ClassVar[bool] = False  # whether the algorithm compares with a reference model

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: Any = None,
        *,
        ref_model: nn.Module | str | None = None,
        data_collator: Callable | None = None,
        train_dataset: RawData | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        **hf_arguments: Any,
    ) -> None:
        if args is None:
            args = self.config_class(output_dir=f"{os.path.basename(model_name(model)) or 'model'}-{self.name}")
        if ref_model is not None and ref_model is model:
            raise ConfigError(
                "ref_model is the policy itself; it would move with it. Leave ref_model out: the reference is then a "
                "frozen copy of the policy as it is now (or the policy without its adapter)."
            )
        check_output_dir(args.output_dir)
        callbacks = list(callbacks or [])
        self.data_reports: dict[str, DataReport] = {}
        self._staging: str | None = None
        self.reference: ReferenceModel | None = None
        self.args = args
        # accelerate would cut the flat tensors of streams along their first axis to hand them to the ranks
        args.accelerator_config.dispatch_batches = False
        init_kwargs = args.model_init_kwargs
        processing_class = load_processing_class(
            model_name(model), processing_class, init_kwargs if isinstance(model, str) else None, args.trust_remote_code
        )
        self.tokenizer = tokenizer_of(processing_class)
        self.eos_token_ids = eos_token_ids(model)
        train_dataset = self._prepare_training_data(train_dataset)
        eval_dataset = self._prepare_split(eval_dataset, "eval") if eval_dataset is not None else None

        policy = load_model(
            model,
            auto_class=self.auto_class,
            init_kwargs=init_kwargs,
            trust_remote_code=args.trust_remote_code,
            quantization_config=quantization_config,
        )
        if args.disable_dropout:
            disable_dropout(policy)
        policy = wrap_peft(
            policy, peft_config, seed=args.seed, gradient_checkpointing=bool(args.gradient_checkpointing)
        )
        self.aux_loss_coef = enable_router_loss(policy, args.router_aux_loss_coef)
        self.layout_choice = choose_layout(policy, args.attention_layout)
        self.layout = self.layout_choice.layout
        super().__init__(
            model=policy,
            args=args,
            data_collator=data_collator or self.default_collator(),
            train_dataset=cast(Any, train_dataset),
            eval_dataset=cast(Any, eval_dataset),
            processing_class=processing_class,
            callbacks=callbacks,
            **hf_arguments,
        )
        if self.args.n_gpu > 1:  # known only now: the device is chosen by the parent's constructor
            raise ConfigError(
                f"{self.args.n_gpu} devices are visible to one process; torch.nn.DataParallel is not supported. "
                "Start one process a device (accelerate launch, preftune --num_processes), or set CUDA_VISIBLE_DEVICES."
            )
        self.train_metrics, self.eval_metrics = RunningMetrics(), RunningMetrics()
        self.tokens_seen: float | Tensor = 0.0  # on the device while training, so that no step waits for it
        self.running_totals: dict[str, Any] | None = None
        self._attach_reference(ref_model, peft_config is not None, callbacks)
        self.add_callback(_RestoreRunningTotals(self))
        self.add_callback(JsonlLogCallback())
        replace_default_progress(self.callback_handler.callbacks)
        self._say_decisions()

    # What a family provides

    @abstractmethod
    def prepare_dataset(self, dataset: RawData, split: str) -> tuple[RawData, DataReport]:
        """Raw rows of a split ("train", "eval", "eval_{name}") -> rows of ids, and what was cut or dropped."""

    @abstractmethod
    def default_collator(self) -> Callable[[list[Mapping[str, Any]]], dict[str, Any]]:
        """Rows of token ids -> a batch with a `PromptTree` under "tree"."""

    # Construction, in pieces

    def _prepare_training_data(self, dataset: RawData | None) -> RawData:
        if dataset is None:
            raise DataFormatError("train_dataset is missing; wanted a datasets.Dataset or IterableDataset.")
        if not isinstance(dataset, Dataset | IterableDataset):
            raise TypeError(
                f"train_dataset is a {type(dataset).__name__}; wanted a datasets.Dataset or IterableDataset. A list "
                "of rows becomes one with datasets.Dataset.from_list(rows); of a DatasetDict pass one split."
            )
        return self._prepare_split(dataset, "train")

    def _prepare_split(self, dataset: Any, split: str) -> Any:
        if isinstance(dataset, dict):
            return {name: self._prepare_split(part, f"{split}_{name}") for name, part in dataset.items()}
        if not isinstance(dataset, Dataset | IterableDataset):
            raise TypeError(
                f"{split} dataset is a {type(dataset).__name__}; wanted a datasets.Dataset or IterableDataset."
            )
        with PartialState().local_main_process_first():
            dataset, self.data_reports[split] = self.prepare_dataset(dataset, split)
        return dataset

    def _attach_reference(self, ref_model: Any, peft_is_fresh: bool, callbacks: list[TrainerCallback]) -> None:
        if not self.needs_reference:
            return
        if isinstance(ref_model, str):
            ref_model = load_model(ref_model, auto_class=self.auto_class, init_kwargs=self.args.model_init_kwargs)
        if ref_model is not None and self.args.disable_dropout:
            disable_dropout(ref_model)
        will_move = self.args.sync_ref_model or self.args.bema_ref_model or any(map(moves_reference, callbacks))
        self.reference = make_reference(
            self.model,
            ref_model=ref_model,
            peft_is_fresh=peft_is_fresh,
            will_move=will_move,
            precompute=self.args.precompute_ref_log_probs,
        )
        self.reference.prepare(self.accelerator)
        self.callback_handler = RefModelCallbackHandler.from_handler(self.callback_handler, self.reference)
        for callback in reference_callbacks(self.args, self.reference, callbacks):
            self.add_callback(callback)

    @property
    def reference_moves(self) -> bool:
        """Whether a callback moves the reference, one that was added later as well."""
        return any(map(moves_reference, self.callback_handler.callbacks))

    @property
    def ref_model(self) -> nn.Module | None:
        """The frozen reference module, or None where the reference is not a module of its own."""
        return self.reference.module if self.reference is not None else None

    def _say_decisions(self) -> None:
        """One line for what was decided; aloud where rows were lost or the fast layout could not be used."""
        if not self.is_world_process_zero():
            return
        for report in self.data_reports.values():
            logger.log(logging.WARNING if report.rows_dropped or report.cut.count else logging.INFO, "%s", report)
        fallback = self.args.attention_layout == "auto" and self.layout == "padded"
        logger.log(
            logging.WARNING if fallback else logging.INFO,
            "attention layout: %s (%s); reference: %s",
            self.layout,
            self.layout_choice.reason,
            self.reference.form if self.reference is not None else "none",
        )

    @property
    def column_map(self) -> dict[str, str] | None:
        """The user's names of columns; the config has turned text into a dict."""
        return cast("dict[str, str] | None", self.args.columns)

    def extra_columns(self, dataset: RawData) -> list[str]:
        """Columns of the raw rows to carry along: all others where `remove_unused_columns=False`, else none."""
        return [] if self.args.remove_unused_columns else list(dataset.column_names or [])

    # Metrics

    @property
    def metrics(self) -> RunningMetrics:
        """The accumulators of the current mode; `metrics.add(name, values)` logs a mean over rows."""
        return self.train_metrics if self.model.training else self.eval_metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what was accumulated since the last log (a collective: all ranks call it together)."""
        if "loss" in logs or "train_loss" in logs:
            logs.update(self.train_metrics.reduce())
            logs["num_tokens"] = float(self.tokens_seen)
            if isinstance(self.reference, MovableReference) and self.reference_moves:
                logs.update(self.reference.drift_metrics(self.model))
        super().log(logs, start_time)

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluates the eval set(s) of the constructor, one of them by name, or a raw or prepared dataset."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._prepare_split(eval_dataset, metric_key_prefix)
        return super().evaluate(cast(Any, eval_dataset), ignore_keys, metric_key_prefix)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = list(self.columns_read)

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Trains; `resume_from_checkpoint` falls back to the config's field of that name.

        Raises:
            CheckpointError: the checkpoint asked for is not whole.
        """
        asked = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        if isinstance(asked, str) and asked.lower() in ("true", "false"):
            asked = asked.lower() == "true"
        folder = checkpoints.resolve_checkpoint(asked, self.args.output_dir)
        if folder is not None and asked is True:
            for name in checkpoints.skipped_checkpoints(folder, self.args.output_dir):
                logger.warning("%s is not whole and was passed over; resuming from %s", name, folder)
        if self.args.should_save:
            checkpoints.clear_partial(self.args.output_dir)
        self.accelerator.wait_for_everyone()
        return super().train(resume_from_checkpoint=folder, **kwargs)

    @final
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes everything under `.partial/`, then renames it to `checkpoint-N`, then removes old checkpoints."""
        run_dir = super()._get_output_dir(trial)
        folder = f"checkpoint-{self.state.global_step}"
        partial, final_dir = os.path.join(checkpoints.partial_dir(run_dir), folder), os.path.join(run_dir, folder)
        self._staging = checkpoints.partial_dir(run_dir)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        save_running_state(self, partial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._name_best_checkpoint(run_dir, partial)
            checkpoints.publish(partial, final_dir)
            rotate_checkpoints(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging if self._staging is not None else super()._get_output_dir(trial)

    def _name_best_checkpoint(self, run_dir: str, partial: str) -> None:
        if not self.state.best_global_step:
            return
        best = os.path.join(run_dir, f"checkpoint-{self.state.best_global_step}")
        if self.state.best_global_step == self.state.global_step or os.path.isdir(best):
            self.state.best_model_checkpoint = best
        self.state.save_to_json(os.path.join(partial, TRAINER_STATE_NAME))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the policy so that `from_pretrained` loads it, also where FSDP keeps shards (all ranks call it)."""
        super().save_model(output_dir, _internal_call)
        if self.is_fsdp_enabled and not _internal_call:
            plugin: Any = self.accelerator.state.fsdp_plugin
            # transformers writes shards into checkpoints, and nothing here
            if "FULL_STATE_DICT" not in str(plugin.state_dict_type):
                self._save(output_dir, self.accelerator.get_state_dict(self.model))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Saves the policy alone: a reference adapter that we made lives in the checkpoint's extras."""
        super()._save(output_dir, state_dict)
        adapter = self.reference.adapter_name if self.reference is not None else None
        if adapter is not None and self.args.should_save and is_our_reference(cast(Any, self.model), adapter):
            shutil.rmtree(os.path.join(output_dir or self.args.output_dir, adapter), ignore_errors=True)

    @property
    def is_sharded(self) -> bool:
        """Whether weights are spread over ranks (FSDP, DeepSpeed)."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    @final
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_running_state(self, checkpoint)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.num_processes > 1:  # the losses since the last log are still each rank's own
            self._tr_loss = cast(Tensor, self.accelerator.reduce(self._tr_loss, "mean"))
        return super()._finalize_training(*args, **kwargs)

    @final
    def _restore_running_totals(self) -> None:
        if self.running_totals is None:
            return
        running, self.running_totals = self.running_totals, None
        self._tr_loss = torch.tensor(running["tr_loss"], device=self.args.device)
        self._total_loss_scalar = running["total_loss"]
        self._globalstep_last_logged = running["last_logged"]
        self._initial_global_step = 0
