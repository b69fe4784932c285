"""Completions of online rounds: what is in the rows, where they go and when, and what is gathered at all.

Expected rows come from a recording reward function, which sees what the trainer sampled.
"""

from __future__ import annotations

import io
import json
import random
import re
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from rich.console import Console

from preftune.callbacks import round_completions
from preftune.callbacks.progress import RichProgressCallback
from preftune.callbacks.round_completions import CompletionsRecord, RoundCompletionsCallback, evaluated_prefix
from preftune.callbacks.round_table import print_completions
from preftune.callbacks.trackers.base import Tracker, TrackerQueue
from preftune.callbacks.trackers.jsonl import read_table
from preftune.configs.grpo import GRPOConfig
from preftune.configs.rloo import RLOOConfig
from preftune.trainers.grpo import GRPOTrainer
from preftune.trainers.rloo import RLOOTrainer
from tests.support.runs import logged, options

PROMPTS = ["the cat", "a longer prompt here", "dog", "one more of them"]


class Seen:
    """A reward function that keeps what it was given, and gives None to the first completion of each call."""

    __name__ = "seen"

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, log_extra, **_):
        rewards = [None, *(float(len(c)) for c in completions[1:])]
        log_extra("words", [len(str(c).split()) for c in completions])
        self.calls.append((list(prompts), list(completions), rewards))
        return rewards


def half(completions, **_):
    return [0.5 + 0.1 * (i % 3) for i, _ in enumerate(completions)]


def build(tmp_path, tiny_model, tokenizer, algorithm="grpo", *, rewards=None, rows=PROMPTS, **changes):
    config, trainer = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[algorithm]
    eval_dataset, callbacks = changes.pop("eval_dataset", None), changes.pop("callbacks", None)
    defaults = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 4, "max_steps": 2}
    return trainer(
        model=tiny_model(),
        reward_funcs=[half] if rewards is None else rewards,
        args=config(**options(tmp_path, **defaults | {"log_completions": True} | changes)),
        train_dataset=Dataset.from_list([{"prompt": p} for p in rows]),
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def parquet(tmp_path, name):
    return pq.read_table(tmp_path / "completions" / f"{name}.parquet").to_pylist()


class Kept(Tracker):
    name = "kept"

    def __init__(self):
        self.tables = []

    def log_scalars(self, scalars, step):
        pass

    def log_table(self, name, rows, step):
        self.tables.append((name, step, rows))

    def close(self):
        pass


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_rows_are_what_the_reward_function_saw(tmp_path, tiny_model, tokenizer, algorithm):
    seen = Seen()
    trainer = build(tmp_path, tiny_model, tokenizer, algorithm, rewards=[seen, half])
    trainer.train()
    for step, (prompts, completions, rewards) in enumerate(seen.calls, start=1):
        rows = parquet(tmp_path, f"completions_{step:05d}")
        assert list(rows[0]) == ["step", "prompt", "completion", "seen", "half", "words", "advantage"]
        assert [(r["step"], r["prompt"], r["completion"], r["seen"]) for r in rows] == [
            (step, p, c, w) for p, c, w in zip(prompts, completions, rewards)
        ]
        assert [r["words"] for r in rows] == [len(c.split()) for c in completions]
        for group in (rows[:2], rows[2:]):
            assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-6)
        assert any(r["advantage"] for r in rows)
    whole = read_table(tmp_path / "logs", "completions")
    assert [row["step"] for row in whole] == [1] * 4 + [2] * 4


def test_a_round_that_serves_several_logs_is_written_once(tmp_path, tiny_model, tokenizer):
    trainer = build(tmp_path, tiny_model, tokenizer, num_iterations=2, max_steps=4)
    trainer.train()
    assert [row["step"] for row in read_table(tmp_path / "logs", "completions")] == [1] * 4 + [3] * 4
    assert sorted(p.name for p in (tmp_path / "completions").iterdir()) == [
        "completions_00001.parquet",
        "completions_00003.parquet",
    ]


def test_evaluations_are_apart_from_training_and_from_one_another(tmp_path, tiny_model, tokenizer):
    """Three and two prompts of two completions each, in batches of two prompts: all rows of a set in one table."""
    sets = {name: Dataset.from_list([{"prompt": p} for p in PROMPTS[:n]]) for name, n in {"a": 3, "b": 2}.items()}
    evals = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "eval_dataset": sets}
    trainer = build(tmp_path, tiny_model, tokenizer, **evals)
    trainer.train()
    assert [r["prompt"] for r in parquet(tmp_path, "eval_a_completions_00002")] == [
        p for p in PROMPTS[:3] for _ in "12"
    ]
    assert len(parquet(tmp_path, "eval_b_completions_00002")) == 4
    assert len(read_table(tmp_path / "logs", "eval_b_completions")) == 4
    trainer.evaluate(Dataset.from_list([{"prompt": "who"}]), metric_key_prefix="test")
    assert [r["prompt"] for r in parquet(tmp_path, "test_completions_00002")] == ["who"] * 2


def test_trackers_get_one_row_a_prompt_where_asked_and_files_all(tmp_path, tiny_model, tokenizer):
    trainer = build(tmp_path, tiny_model, tokenizer, log_unique_prompts=True, max_steps=1)
    kept = Kept()
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, RoundCompletionsCallback)]
    callback._given = [callback._files, TrackerQueue(kept)]
    trainer.train()
    ((name, step, rows),) = kept.tables
    assert (name, step, len(rows)) == ("completions", 1, 2)
    assert len({r["prompt"] for r in rows}) == 2
    assert len(parquet(tmp_path, "completions_00001")) == 4


