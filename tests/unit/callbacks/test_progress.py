"""RichProgressCallback: what it shows, where it must not draw, and that the terminal comes back however a run ends."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import sys
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from preftune.callbacks import formatting
from preftune.callbacks.live import LiveDisplay, can_animate
from preftune.callbacks.metric_board import MetricBoard, _deal
from preftune.callbacks.panel import Bar, RunView, belongs_on_board, plain_line, render
from preftune.callbacks.progress import RichProgressCallback, replace_default_progress
from preftune.callbacks.throughput import Throughput
from tests.unit.callbacks.tiny_trainer import tiny_trainer

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
DPO_LOGS = {
    "loss": 0.6931,
    "learning_rate": 5e-5,
    "rewards/chosen": 0.25,
    "rewards/accuracies": 0.75,
    "logps/chosen": -101.5,
    "epoch": 0.5,
}


def terminal(width: int = 100) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=60, color_system="truecolor", _environ={}
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def drawn(view: RunView, *, width: int = 100, ascii_only: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True, _environ={})
    console.print(render(view, ascii_only=ascii_only))
    return console.export_text().splitlines()


def state(step: int = 0, max_steps: int = 4, main: bool = True) -> TrainerState:
    return TrainerState(global_step=step, max_steps=max_steps, epoch=step / 4, is_world_process_zero=main)


ARGS = SimpleNamespace(run_name="a run", output_dir="out")


class TestValues:
    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (0.693147, "0.6931"),
            (5e-5, "5e-05"),
            (1024, "1,024"),
            (True, "True"),
            (None, "-"),
            (float("nan"), "nan"),
            (float("-inf"), "-inf"),
            (torch.tensor(2.5), "2.5"),
            (torch.tensor([[3]]), "3"),
            (torch.tensor([1.0, 2.0]), "[1.0, 2.0]"),
            (torch.zeros(9, 9, dtype=torch.bfloat16), "bfloat16[9, 9]"),
            (np.float32(0.5), "0.5"),
            (np.zeros((100, 2)), "float64[100, 2]"),
            ({"a": np.int64(1)}, "{'a': 1}"),
            ("two\nlines\x1b[31m", "two lines?[31m"),
            ("x" * 100, "x" * 57 + "..."),
        ],
    )
    def test_any_type(self, value, shown):
        assert formatting.format_value(value) == shown

    def test_object_whose_repr_raises(self):
        class Broken:
            def __repr__(self):
                raise RuntimeError("no")

        assert formatting.format_value(Broken()) == "<Broken: RuntimeError in repr>"

    @given(st.text(max_size=200), st.integers(10, 80), st.booleans())
    def test_text_is_one_short_printable_line(self, text, length, ascii_only):
        shown = formatting.clean(text, max_length=length, ascii_only=ascii_only)
        assert len(shown) <= length
        assert len(shown.splitlines()) <= 1
        assert not any(unicodedata.category(c) == "Cc" for c in shown)
        assert shown.isascii() or not ascii_only

    def test_durations_and_counts(self):
        assert formatting.format_duration(3725) == "1:02:05"
        assert formatting.format_duration(2 * 86400 + 61) == "2d 00:01:01"
        assert [formatting.format_count(n) for n in (950, 12_345, 1.5e6, 2e9)] == ["950", "12.3k", "1.5M", "2G"]

    def test_sparkline(self):
        assert formatting.sparkline([0, 7, 3.5, float("nan")]) == "▁█▅!"
        assert formatting.sparkline([2.0, 2.0]) == "▄▄"
        assert formatting.sparkline([1.0]) == ""


class TestPanel:
    def test_metrics_stand_in_groups_with_the_eval_value_beside(self):
        board = MetricBoard().with_logs({"loss": 0.5, "rewards/margins": 1.0}).with_logs({"eval_rewards/margins": 2.0})
        groups = board.groups()
        assert list(groups) == ["general", "rewards"]
        assert (groups["rewards"]["margins"].train, groups["rewards"]["margins"].eval) == (1.0, 2.0)

    def test_a_board_is_never_changed(self):
        board = MetricBoard().with_logs({"loss": 0.5})
        board.with_logs({"loss": 0.25, "other": 1})
        assert board.metrics["loss"].train == 0.5
        assert list(board.metrics) == ["loss"]

    def test_groups_are_side_by_side_where_they_fit_and_below_one_another_where_not(self):
        view = RunView(board=MetricBoard().with_logs(DPO_LOGS))
        wide = [line for line in drawn(view) if "general" in line]
        assert "rewards" in wide[0]
        assert "logps" in wide[0]
        narrow = [line for line in drawn(view, width=34) if "general" in line]
        assert "rewards" not in narrow[0]

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 8))
    def test_every_table_is_dealt_once(self, heights, count):
        columns = _deal(heights, min(count, len(heights)))
        assert sorted(i for column in columns for i in column) == list(range(len(heights)))
        assert all(columns)

    @given(
        st.dictionaries(
            st.text(min_size=1, max_size=12),
            st.one_of(st.none(), st.floats(), st.integers(), st.text(), st.lists(st.floats(), max_size=3)),
            max_size=8,
        ),
        st.integers(60, 140),
    )
    def test_whatever_is_logged_the_frame_is_whole(self, logs, width):
        lines = drawn(RunView(train=Bar(1, 2), board=MetricBoard().with_logs(logs)), width=width)
        assert {cell_len(line) for line in lines} == {width}
        assert [lines[0][0], lines[-1][0]] == ["╭", "╰"]

    def test_markup_in_a_string_is_shown_as_it_is(self):
        lines = drawn(RunView(board=MetricBoard().with_logs({"note": "[bold]x[/bold] [/]"})))
        assert any("[bold]x[/bold] [/]" in line for line in lines)

    def test_a_terminal_without_unicode_gets_ascii(self):
        view = RunView(
            train=Bar(1, 2),
            epoch=0.5,
            memory="1GB",
            drift=0.1,
            last_move=3.0,
            board=MetricBoard().with_logs({"é": 1, "x": "ü"}),
        )
        console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80, _environ={})
        console.print(render(view, ascii_only=console.options.ascii_only))

    def test_reference_line_only_for_a_reference_that_moves(self):
        assert not any("reference" in line for line in drawn(RunView()))
        line = next(line for line in drawn(RunView(drift=0.012345, moves=4.0, last_move=256.0)) if "reference" in line)
        assert "drift 0.01235" in line
        assert "synced 4 times" in line
        assert "last sync at step 256" in line

    def test_time_left_counts_the_steps_of_this_process_alone(self):
        """Resumed at 50, now at 60 of 100 after 20 s: 2 s a step, 40 steps left, so 80 s."""
        view = RunView(train=Bar(60, 100), steps_at_start=50, started=0.0, finished=20.0)
        assert view.seconds_left == pytest.approx(80.0)
        assert RunView(train=Bar(50, 100), steps_at_start=50, started=0.0, finished=20.0).seconds_left is None
        assert RunView(train=Bar(5, None), started=0.0, finished=20.0).seconds_left is None

    def test_plain_line(self):
        view = RunView(train=Bar(10, 100), epoch=0.5, tokens_per_second=12_300.0, started=0.0, finished=8.0)
        line = plain_line(view, {"loss": 0.6931, "note": "two\nlines", "epoch": 0.5})
        assert line == "step 10/100 (10%) | epoch 0.5 | loss 0.6931 | note two lines | 12.3k tokens/s | 0:01:12 left"


class TestThroughput:
    def test_time_in_evaluation_does_not_count(self):
        """1,000 tokens in 30 s of which 20 s were evaluation: 100 a second."""
        speed = Throughput(now=0.0, count=0.0)
        speed.pause(5.0)
        speed.resume(25.0)
        assert speed.update(30.0, 1000.0) == pytest.approx(100.0)
        assert speed.update(40.0, 1500.0) == pytest.approx(50.0)

    def test_a_log_in_the_middle_of_an_evaluation(self):
        speed = Throughput(now=0.0, count=0.0)
        speed.pause(10.0)
        assert speed.update(50.0, 100.0) == pytest.approx(10.0)
        speed.resume(60.0)
        assert speed.update(70.0, 300.0) == pytest.approx(20.0)

    def test_unknown_start_and_equal_counts(self):
        speed = Throughput(now=0.0, count=None)
        assert speed.update(10.0, 5000.0) is None
        assert speed.update(20.0, 6000.0) == pytest.approx(100.0)
        assert speed.update(90.0, 6000.0) == pytest.approx(100.0)


class TestWithoutTerminal:
    @pytest.mark.parametrize("disable_tqdm", [False, True])
    def test_one_plain_line_a_log_and_no_other_bar(self, tmp_path, capfd, disable_tqdm):
        tiny_trainer(tmp_path, [RichProgressCallback()], disable_tqdm=disable_tqdm).train()
        out, err = capfd.readouterr()
        lines = out.splitlines()
        assert [line.split(" (")[0] for line in lines] == [
            f"step {s}/4"
            for s in (1, 2, 2, 3, 4, 4, 4)  # a log each step, an evaluation at 2 and 4, the summary
        ]
        assert "\x1b" not in out + err
        assert "\r" not in err
        assert "it/s" not in err

    def test_forced_colour_is_no_terminal(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FORCE_COLOR", "1")
        with (tmp_path / "log").open("w") as file:
            assert not can_animate(Console(file=file), given=False)

    def test_a_notebook_without_widgets_gets_plain_lines(self):
        assert not can_animate(Console(file=io.StringIO(), force_jupyter=True), given=True)

    def test_other_processes_say_nothing(self, tmp_path):
        console = terminal()
        callback = RichProgressCallback(console)
        for event in ("on_train_begin", "on_step_end", "on_prediction_step", "on_evaluate", "on_train_end"):
            getattr(callback, event)(ARGS, state(main=False), TrainerControl())
        callback.on_log(ARGS, state(main=False), TrainerControl(), logs=DPO_LOGS)
        callback.on_predict(ARGS, state(main=False), TrainerControl(), metrics=DPO_LOGS)
        assert written(console) == ""


class TestLive:
    def test_a_run_with_evaluations_ends_with_the_whole_story(self, tmp_path):
        console = terminal()
        streams = sys.stdout, sys.stderr
        callback = RichProgressCallback(console)
        trainer = tiny_trainer(tmp_path, [callback])
        trainer.train()
        assert (sys.stdout, sys.stderr) == streams
        last = without_codes(written(console)).split("╭")[-1]
        for text in ("4/4", "100%", "took", "loss", "eval", "runtime"):
            assert text in last
        assert written(console).rstrip("\n").endswith(SHOW_CURSOR)

    def test_evaluate_and_predict_outside_of_training(self, tmp_path):
        console = terminal()
        trainer = tiny_trainer(tmp_path, [RichProgressCallback(console)])
        trainer.evaluate()
        evaluated = without_codes(written(console)).split("╭")[-1]
        assert "2/2" in evaluated
        assert "loss" in evaluated
        trainer.predict(trainer.eval_dataset)
        predicted = without_codes(written(console)).split("╭")[-1]
        assert "test_loss" in predicted
        assert written(console).rstrip("\n").endswith(SHOW_CURSOR)

    def test_predict_inside_of_training_leaves_the_panel_on(self):
        callback = RichProgressCallback(terminal())
        loader = [0, 0]
        callback.on_train_begin(ARGS, state(), TrainerControl())
        callback.on_prediction_step(ARGS, state(1), TrainerControl(), eval_dataloader=loader)
        assert callback._view.evaluation == Bar(1, 2)
        callback.on_predict(ARGS, state(1), TrainerControl(), metrics={"test_loss": 1.0})
        assert callback._view.evaluation is None
        assert callback._display is not None
        assert callback._display.is_alive()
        callback.close()

    def test_ctrl_c_gives_the_terminal_back_before_anything_else_is_printed(self, tmp_path, monkeypatch):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        console = terminal()
        callback = RichProgressCallback(console, refresh_per_second=0.01)  # the thread does not get its turn
        trainer = tiny_trainer(tmp_path, [callback])
        monkeypatch.setattr(trainer, "training_step", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert written(console).count(HIDE_CURSOR) == 1
        print("after")
        assert sys.stdout is out
        assert out.getvalue() == "after\n"
        assert written(console).rstrip("\n").endswith(SHOW_CURSOR)

    def test_an_exception_that_somebody_swallows_ends_the_display_too(self, tmp_path, monkeypatch):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        callback = RichProgressCallback(terminal(), refresh_per_second=50)
        trainer = tiny_trainer(tmp_path, [callback])
        monkeypatch.setattr(trainer, "training_step", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert callback._display is not None
        assert callback._display.join(timeout=10)
        assert sys.stdout is out

    def test_prints_and_logging_appear_above(self, monkeypatch):
        console = terminal()
        display = LiveDisplay(console, lambda: "panel", refresh_per_second=1)
        display.start()
        print("half a line, ", end="")
        print("and the rest")
        print("never ended", end="")
        display.close()
        text = without_codes(written(console))
        assert "half a line, and the rest\n" in text
        assert "never ended" in text

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_forked_worker_writes_to_the_bare_stream(self):
        original = sys.stdout
        display = LiveDisplay(terminal(), lambda: "panel", refresh_per_second=1)
        display.start()
        assert sys.stdout is not original
        pid = os.fork()
        if pid == 0:
            os._exit(0 if sys.stdout is original else 1)
        _, status = os.waitpid(pid, 0)
        display.close()
        assert os.waitstatus_to_exitcode(status) == 0


def _interrupt(*args, **kwargs):
    raise KeyboardInterrupt


class TestRun:
    def test_a_resumed_run_starts_where_it_was(self, tmp_path):
        tiny_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
        views = []

        class Recording(RichProgressCallback):
            def on_train_begin(self, *args, **kwargs):
                super().on_train_begin(*args, **kwargs)
                views.append(self._view)

            def on_step_end(self, *args, **kwargs):
                super().on_step_end(*args, **kwargs)
                views.append(self._view)

        trainer = tiny_trainer(tmp_path, [Recording(terminal())])
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert [view.train for view in views] == [Bar(2, 4), Bar(3, 4), Bar(4, 4)]
        assert all(view.steps_at_start == 2 for view in views)

    def test_logs_are_left_alone(self):
        callback = RichProgressCallback(terminal())
        logs = {**DPO_LOGS, "num_tokens": 100, "array": np.zeros(3), "text": "x", "none": None}
        before = {key: id(value) for key, value in logs.items()}
        callback.on_train_begin(ARGS, state(), TrainerControl())
        callback.on_log(ARGS, state(1), TrainerControl(), logs=logs)
        callback.close()
        assert {key: id(value) for key, value in logs.items()} == before
        copy.deepcopy(logs)

    def test_a_live_callback_can_be_copied_and_pickled(self):
        callback = RichProgressCallback(terminal())
        callback.on_train_begin(ARGS, state(), TrainerControl())
        callback.on_log(ARGS, state(1), TrainerControl(), logs=DPO_LOGS)
        assert callback._display is not None
        for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
            assert twin._view.board == callback._view.board
            assert twin._display is None
        callback.close()

    def test_reference_and_speed_come_from_the_logs(self, monkeypatch):
        clock = iter([0.0, 10.0])
        callback = RichProgressCallback(Console(file=io.StringIO()))
        monkeypatch.setattr("preftune.callbacks.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
        callback.on_train_begin(ARGS, state(), TrainerControl())
        logs = {"num_tokens": 500, "reference/drift": 0.5, "reference/moves": 2.0, "reference/last_move_step": 3.0}
        callback.on_log(ARGS, state(4), TrainerControl(), logs=logs)
        view = callback._view
        assert (view.tokens_per_second, view.drift, view.moves, view.last_move) == (50.0, 0.5, 2, 3)
        assert view.board.metrics == {}

    @pytest.mark.parametrize("disable_tqdm", [False, True])
    def test_never_two_bars(self, tmp_path, disable_tqdm):
        trainer = tiny_trainer(tmp_path, [RichProgressCallback(terminal())], disable_tqdm=disable_tqdm)
        kinds = [type(c) for c in trainer.callback_handler.callbacks]
        assert ProgressCallback not in kinds
        assert PrinterCallback not in kinds

    def test_never_two_bars_when_added_late(self, tmp_path, capfd):
        trainer = tiny_trainer(tmp_path)
        trainer.add_callback(RichProgressCallback())
        trainer.train()
        assert ProgressCallback not in [type(c) for c in trainer.callback_handler.callbacks]
        assert "1/4" not in capfd.readouterr().err  # it had drawn 0/4 by then, and wiped it

    def test_replace_default_progress(self):
        class OwnBar(ProgressCallback):
            pass

        rich, own = RichProgressCallback(), OwnBar()
        callbacks = [ProgressCallback(), own, rich, PrinterCallback()]
        replace_default_progress(callbacks)
        assert callbacks == [own, rich]
        without_rich = [ProgressCallback()]
        replace_default_progress(without_rich)
        assert len(without_rich) == 1


class TestOnlineLogs:
    LOGS = {
        "loss": 0.1, "reward": 1.5, "rewards/letters/mean": 0.5, "rewards/letters/seconds_per_sample": 1e-6,
        "completions/mean_length": 4.0, "sampling/importance_sampling_ratio/dropped": 0.0,
        "sampling/importance_sampling_ratio/mean": 1.0, "clip_ratio/low_mean": None, "tools/call_frequency": 0.2,
        "round_time": 0.3, "num_tokens": 100.0,
    }  # fmt: skip

    def test_groups(self):
        groups = MetricBoard().with_logs({k: v for k, v in self.LOGS.items() if belongs_on_board(k)}).groups()
        assert list(groups) == ["general", "rewards", "completions", "sampling", "clip_ratio", "tools", "timing"]
        assert list(groups["timing"]) == ["letters/seconds_per_sample", "round_time"]
        assert list(groups["general"]) == ["loss", "reward"]

    def test_names_that_differ_at_the_end_stay_apart(self):
        lines = "\n".join(drawn(RunView(board=MetricBoard().with_logs(self.LOGS))))
        assert "importance_sampling_ratio/dropped" in lines and "importance_sampling_ratio/mean" in lines

    @pytest.mark.parametrize(
        ("key", "shown"),
        [("num_tokens", False), ("eval_num_tokens", False), ("eval_a_num_tokens", False), ("eval_loss", True),
         ("epoch", False), ("my_num_tokens", True)],
    )  # fmt: skip
    def test_token_counts_are_no_metric(self, key, shown):
        assert belongs_on_board(key) == shown
