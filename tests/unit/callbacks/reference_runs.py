"""Runs of a plain transformers.Trainer with callbacks of the reference, and what the policy was after every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.support.models import tiny_model
from tests.support.tokenizers import make_tokenizer
from tests.unit.callbacks.tiny_trainer import eval_rows, random_collator, train_rows

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Recorder(TrainerCallback):
    """Keeps the keyword arguments of every event, and the parameters of policy and reference after every step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.policy: list[dict[str, torch.Tensor]] = []
        self.reference: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args, state, control, model=None, reference=None, **kwargs):
        self._keep(model, reference)

    def on_step_end(self, args, state, control, model=None, reference=None, **kwargs):
        self._keep(model, reference)

    def _keep(self, model, reference) -> None:
        self.policy.append({n: p.detach().clone() for n, p in model.named_parameters()})
        if reference is not None:
            self.reference.append({n: p.detach().clone() for n, p in reference.own_parameters().items()})


class EventRecorder(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []


def _record(name: str):
    def event(self, args, state, control, **kwargs):
        self.events.append((name, kwargs))

    return event


for _name in EVENTS:
    setattr(EventRecorder, _name, _record(_name))


def steady_collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Draws no random numbers: the loader is one batch ahead, so that a resume could not repeat them."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def plain_trainer(
    output_dir: Path, callbacks: list, *, model: Any = None, steady: bool = False, **options: Any
) -> Trainer:
    """Six steps on the CPU, constant learning rate, no evaluation."""
    defaults: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": 3,
    }
    return Trainer(
        model=model if model is not None else tiny_model(attention_dropout=0.2),
        args=TrainingArguments(output_dir=str(output_dir), **{**defaults, **options}),
        train_dataset=train_rows(),
        eval_dataset=eval_rows(),
        processing_class=make_tokenizer("plain"),
        data_collator=steady_collator if steady else random_collator,
        callbacks=callbacks,
    )


__all__ = ["EVENTS", "EventRecorder", "Recorder", "plain_trainer", "tiny_model"]
