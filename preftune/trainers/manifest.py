"""RunManifest: `{output_dir}/run.json`, what a run was, for the report, `preftune compare` and whoever asks later.

Rank zero writes it when training begins and again when it ends. Nothing in it is read back by training, and a manifest
that cannot be written costs a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from datasets import Dataset
from torch.utils.data import DataLoader, SequentialSampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from preftune.callbacks.environment import MANIFEST, environment, read_manifest
from preftune.callbacks.findings import is_training
from preftune.callbacks.formatting import plain
from preftune.callbacks.trackers.jsonl import strict
from preftune.data.rounds import RoundSampler
from preftune.data.samplers import EpochSampler, epoch_order
from preftune.errors import ConfigError
from preftune.models.load import model_name

if TYPE_CHECKING:
    from preftune.trainers.base import BaseTrainer

logger = logging.getLogger(__name__)

VERSION = 1
_SECRET = re.compile(r"(^|_)(api_key|access_key|password|secret|hub_token|auth_token|use_auth_token)$|^token$", re.I)
_MEDIA = re.compile(r"\b(Image|Audio|Video)\(")
_SAMPLED_ROWS, _LONGEST_ORDER = 256, 10_000_000
_NOTHING = ("None", "False", "[]", "''", "'none'", "'auto'")
_CHOSEN_BY_THE_MACHINE = ("accelerator_config", "use_cpu", "dataloader_pin_memory", "do_eval")
_SEEDS = ("seed", "data_seed", "full_determinism")


class RunManifest(TrainerCallback):
    """Writes the manifest of a trainer's run; a resumed run keeps the beginning of the first one."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer
        self._manifest: dict[str, Any] = {}
        self._began = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._began = time.monotonic()
        if not state.is_world_process_zero:
            return
        now = _now()
        earlier = read_manifest(args.output_dir) if state.global_step else None
        self._manifest = describe(self._trainer, state, kwargs.get("train_dataloader"))
        self._manifest["started"] = earlier["started"] if earlier and "started" in earlier else now
        if state.global_step:
            resumed = list(earlier.get("resumed", [])) if earlier else []
            self._manifest["resumed"] = [*resumed, {"step": state.global_step, "time": now}]
        self._write(args)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self._manifest:
            self._manifest["result"] = {
                "finished": _now(),
                "seconds": round(time.monotonic() - self._began, 3),
                "steps": state.global_step,
                "metrics": final_metrics(state.log_history),
            }
            self._write(args)

    def _write(self, args: TrainingArguments) -> None:
        path = Path(args.output_dir or ".") / MANIFEST
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            staged = path.with_name(f".{MANIFEST}.new")
            staged.write_text(
                json.dumps(strict(plain(self._manifest)), indent=1, allow_nan=False) + "\n", encoding="utf-8"
            )
            os.replace(staged, path)
        except OSError as error:
            logger.warning("%s could not be written (%s); training goes on", path, error)


def describe(trainer: BaseTrainer, state: TrainerState, train_dataloader: Any = None) -> dict[str, Any]:
    """The manifest of a run that is about to begin: JSON-able values, secrets left out."""
    args = trainer.args
    return {
        "manifest_version": VERSION,
        "trainer": type(trainer).__name__,
        "model": model_name(trainer.model),
        "parameters": _parameters(trainer),
        "max_steps": state.max_steps,
        "config": without_secrets(config_values(args)),
        "config_changed": changed_fields(args),
        "seeds": {name: vars(args)[name] for name in _SEEDS},
        "decisions": _decisions(trainer),
        "environment": dict(environment()),
        "data": {
            "train": dataset_identity(trainer.train_dataset),
            "row_order": row_order(train_dataloader),
            "reports": {name: report.to_dict() for name, report in trainer.data_reports.items()},
        },
    }


def config_values(args: Any) -> dict[str, Any]:
    """The config as JSON-able values; what has no JSON form (a lambda) as its short description."""
    try:
        return args.to_dict()
    except ConfigError:
        return {field.name: plain(vars(args)[field.name]) for field in fields(args) if field.init}


