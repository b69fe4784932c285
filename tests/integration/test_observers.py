"""The law: a run ends with the same weights, optimizer and reference, bit for bit, whoever watches it.

Dropout in the adapter and in attention, gradient checkpointing, two micro-batches a step, an evaluation at every step,
a reference that moves: one stray draw, or one module left in another mode, gives another sha256.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import random
import sys
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from transformers import TrainerCallback

from preftune import LogCompletionsCallback, RichProgressCallback, WeaveCallback
from preftune.callbacks import completions as completions_module
from preftune.callbacks.completions import TABLE
from preftune.callbacks.health import HealthCallback
from preftune.callbacks.round_completions import CompletionsObserver, RoundCompletionsCallback
from preftune.callbacks.trackers.base import Tracker
from preftune.callbacks.trackers.jsonl import read_table
from preftune.configs.dpo import DPOConfig
from preftune.configs.grpo import GRPOConfig
from preftune.trainers.dpo import DPOTrainer
from preftune.trainers.grpo import GRPOTrainer
from tests.support.runs import digest, options
from tests.unit.callbacks.test_weave import FakeWeave

SHARED = {
    "max_steps": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True, "disable_dropout": False,
    "eval_strategy": "steps", "eval_steps": 1, "sync_ref_model": True, "ref_model_sync_steps": 1, "beta": 0.1,
}  # fmt: skip
ALGORITHMS = ["dpo", "grpo"]


def letters(completions, **_):
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


def build(folder, algorithm, tiny_model, tokenizer, rows, **changes):
    config, trainer, more, own = {
        "dpo": (DPOConfig, DPOTrainer, {}, {}),
        "grpo": (
            GRPOConfig, GRPOTrainer, {"reward_funcs": letters},
            {"num_generations": 2, "max_completion_length": 4, "per_device_eval_batch_size": 4},
        ),
    }[algorithm]  # fmt: skip
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.2)
    return trainer(
        model=tiny_model(attention_dropout=0.2),
        args=config(**options(folder, **SHARED | own | changes)),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:3]),
        processing_class=tokenizer,
        peft_config=lora,
        **more,
    )


class Draws(TrainerCallback):
    """What an observer must not do."""

    def on_step_end(self, args, state, control, **kwargs):
        random.random(), np.random.random(), torch.rand(())


class Down(Tracker):
    name = "down"

    def log_scalars(self, scalars, step):
        raise OSError("down")

    def log_table(self, name, rows, step):
        raise OSError("down")

    def close(self):
        raise OSError("down")


class Stuck(Down):
    """Hangs in its first write until the test is over."""

    name = "stuck"

    def __init__(self, over):
        self.over = over

    def log_table(self, name, rows, step):
        self.over.wait(60)


def draw_badly(model, tokenizer, prompts, config):
    torch.manual_seed(random.randrange(9))
    model.train()
    tokenizer.padding_side = "left"
    return [[7, 8] for _ in prompts]


def score(prompt, completion):
    return random.random() + np.random.random() + torch.rand(()).item()


def sampled(trainer, **changes):
    return LogCompletionsCallback(trainer, freq=1, max_new_tokens=4, do_sample=True, **changes)


OBSERVERS = {
    "progress": lambda trainer, over: RichProgressCallback(Console(file=io.StringIO(), force_terminal=True)),
    "health": lambda trainer, over: HealthCallback(),
    "completions": lambda trainer, over: sampled(trainer),
    "beams": lambda trainer, over: LogCompletionsCallback(trainer, freq=1, max_new_tokens=3, num_beams=2),
    "bad_generate": lambda trainer, over: sampled(trainer, generate=draw_badly),
    "tracker_down": lambda trainer, over: sampled(trainer, trackers=[Down()]),
    "tracker_stuck": lambda trainer, over: sampled(trainer, trackers=[Stuck(over)]),
    "weave": lambda trainer, over: WeaveCallback(trainer, "p", {"s": score}, max_new_tokens=4, do_sample=True),
    "rounds": lambda trainer, over: RoundCompletionsCallback(trainer),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny_model, tokenizer, preference_rows):
    """sha256 of each algorithm's run that nobody watches (but for the log that is always written)."""
    found = {}
    for algorithm in ALGORITHMS:
        folder = tmp_path_factory.mktemp(algorithm)
        trainer = build(folder, algorithm, tiny_model, tokenizer, preference_rows["text"])
        trainer.train()
        found[algorithm] = digest(trainer)
    return found


