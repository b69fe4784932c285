"""What every trainer shares: construction, the reference, metrics, evaluation of raw data, whole checkpoints.

An algorithm never touches this file: it overrides `loss` (or `batch_loss` for a new family) in its leaf.
"""

from __future__ import annotations

import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast, final

from accelerate import PartialState
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from preftune.callbacks.attach import moves_reference
from preftune.callbacks.jsonl_log import JsonlLogCallback
from preftune.callbacks.progress import replace_default_progress
from preftune.configs.base import BaseConfig
from preftune.data.multimodal import images_read, is_multimodal
from preftune.data.report import DataReport
from preftune.errors import ConfigError, DataFormatError
from preftune.models.adapters import is_our_reference
from preftune.models.attention import Layout
from preftune.models.dropout import disable_dropout
from preftune.models.load import (
    check_quantization,
    enable_router_loss,
    eos_token_ids,
    load_model,
    load_processing_class,
    model_name,
    tokenizer_of,
    wrap_peft,
)
from preftune.models.logprobs import choose_layout
from preftune.models.reference import MovableReference, ReferenceModel, Stored
from preftune.trainers import extras
from preftune.trainers import state as checkpoints
from preftune.trainers.arguments import own_config
from preftune.trainers.evaluation import check_best_metric, check_split_name, untraced
from preftune.trainers.extras import RestoreRunningTotals, load_running_state, save_running_state
from preftune.trainers.manifest import RunManifest
from preftune.trainers.metrics import RunningMetrics
from preftune.trainers.reference import attach_reference

logger = logging.getLogger(__name__)