def without_secrets(values: Any) -> Any:
    """A copy in which every entry whose name says that it is a secret has lost its value."""
    if isinstance(values, Mapping):
        return {
            name: "<left out>" if _SECRET.search(str(name)) and value is not None else without_secrets(value)
            for name, value in values.items()
        }
    return [without_secrets(item) for item in values] if isinstance(values, list) else values


def changed_fields(args: Any) -> list[str]:
    """Fields of a config that do not have the default value of their class; no, none, auto and nothing are one."""
    changed = []
    for field in fields(args):
        if not field.init or field.name in _CHOSEN_BY_THE_MACHINE:
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        value, default = plain(vars(args)[field.name]), plain(default)
        if repr(value) not in _NOTHING or repr(default) not in _NOTHING:
            changed += [field.name] if value != default else []
    return changed


def dataset_identity(rows: Any) -> dict[str, Any]:
    """Rows, columns, the fingerprint of `datasets`, and sha256 over up to 256 rows spread evenly over the set."""
    if not isinstance(rows, Dataset):
        return {"streaming": True}
    # no transform, which may draw random numbers, and nothing that has to be decoded
    hashed = [name for name, feature in rows.features.items() if not _MEDIA.search(str(feature))]
    values = rows.with_format(None).select_columns(hashed)
    sha = hashlib.sha256(f"{len(rows)}".encode())
    for number in range(0, len(rows), max(1, -(-len(rows) // _SAMPLED_ROWS))):
        sha.update(json.dumps(plain(values[number]), sort_keys=True).encode())
    return {
        "rows": len(rows),
        "columns": list(rows.column_names),
        "fingerprint": rows._fingerprint,
        "sampled_sha256": sha.hexdigest(),
    }


def row_order(loader: Any) -> dict[str, Any] | None:
    """Number of rows and sha256 of their order in the first epoch; None where it is not known beforehand.

    Draws nothing from any random state that training uses.
    """
    sampler = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if isinstance(sampler, RoundSampler):
        order = epoch_order(sampler.rows, sampler.seed, 0, sampler.shuffle) if sampler.rows < _LONGEST_ORDER else None
    else:
        order = _order_of(get_sampler(loader)) if sampler is not None else None
    if order is None:
        return None
    return {"rows": len(order), "sha256": hashlib.sha256(repr(order).encode()).hexdigest()}


def _order_of(sampler: Any) -> list[int] | None:
    if not isinstance(sampler, SeedableRandomSampler | EpochSampler | SequentialSampler):
        return None
    length = len(sampler.data_source)
    if length > _LONGEST_ORDER:
        return None
    if isinstance(sampler, EpochSampler):
        return epoch_order(length, sampler.seed, 0, sampler.shuffle)
    if isinstance(sampler, SequentialSampler):
        return list(range(length))
    if sampler.replacement or sampler.num_samples != length:
        return None
    generator = torch.Generator().manual_seed(sampler.initial_seed)  # as the sampler does, with a generator of its own
    return torch.randperm(length, generator=generator).tolist()


def final_metrics(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The last log of training, the last value of each `eval_` metric and the summary, as one mapping."""
    metrics: dict[str, Any] = {}
    for entry in history:
        if is_training(entry):
            metrics = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        metrics |= {name: plain(value) for name, value in entry.items() if name != "step"}
    return metrics


def _decisions(trainer: BaseTrainer) -> dict[str, Any]:
    """What was decided for the user, and why."""
    args, model = trainer.args, trainer.model
    parameters = iter(model.parameters())
    return {
        "attention_layout": trainer.layout,
        "attention_layout_reason": trainer.layout_choice.reason,
        "reference": trainer.reference.form if trainer.reference is not None else "none",
        "reference_moves": trainer.reference_moves,
        "device": str(args.device),
        "processes": args.world_size,
        "mixed_precision": trainer.accelerator.mixed_precision,
        "dtype": str(next(parameters).dtype).removeprefix("torch."),
        "train_batch_size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "callbacks": [type(callback).__name__ for callback in trainer.callback_handler.callbacks],
    }


def _parameters(trainer: BaseTrainer) -> dict[str, int] | None:
    if trainer.is_sharded:
        return None  # a rank knows its shards only
    counts = [(p.numel(), p.requires_grad) for p in trainer.model.parameters()]
    return {"all": sum(n for n, _ in counts), "trainable": sum(n for n, learns in counts if learns)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
