"""The log that is always on: what is in the file after resumes, restarts and crashes, and trackers that misbehave."""

from __future__ import annotations

import copy
import json
import logging
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState

from preftune.callbacks.jsonl_log import JsonlLogCallback
from preftune.callbacks.trackers.base import Tracker, TrackerQueue
from preftune.callbacks.trackers.jsonl import JsonlTracker, jsonl_tracker, read_metrics, read_table
from tests.unit.callbacks.tiny_trainer import tiny_trainer


def steps(logs_dir) -> list[int]:
    return [row["step"] for row in read_metrics(logs_dir)]


def raw_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestFile:
    def test_a_line_is_complete_when_the_call_returns(self, tmp_path):
        tracker = JsonlTracker(tmp_path)
        tracker.log_scalars({"loss": 0.5, "rewards/margins": 1.0}, step=3)
        tracker.log_table("samples", [{"step": 3, "text": "a\nb \u2028 é"}, {"step": 3, "text": None}], step=3)
        (row,) = raw_lines(tmp_path / "metrics.jsonl")
        assert row.pop("wall_time") > 1.6e9
        assert row == {"step": 3, "loss": 0.5, "rewards/margins": 1.0}
        assert read_table(tmp_path, "samples") == [{"step": 3, "text": "a\nb \u2028 é"}, {"step": 3, "text": None}]
        tracker.close()

    def test_numbers_that_json_lacks(self, tmp_path):
        JsonlTracker(tmp_path).log_scalars({"a": math.nan, "b": math.inf, "c": -math.inf, "d": "text"}, step=1)

        def refuse(name):
            raise AssertionError(f"{name} is no JSON")

        json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
        (row,) = read_metrics(tmp_path)
        assert math.isnan(row["a"])
        assert (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, "text")

    def test_surrogates_and_nothing_at_all(self, tmp_path):
        tracker = JsonlTracker(tmp_path)
        tracker.log_table("t", [{"text": "\ud800"}], step=1)
        tracker.log_table("t", [], step=2)
        assert read_table(tmp_path, "t") == [{"step": 1, "text": "\ud800"}]
        assert read_table(tmp_path, "absent") == []

    def test_a_line_cut_off_by_a_crash_costs_only_itself(self, tmp_path):
        JsonlTracker(tmp_path).log_scalars({"loss": 1.0}, step=1)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')
        assert steps(tmp_path) == [1]
        JsonlTracker(tmp_path).log_scalars({"loss": 3.0}, step=3)
        assert steps(tmp_path) == [1, 3]

    def test_resuming_sets_later_lines_aside(self, tmp_path):
        first = JsonlTracker(tmp_path)
        for step in (1, 2, 3, 4):
            first.log_scalars({"loss": step}, step)
            first.log_table("t", [{"text": str(step)}], step)
        second = JsonlTracker(tmp_path)
        second.begin(2)
        second.log_scalars({"loss": 30}, 3)
        second.log_table("t", [{"text": "30"}], 3)
        assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(1, 1), (2, 2), (3, 30)]
        assert [r["text"] for r in read_table(tmp_path, "t")] == ["1", "2", "30"]
        assert [r["step"] for r in raw_lines(tmp_path / "superseded" / "metrics.jsonl")] == [3, 4]
        assert [r["step"] for r in raw_lines(tmp_path / "superseded" / "tables" / "t.jsonl")] == [3, 4]

    def test_a_fresh_run_in_an_old_folder_sets_the_old_one_aside_and_keeps_its_own_first_evaluation(self, tmp_path):
        old = JsonlTracker(tmp_path)
        old.log_scalars({"eval_loss": 1.0}, 0)
        old.log_scalars({"loss": 1.0}, 1)
        new = JsonlTracker(tmp_path)
        new.log_scalars({"eval_loss": 2.0}, 0)
        new.begin(0)
        new.log_scalars({"loss": 2.0}, 1)
        new.begin(0)  # trained again in the same process
        new.log_scalars({"loss": 3.0}, 1)
        assert [r.get("loss", r.get("eval_loss")) for r in read_metrics(tmp_path)] == [2.0, 3.0]
        assert len(raw_lines(tmp_path / "superseded" / "metrics.jsonl")) == 3

    @given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=5))
    def test_no_step_is_ever_there_twice(self, tmp_path_factory, sessions):
        """Each session resumes at most where the last one was, in a new process, and logs some steps."""
        folder = tmp_path_factory.mktemp("logs")
        expected: list[tuple[int, int]] = []
        for session, (resume, count) in enumerate(sessions):
            start = min([resume, *(s for s, _ in expected[-1:])]) if expected else 0
            tracker = JsonlTracker(folder)
            tracker.begin(start)
            expected = [row for row in expected if row[0] <= start and start > 0]
            for step in range(start + 1, start + count + 1):
                tracker.log_scalars({"session": session}, step)
                expected.append((step, session))
            tracker.close()
        assert [(row["step"], row["session"]) for row in read_metrics(folder)] == expected


