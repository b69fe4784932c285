"""HealthCallback: says each finding once and again much later, stops where asked, and changes no run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainerState

from preftune.callbacks.health import HealthCallback
from preftune.errors import ConfigError
from tests.unit.callbacks.tiny_trainer import tiny_trainer, weights_hash

ARGS = SimpleNamespace(output_dir="none")


def run(callback: HealthCallback, losses: list[float], *, first: int = 1, every: int = 1, rank_zero: bool = True):
    """Sends logs with these losses; returns (state, control)."""
    state = TrainerState(is_world_process_zero=rank_zero)
    control = TrainerControl()
    callback.on_train_begin(ARGS, state, control)
    for i, loss in enumerate(losses):
        state.global_step = first + i * every
        callback.on_log(ARGS, state, control, logs={"loss": loss})
        if control.should_training_stop:
            break
    return state, control


def said(caplog) -> list[str]:
    return [r.message for r in caplog.records if r.name == "preftune.callbacks.health"]


def test_says_what_and_what_to_do_once(caplog):
    callback = HealthCallback()
    run(callback, [0.5, math.nan, math.nan, math.nan])
    (message,) = said(caplog)
    assert message.startswith("Health at step 2: The loss") and "learning_rate" in message
    assert message.endswith("(loss_not_finite)")
    assert callback.findings["loss_not_finite"].step == 2


def test_again_after_ten_times_as_many_steps(caplog):
    run(HealthCallback(), [math.nan] * 120)
    steps = [int(message.split(":")[0].split()[-1]) for message in said(caplog)]
    assert steps == [1, 10, 100]


def test_stops_where_asked(caplog):
    _, control = run(HealthCallback(stop_on=["loss_not_finite"]), [0.5, 0.5, math.inf, 0.5])
    assert control.should_training_stop and "Training stops here" in said(caplog)[0]
    state, control = run(HealthCallback(), [0.5, math.inf])
    assert not control.should_training_stop and state.global_step == 2


def test_other_ranks_are_silent_but_stop_too(caplog):
    _, control = run(HealthCallback(stop_on=["loss_not_finite"]), [math.nan], rank_zero=False)
    assert control.should_training_stop and said(caplog) == []


@pytest.mark.parametrize("stop_on", [["loss_not_finit"], "loss_not_finite"])
def test_wrong_names(stop_on):
    with pytest.raises(ConfigError, match="loss_not_finite"):
        HealthCallback(stop_on=stop_on)


def test_a_resumed_run_knows_how_it_began(caplog):
    """Entropy was 1 before the interruption and is 0.01 after it."""
    callback = HealthCallback()
    state = TrainerState(is_world_process_zero=True, global_step=10)
    state.log_history = [{"step": i, "loss": 0.5, "entropy": 1.0} for i in range(1, 11)]
    callback.on_train_begin(ARGS, state, TrainerControl())
    for step in range(11, 17):
        state.global_step = step
        callback.on_log(ARGS, state, TrainerControl(), logs={"loss": 0.5, "entropy": 0.01})
    assert set(callback.findings) == {"entropy_collapse"}


def test_a_second_run_starts_anew():
    callback = HealthCallback()
    run(callback, [math.nan])
    run(callback, [0.5])
    assert callback.findings == {}


def test_odd_logs():
    callback = HealthCallback()
    state = TrainerState(is_world_process_zero=True, global_step=1)
    for logs in (None, {}, {"eval_loss": math.nan}, {"loss": "text"}, {"loss": torch.tensor(math.nan), "x": [1]}):
        callback.on_log(ARGS, state, TrainerControl(), logs=logs)
    assert set(callback.findings) == {"loss_not_finite"}
    callback.on_log(ARGS, state, TrainerControl(), logs={"loss": np.float32(0.5), "grad_norm": np.zeros(1000)})


def test_changes_no_run(tmp_path):
    hashes = []
    for callbacks in ([], [HealthCallback()]):
        trainer = tiny_trainer(tmp_path, callbacks, lora=True)
        trainer.train()
        hashes.append(weights_hash(trainer.model))
    assert hashes[0] == hashes[1]
