"""Every event gets the reference, and a callback that moves it is refused where it cannot move."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DefaultFlowCallback, TrainerCallback

import preftune.experimental.bema_for_ref_model as known_path
from preftune.callbacks.bema import BEMACallback
from preftune.callbacks.handler import (
    CallbackHandlerWithRefModel,
    ReferenceMover,
    RefModelCallbackHandler,
    moves_reference,
)
from preftune.callbacks.sync_ref import SyncRefModelCallback
from preftune.errors import ReferenceError
from preftune.models.reference import DisabledAdapter, FrozenCopy
from tests.support.models import tiny_model
from tests.unit.callbacks.reference_runs import EventRecorder, plain_trainer


def test_every_event_after_construction_gets_the_reference(tmp_path):
    recorder = EventRecorder()
    trainer = plain_trainer(
        tmp_path, [recorder], max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2
    )
    reference = FrozenCopy(tiny_model(seed=1))
    trainer.callback_handler = RefModelCallbackHandler.from_handler(trainer.callback_handler, reference)
    trainer.train()
    trainer.predict(trainer.eval_dataset)
    seen = {name for name, _ in recorder.events}
    assert seen >= {
        "on_train_begin", "on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step",
        "on_step_end", "on_epoch_end", "on_log", "on_save", "on_evaluate", "on_prediction_step", "on_predict",
        "on_train_end",
    }  # fmt: skip
    for name, kwargs in recorder.events:
        if name != "on_init_end":
            assert kwargs["ref_model"] is reference.module, name
            assert kwargs["reference"] is reference, name
            assert kwargs["model"] is not None


def test_it_keeps_what_the_old_handler_had(tmp_path):
    recorder = EventRecorder()
    trainer = plain_trainer(tmp_path, [recorder])
    old = trainer.callback_handler
    old.train_dataloader = object()
    new = RefModelCallbackHandler.from_handler(old, None)
    assert new.callbacks is old.callbacks
    assert {**vars(old), "reference": None} == vars(new)
    new.call_event("on_log", trainer.args, trainer.state, trainer.control, logs={})
    assert recorder.events[-1][1]["ref_model"] is None


def test_positional_arguments_of_the_known_handler():
    """`CallbackHandlerWithRefModel(callbacks, model, ref_model, processing_class, optimizer, lr_scheduler)`."""
    policy, module = tiny_model(), tiny_model(seed=1)
    handler = CallbackHandlerWithRefModel([DefaultFlowCallback()], policy, module, "tokenizer", "optimizer", "schedule")
    assert (handler.model, handler.ref_model, handler.processing_class) == (policy, module, "tokenizer")
    assert (handler.optimizer, handler.lr_scheduler) == ("optimizer", "schedule")
    assert isinstance(handler.reference, FrozenCopy)
    assert not any(p.requires_grad for p in module.parameters())
    assert CallbackHandlerWithRefModel is RefModelCallbackHandler
    assert known_path.CallbackHandlerWithRefModel is RefModelCallbackHandler
    assert known_path.BEMACallback is BEMACallback
    handler.ref_model = None
    assert handler.ref_model is None
    assert handler.reference is None


def test_movers_are_known():
    class Mine(ReferenceMover):
        pass

    module = nn.Linear(1, 1)
    assert moves_reference(SyncRefModelCallback(module))
    assert moves_reference(BEMACallback(update_ref_model=True))
    assert moves_reference(Mine())
    assert moves_reference(Mine)
    assert not moves_reference(BEMACallback())
    assert not moves_reference(BEMACallback)
    assert not moves_reference(TrainerCallback())
    assert not moves_reference(TrainerCallback)


def test_a_mover_is_refused_on_a_reference_that_cannot_move(tmp_path):
    trainer = plain_trainer(tmp_path, [])
    handler = RefModelCallbackHandler.from_handler(trainer.callback_handler, DisabledAdapter())
    handler.add_callback(BEMACallback())
    count = len(handler.callbacks)
    with pytest.raises(ReferenceError, match=r"BEMACallback.*'disabled_adapter'"):
        handler.add_callback(BEMACallback(update_ref_model=True))
    assert len(handler.callbacks) == count
    trainer.add_callback(BEMACallback(update_ref_model=True))
    with pytest.raises(ReferenceError, match="BEMACallback"):
        RefModelCallbackHandler.from_handler(trainer.callback_handler, DisabledAdapter())
    RefModelCallbackHandler.from_handler(trainer.callback_handler, FrozenCopy(torch.nn.Linear(1, 1)))
