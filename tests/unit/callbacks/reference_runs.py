"""Runs of a plain transformers.Trainer with callbacks of the reference, and what the policy was after every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from tests.support.models import tiny_model
from tests.support.tokenizers import make_tokenizer
from tests.unit.callbacks.tiny_trainer import tiny_trainer, train_rows

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
    defaults = {
        "max_steps": 6,
        "gradient_accumulation_steps": 1,
        "eval_strategy": "no",
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "disable_tqdm": True,
    }
    trainer = tiny_trainer(output_dir, callbacks, **{**defaults, **options})
    if steady:
        trainer.data_collator = steady_collator
    if model is not None:
        trainer = Trainer(
            model=model,
            args=trainer.args,
            train_dataset=train_rows(),
            processing_class=make_tokenizer("plain"),
            data_collator=trainer.data_collator,
            callbacks=callbacks,
        )
    return trainer


__all__ = ["EVENTS", "EventRecorder", "Recorder", "plain_trainer", "tiny_model"]