RawData = Dataset | IterableDataset
EvalData = RawData | DatasetDict | IterableDatasetDict | dict[str, RawData]


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
    needs_reference: bool = False  # whether the algorithm compares with a reference model

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
        args = own_config(self.config_class, args, model, self.name)
        if ref_model is not None and ref_model is model:
            raise ConfigError(
                "ref_model is the policy itself; it would move with it. Leave ref_model out: the reference is then a "
                "frozen copy of the policy as it is now (or the policy without its adapter)."
            )
        checkpoints.check_output_dir(args.output_dir)
        check_quantization(quantization_config, args.model_init_kwargs)
        callbacks = list(callbacks or [])
        self.data_reports: dict[str, DataReport] = {}
        self._staging: str | None = None
        self.is_evaluating = False
        self.reference: ReferenceModel | None = None
        self.args = args
        init_kwargs = args.model_init_kwargs
        processing_class = load_processing_class(
            model_name(model), processing_class, init_kwargs if isinstance(model, str) else None, args.trust_remote_code
        )
        processing_class = self.adapt_processing_class(processing_class)
        self.tokenizer = tokenizer_of(processing_class)
        self.processor = processing_class if is_multimodal(processing_class) else None
        self.eos_token_ids = eos_token_ids(model, self.tokenizer, init_kwargs if isinstance(model, str) else None)
        train_dataset = self._prepare_training_data(train_dataset)
        eval_dataset = self._prepare_split(eval_dataset, "eval") if eval_dataset is not None else None
        check_best_metric(args, eval_dataset)

        policy = self.load_policy(model, quantization_config)
        if args.disable_dropout:
            disable_dropout(policy)
        policy = wrap_peft(
            policy, peft_config, seed=args.seed, gradient_checkpointing=bool(args.gradient_checkpointing)
        )
        self.aux_loss_coef = enable_router_loss(policy, args.router_aux_loss_coef)
        images = images_read(self.columns_read, self.processor, train_dataset, eval_dataset)
        self.layout_choice = choose_layout(policy, args.attention_layout, images=images)
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
        if self.needs_reference:
            attach_reference(self, ref_model, peft_is_fresh=peft_config is not None, callbacks=callbacks)
        self.add_callback(RestoreRunningTotals(self))
        self.add_callback(JsonlLogCallback())
        self.add_callback(RunManifest(self))
        replace_default_progress(self.callback_handler.callbacks)
        self._say_decisions()

    # What a family provides

    @abstractmethod
    def prepare_dataset(self, dataset: RawData, split: str) -> tuple[RawData, DataReport]:
        """Raw rows of a split ("train", "eval", "eval_{name}") -> rows of ids, and what was cut or dropped."""

    @abstractmethod
    def default_collator(self) -> Callable[[list[Mapping[str, Any]]], dict[str, Any]]:
        """Rows of token ids -> a batch with a `PromptTree` under "tree"."""

    def load_policy(self, model: str | PreTrainedModel, quantization_config: Any) -> nn.Module:
        """The model to train, before its dropout is set and an adapter is put on."""
        return load_model(
            model,
            auto_class=self.auto_class,
            init_kwargs=self.args.model_init_kwargs,
            trust_remote_code=self.args.trust_remote_code,
            quantization_config=quantization_config,
        )

    def adapt_processing_class(self, processing_class: Any) -> Any:
        """The tokenizer or processor to use and to save; a changed one is a copy. By default the one given."""
        return processing_class

    def own_parts(self) -> dict[str, Any]:
        """What moves besides policy, reference and callbacks: objects with `state_dict` and `load_state_dict`."""
        return {}

    def rank_state(self) -> dict[str, Any]:
        """What this rank alone must go on with: nested dicts of tensors and plain values; empty for nothing."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Puts back what `rank_state` gave, where it gave anything."""

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
            raise TypeError(f"{split} dataset is a {type(dataset).__name__}; wanted a Dataset or IterableDataset.")
        with PartialState().local_main_process_first():
            dataset, self.data_reports[split] = self.prepare_dataset(dataset, split)
        return dataset

    @property
    def held_sets(self) -> list[RawData]:
        """The datasets of the constructor, prepared: to train on, and all to evaluate on."""
        evals = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        return [cast(Any, rows) for rows in [self.train_dataset, *evals] if rows is not None]

    @property
    def stores_reference(self) -> bool:
        """Whether the reference is numbers from before training."""
        return False

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
            logger.log(logging.WARNING if report.is_bad_news else logging.INFO, "%s", report)
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
        if not self.is_evaluating and ("loss" in logs or "train_loss" in logs):
            logs.update(self.train_metrics.reduce())
            logs["num_tokens"] = float(self.tokens_seen)
            if isinstance(self.reference, MovableReference) and self.reference_moves:
                logs.update(self.reference.drift_metrics(self.model))
        super().log(logs, start_time)

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluates without a trace in training; the metrics are those of training, under `eval_`.

        Args:
            eval_dataset: Raw or prepared rows, or a dict of such sets, whose metrics are called `eval_{name}_...`; the
                name of one set of the constructor's dict; None: the set or sets of the constructor.

        Raises:
            ConfigError: no set of that name.
            DataFormatError: rows that cannot be used, or none at all.
        """
        with untraced(self):
            if eval_dataset is None or isinstance(eval_dataset, str):
                if eval_dataset is not None:
                    check_split_name(eval_dataset, self.eval_dataset)
                return super().evaluate(cast(Any, eval_dataset), ignore_keys, metric_key_prefix)
            sets = self._prepare_split(eval_dataset, metric_key_prefix)
            if not isinstance(sets, dict):
                return super().evaluate(sets, ignore_keys, metric_key_prefix)
            metrics: dict[str, float] = {}
            for name, rows in sets.items():
                metrics |= super().evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics

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

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Loads the weights; virtual tokens come with the running state, for PEFT cannot go on from saved ones."""
        if extras.virtual_tokens(self) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if extras.virtual_tokens(self) is None:
            super()._load_best_model()
        elif self.state.best_model_checkpoint is not None:
            extras.load_virtual_tokens(self, self.state.best_model_checkpoint)

    @final
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_running_state(self, checkpoint)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.num_processes > 1:  # the losses since the last log are still each rank's own
            self._tr_loss = cast(Tensor, self.accelerator.reduce(self._tr_loss, "mean"))
        if isinstance(self.reference, Stored):
            self.reference.save()
        return super()._finalize_training(*args, **kwargs)