@pytest.mark.parametrize(("count", "shown"), [(None, 4), (2, 2), (0, 0), (-1, 0), (99, 4)])
def test_rows_on_the_console(tmp_path, tiny_model, tokenizer, capsys, count, shown):
    """They are the same ones in a second run, and choosing them draws from no random state of the process."""

    def run(folder):
        trainer = build(folder, tiny_model, tokenizer, num_completions_to_print=count, max_steps=1, report_to="none")
        trainer.train()
        return [
            line for line in capsys.readouterr().out.splitlines() if "0.50" in line or "0.60" in line or "0.70" in line
        ]

    lines = run(tmp_path / "a")
    assert len(lines) == shown
    assert run(tmp_path / "b") == lines


def test_choosing_rows_moves_no_random_state(tmp_path, tiny_model, tokenizer):
    trainer = build(tmp_path, tiny_model, tokenizer, num_completions_to_print=1)
    callback = RoundCompletionsCallback(trainer, console=Console(file=io.StringIO()), trackers=[])
    record = CompletionsRecord("train", ["a", "b"], ["c", "d"], {"r": [1.0, float("nan")]}, [0.5, -0.5])
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()
    callback.on_completions(trainer.args, trainer.state, trainer.control, record)
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 1.0})
    assert (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()) == before


def test_chats_are_kept_as_messages(tmp_path, tiny_model, tokenizer):
    rows = [[{"role": "user", "content": text}] for text in PROMPTS]
    build(tmp_path, tiny_model, tokenizer, rows=rows, max_steps=1).train()
    for row in parquet(tmp_path, "completions_00001"):
        assert row["prompt"] in rows
        assert row["completion"][0]["role"] == "assistant"


def test_nothing_is_kept_or_gathered_unless_asked_for(tmp_path, tiny_model, tokenizer, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("nobody asked")

    monkeypatch.setattr(round_completions, "gather_object", never)
    monkeypatch.setattr(CompletionsRecord, "rows", never)
    build(tmp_path, tiny_model, tokenizer, log_completions=False).train()
    assert not (tmp_path / "completions").exists()


def test_a_resumed_run_has_every_file_once(tmp_path, tiny_model, tokenizer):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    straight = build(tmp_path, tiny_model, tokenizer, **saving)
    straight.train()
    first = parquet(tmp_path, "completions_00002")
    build(tmp_path, tiny_model, tokenizer, **saving).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert parquet(tmp_path, "completions_00002") == first
    assert (tmp_path / "completions" / "superseded" / "completions_00002.parquet").exists()
    assert parquet(tmp_path, "completions_00001")


def test_a_full_disk_costs_one_warning(tmp_path, tiny_model, tokenizer, caplog):
    (tmp_path / "completions").write_text("a file where the folder should be")
    trainer = build(tmp_path, tiny_model, tokenizer)
    trainer.train()
    assert len([r for r in caplog.records if "Tracker 'parquet'" in r.getMessage()]) == 1
    assert len(logged(trainer, "reward")) == 2


def test_columns_of_a_record():
    """A reward or a column that is called like another column does not hide it."""
    record = CompletionsRecord("train", ["p"], ["c"], {"prompt": [1.0], "r": [float("nan")]}, [0.0], {"r": ["x"]})
    assert record.rows() == [
        {"prompt": "p", "completion": "c", "prompt_reward": 1.0, "r": None, "r_reward": "x", "advantage": 0.0}
    ]


def test_which_evaluation_a_log_is_of():
    assert evaluated_prefix({"eval_a_runtime": 1.0, "epoch": 2}) == "eval_a"
    assert evaluated_prefix({"train_runtime": 1.0, "train_loss": 2}) is None
    assert evaluated_prefix({"loss": 1.0}) is None


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_a_model_writes_cannot_touch_the_terminal(encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=80, _environ={})
    rows = [
        {
            "step": 1,
            "prompt": "[bold]x[/nope]",
            "completion": "a\x1b[2J\rb é" + "z" * 5000,
            "r": 0.123,
            "advantage": None,
        }
    ]
    print_completions(rows, console, title="t")
    file.seek(0)
    text = file.read()
    assert "\x1b" not in text and "\r" not in text
    assert "[bold]x[/nope]" in text and "0.12" in text and "[...]" in text.replace("\n", "")
    assert len(text) < 5000


def test_messages_on_the_console():
    console = Console(file=io.StringIO(), width=80, _environ={})
    chat = [{"role": "user", "content": "Hi"}]
    print_completions(
        [{"step": 1, "prompt": chat, "completion": json.dumps(1), "r": 1.0, "advantage": 0.0}], console, title="t"
    )
    assert "user: Hi" in console.file.getvalue()


def test_a_table_appears_above_a_live_panel(tmp_path, tiny_model, tokenizer, monkeypatch):
    """The panel is taken away before the table is written, and drawn again below it."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    panel = RichProgressCallback(Console(force_terminal=True, width=100, height=60, _environ={}))
    build(tmp_path, tiny_model, tokenizer, callbacks=[panel], max_steps=1, num_completions_to_print=1).train()
    before, table, after = re.split(r"(completions, step 1.*?0\.\d\d)", screen.getvalue(), maxsplit=1, flags=re.S)
    assert before.rstrip("\r\n\x1b[0;12345678m ").endswith("\x1b[2K") and "preftune" in after
