"""What the live panel says of a run, and what it leaves out where a terminal is low."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.jupyter import JupyterRenderable
from rich.text import Text
from transformers import TrainingArguments

from preftune.callbacks.live import LiveDisplay
from preftune.callbacks.metric_board import MetricBoard
from preftune.callbacks.panel import Bar, RunView, plain_line, render
from preftune.callbacks.progress import _about, _bytes
from preftune.configs.dpo import DPOConfig


def board(groups=("rewards", "logps", "logits")) -> MetricBoard:
    """Four metrics a group, logged three times, one evaluation."""
    made = MetricBoard()
    for step in range(3):
        made = made.with_logs({f"{group}/{i}": step + 0.5 for group in groups for i in range(4)})
    return made.with_logs({"eval_runtime": 3.0, "eval_rewards/0": 1.0})


def shown(view: RunView, *, width: int, height: int, terminal: bool = True) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, record=True, force_terminal=terminal, _environ={})
    console.print(render(view))
    return console.export_text().splitlines()


class TestLowTerminal:
    """A live panel that is higher than its terminal loses its lower end, and nobody sees what is there."""

    def text(self, width: int, height: int, groups=("rewards", "logps", "logits"), *, terminal: bool = True) -> str:
        lines = shown(RunView(train=Bar(1, 2), board=board(groups)), width=width, height=height, terminal=terminal)
        assert len(lines) <= height or not terminal
        return "\n".join(lines)

    def test_all_where_there_is_room(self):
        text = self.text(50, 40)
        assert "timing" in text and "▁" in text

    def test_the_times_go_first(self):
        text = self.text(50, 14, ("rewards", "logps"))
        assert "timing" not in text and "▁" in text

    def test_without_the_little_curves_more_groups_stand_beside_each_other(self):
        text = self.text(50, 18)
        assert "timing" in text and "▁" not in text
        (line,) = [line for line in text.splitlines() if "rewards" in line]
        assert "logps" in line and "logits" in line

    def test_at_last_both(self):
        text = self.text(50, 15)
        assert "timing" not in text and "▁" not in text and "logits" in text

    def test_a_file_has_no_height(self):
        text = self.text(50, 5, terminal=False)
        assert "timing" in text and "▁" in text

    def test_a_narrow_terminal_gives_up_the_curves_rather_than_values(self):
        text = self.text(22, 60)
        assert "▁" not in text and text.count("2.5") == 12


def test_a_notebook_keeps_the_last_drawing(monkeypatch):
    """The display is closed before its thread had a turn: what was drawn last is what stays in the cell."""
    drawn: list[str] = []

    class Output:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def clear_output(self, wait):
            drawn.clear()

    def display(shown):
        drawn.extend([shown.text] if isinstance(shown, JupyterRenderable) else [])

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "ipywidgets", SimpleNamespace(Output=Output))
    state = {"text": "first"}
    live = LiveDisplay(Console(force_jupyter=True, width=40), lambda: Text(state["text"]), refresh_per_second=0.01)
    live.start()
    assert "first" in "".join(drawn)
    state["text"] = "last"
    live.close()
    assert "last" in "".join(drawn)


@pytest.mark.parametrize(("run_name", "about"), [(None, ("Tiny",)), ("out", ("Tiny",)), ("a", ("Tiny", "a"))])
def test_title(run_name, about):
    args = TrainingArguments(output_dir="out", run_name=run_name, use_cpu=True)
    assert _about(args, type("Tiny", (torch.nn.Module,), {})()) == about
    assert "preftune · " + " · ".join(about) in shown(RunView(about=about), width=60, height=20)[0]


def test_title_of_a_model_that_was_loaded_by_name(tiny_model):
    model = tiny_model()
    model.config._name_or_path = "someone/a-model"
    args = DPOConfig("out", run_name=None, use_cpu=True)
    assert _about(args, model) == ("DPO", "a-model")
    assert _about(args, get_peft_model(model, LoraConfig(target_modules=["q_proj"]))) == ("DPO", "a-model")


def test_a_plain_line_counts_tokens_as_people_do_and_once():
    logs = {"loss": 0.5, "num_tokens": 11_400.0, "eval_num_tokens": 11_400.0}
    assert plain_line(RunView(num_tokens=11_400.0), logs) == "loss 0.5 | 11.4k tokens"


def test_clocks_of_training_stand_beside_those_of_evaluation():
    logs = {"train_runtime": 9.0, "train_loss": 0.5, "train_steps_per_second": 2.0}
    groups = MetricBoard().with_logs(logs).with_logs({"eval_runtime": 3.0}).groups()
    assert [(name, m.train, m.eval) for name, m in groups["timing"].items()] == [
        ("runtime", 9.0, 3.0),
        ("steps_per_second", 2.0, None),
    ]
    assert list(groups["general"]) == ["train_loss"]


@pytest.mark.parametrize(("moves", "text"), [(0.0, "not synced yet"), (1.0, "synced once"), (3.0, "synced 3 times")])
def test_moves_of_the_reference(moves, text):
    assert any(text in line for line in shown(RunView(drift=0.1, moves=moves), width=60, height=20))


@pytest.mark.parametrize(("count", "text"), [(950, "950 B"), (2_710_000_000, "2.71 GB"), (12_000, "12 kB")])
def test_memory(count, text):
    assert _bytes(count) == text