class TestCallback:
    def test_every_log_of_a_run(self, tmp_path):
        trainer = tiny_trainer(tmp_path, [JsonlLogCallback()])
        trainer.train()
        rows = read_metrics(tmp_path / "logs")
        logged = [{k: v for k, v in row.items() if k != "wall_time"} for row in rows]
        assert logged == [dict(entry) for entry in trainer.state.log_history]

    def test_evaluate_and_predict_are_there_when_they_return(self, tmp_path):
        trainer = tiny_trainer(tmp_path, [JsonlLogCallback()])
        trainer.evaluate()
        assert "eval_loss" in read_metrics(tmp_path / "logs")[-1]
        trainer.predict(trainer.eval_dataset)
        assert "test_loss" in read_metrics(tmp_path / "logs")[-1]

    def test_resume_goes_on_in_the_same_file(self, tmp_path):
        saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
        tiny_trainer(tmp_path, [JsonlLogCallback()], **saving).train()
        jsonl_tracker(tmp_path / "logs").close()  # another process, as far as the file can tell
        trainer = tiny_trainer(tmp_path, [JsonlLogCallback()], **saving)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        rows = [row for row in read_metrics(tmp_path / "logs") if "loss" in row]
        assert [row["step"] for row in rows] == [1, 2, 3, 4]

    def test_other_processes_write_nothing(self, tmp_path):
        callback = JsonlLogCallback()
        args = SimpleNamespace(output_dir=str(tmp_path))
        state = TrainerState(is_world_process_zero=False)
        callback.on_train_begin(args, state, TrainerControl())
        callback.on_log(args, state, TrainerControl(), logs={"loss": 1.0})
        callback.on_train_end(args, state, TrainerControl())
        assert not (tmp_path / "logs").exists()

    def test_logs_are_left_alone_and_copied_at_once(self, tmp_path):
        args, state = SimpleNamespace(output_dir=str(tmp_path)), TrainerState(global_step=1)
        tensor, array = torch.tensor(1.0), np.ones(2)
        logs = {"tensor": tensor, "array": array, "text": "x", "none": None, "big": torch.zeros(1000), "object": state}
        before = dict(logs)
        JsonlLogCallback().on_log(args, state, TrainerControl(), logs=logs)
        tensor.fill_(9.0)
        array[:] = 9.0
        assert all(logs[key] is before[key] for key in before)
        copy.deepcopy(logs)
        jsonl_tracker(tmp_path / "logs").flush(10)
        (row,) = read_metrics(tmp_path / "logs")
        assert (row["tensor"], row["array"], row["big"]) == (1.0, [1.0, 1.0], "float32[1000]")

    def test_one_writer_for_a_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        writer = jsonl_tracker("logs")
        assert jsonl_tracker(tmp_path / "logs") is writer
        writer.close()
        assert jsonl_tracker("logs") is not writer


class Recording(Tracker):
    """Waits for `gate` before each write; raises where `error` is set."""

    name = "recording"

    def __init__(self, error: Exception | None = None):
        self.gate = threading.Event()
        self.gate.set()
        self.error = error
        self.written: list = []

    def log_scalars(self, scalars, step):
        self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.written.append((step, dict(scalars)))

    def log_table(self, name, rows, step):
        self.log_scalars({name: list(rows)}, step)

    def close(self):
        self.log_scalars({"closed": True}, -1)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class TestQueue:
    def test_order_is_kept_and_close_comes_last(self):
        tracker = Recording()
        queue = TrackerQueue(tracker)
        queue.log_scalars({"a": 1}, 1)
        queue.log_table("t", [{"x": 2}], 2)
        queue.close()
        assert tracker.written == [(1, {"a": 1}), (2, {"t": [{"x": 2}]}), (-1, {"closed": True})]
        queue.close()

    def test_a_slow_tracker_drops_counts_and_warns_once(self, caplog):
        tracker = Recording()
        tracker.gate.clear()
        queue = TrackerQueue(tracker, max_pending=2, close_timeout=0.01)
        for step in range(10):
            queue.log_scalars({"loss": 1.0}, step)
        assert queue.dropped >= 7  # two wait, one is being written
        assert not queue.flush(0.01)
        queue.close()
        assert len(warnings_of(caplog)) == 1
        assert "'recording'" in warnings_of(caplog)[0]
        tracker.gate.set()

    def test_what_was_late_once_is_not_waited_for_again_until_it_has_caught_up(self):
        tracker = Recording()
        tracker.gate.clear()
        queue = TrackerQueue(tracker)
        queue.log_scalars({}, 1)
        assert not queue.flush(0.01)
        assert not queue.flush(3600)  # returns at once, or this test never ends
        tracker.gate.set()
        with queue._pending.all_tasks_done:
            queue._pending.all_tasks_done.wait_for(lambda: not queue._pending.unfinished_tasks, 30)
        assert queue.flush(0)
        queue.close()

    def test_a_failing_tracker_counts_and_warns_once(self, caplog):
        queue = TrackerQueue(Recording(OSError("disk full")))
        for step in range(5):
            queue.log_scalars({"loss": 1.0}, step)
        assert queue.flush(30)
        queue.close()
        assert queue.failed == 6  # close fails as well
        assert len(warnings_of(caplog)) == 1
        assert "OSError: disk full" in warnings_of(caplog)[0]

    def test_nothing_raises_after_close(self, caplog):
        queue = TrackerQueue(Recording())
        queue.close()
        queue.log_scalars({"loss": 1.0}, 1)
        assert queue.flush(0)
        assert len(warnings_of(caplog)) == 1

    def test_a_folder_that_cannot_be_written_costs_one_warning(self, tmp_path, caplog):
        (tmp_path / "logs").write_text("a file where the folder should be")
        trainer = tiny_trainer(tmp_path, [JsonlLogCallback()])
        trainer.train()
        assert trainer.state.global_step == 4
        assert len([w for w in warnings_of(caplog) if "jsonl" in w]) == 1


@pytest.fixture(autouse=True)
def _propagating_logger():
    """Libraries may switch propagation off; caplog needs it."""
    logger = logging.getLogger("preftune")
    before, logger.propagate = logger.propagate, True
    yield
    logger.propagate = before