@pytest.fixture
def watched(tmp_path, tiny_model, tokenizer, preference_rows, monkeypatch):
    """`watched(algorithm, observers, **config)`: the sha256 of a run with these observers."""
    over = threading.Event()
    monkeypatch.setattr(completions_module, "FLUSH_TIMEOUT", 0.2)
    monkeypatch.setitem(sys.modules, "weave", FakeWeave())

    def run(algorithm, observers, **changes):
        trainer = build(tmp_path, algorithm, tiny_model, tokenizer, preference_rows["text"], **changes)
        for observer in observers:
            trainer.add_callback(observer(trainer, over))
        trainer.train()
        return digest(trainer)

    yield run
    over.set()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", OBSERVERS)
def test_each_alone(alone, watched, algorithm, name, caplog):
    if name == "rounds" and algorithm != "grpo":
        pytest.skip("rounds are those of online trainers")
    assert watched(algorithm, [OBSERVERS[name]]) == alone[algorithm]
    if name.startswith("tracker_"):
        assert len([r for r in caplog.records if f"Tracker '{name[8:]}'" in r.getMessage()]) == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_together(alone, watched, tmp_path, algorithm):
    observers = [make for name, make in OBSERVERS.items() if name != "rounds"]
    more = {"log_completions": True, "num_completions_to_print": 1} if algorithm == "grpo" else {}
    assert watched(algorithm, observers, **more) == alone[algorithm]
    rows = read_table(tmp_path / "logs", TABLE)
    scored = [row for row in rows if "ref_logp" in row]
    assert scored and all(
        row["implicit_reward"] == pytest.approx(0.1 * (row["logp"] - row["ref_logp"]), abs=1e-6) for row in scored
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_control(alone, watched, algorithm):
    """An observer that draws does change the run, so the tests above can fail."""
    assert watched(algorithm, [lambda trainer, over: Draws()]) != alone[algorithm]


def open_run(stack, name, folder, monkeypatch):
    """Opens a run of that library, offline; it ends with the stack."""
    if name == "wandb":
        import wandb

        for key, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DISABLE_WEAVE": "true"}.items():
            monkeypatch.setenv(key, value)
        stack.enter_context(wandb.init(project="p", dir=folder))
    elif name == "comet_ml":
        import comet_ml

        config = comet_ml.ExperimentConfig(
            offline_directory=str(folder), log_code=False, log_git_metadata=False, auto_output_logging=False,
            log_env_details=False,
        )  # fmt: skip
        stack.callback(comet_ml.start(online=False, api_key="x" * 25, experiment_config=config).end)
    elif name == "trackio":
        monkeypatch.setenv("TRACKIO_DIR", str(folder))
        import trackio

        trackio.init(project="q", name="r", embed=False)
        stack.callback(trackio.finish)
    elif name == "mlflow":
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{folder}/ml.db")
        experiment = mlflow.MlflowClient().create_experiment("e", artifact_location=(folder / "artifacts").as_uri())
        stack.enter_context(mlflow.start_run(experiment_id=experiment))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["wandb", "comet_ml", "trackio", "mlflow", "tensorboard"])
def test_each_tracker(alone, watched, tmp_path, monkeypatch, caplog, algorithm, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    more = {"report_to": "tensorboard"} if name == "tensorboard" else {}
    more |= {"log_completions": True} if algorithm == "grpo" else {}
    with ExitStack() as stack:
        open_run(stack, name, tmp_path, monkeypatch)
        assert watched(algorithm, [OBSERVERS["completions"]], **more) == alone[algorithm]
    assert not [r for r in caplog.records if r.name.startswith("preftune") and r.levelno >= logging.WARNING]


def test_rows_of_a_round_are_shown_to_any_observer(tmp_path, tiny_model, tokenizer, preference_rows):
    """The figures of a log follow from the rows that an observer saw."""
    records = []

    class Keeps(CompletionsObserver):
        def on_completions(self, args, state, control, record, **kwargs):
            records.append(record)

    trainer = build(tmp_path, "grpo", tiny_model, tokenizer, preference_rows["text"], eval_strategy="no")
    trainer.add_callback(Keeps())
    trainer.train()
    means = [np.mean(record.rewards["letters"]) for record in records]
    assert [e["reward"] for e in trainer.state.log_history if "reward" in e] == pytest.approx(means)
    assert all(record.split == "train" and len(record.rows()) == 4 for record in records)
