"""`preftune compare`: the first difference of two histories made by hand, and what is no difference."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from preftune.callbacks.trackers.jsonl import JsonlTracker
from preftune.cli.compare import Difference, described, first_difference, manifest_differences
from preftune.cli.main import main
from preftune.cli.report.runs import Run


def logs(**changes: list[float]) -> list[dict]:
    """Steps 10, 20, 30 with a loss and a margin."""
    base = {"loss": [0.7, 0.6, 0.5], "rewards/margins": [0.0, 0.1, 0.2]} | changes
    return [{"step": 10 * (i + 1)} | {name: values[i] for name, values in base.items()} for i in range(3)]


def names(found: list[Difference]) -> list[tuple[int | None, str]]:
    return [(difference.step, difference.name) for difference in found]


def test_no_logs_are_no_agreement(tmp_path, capsys):
    for name, entries in (("a", logs()), ("b", [])):
        (tmp_path / name).mkdir()
        tracker = JsonlTracker(tmp_path / name / "logs")
        for entry in entries:
            tracker.log_scalars(entry, entry["step"])
        (tmp_path / name / "run.json").write_text("{}")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "no logs to compare" in capsys.readouterr().out


def test_options_that_one_trainer_has_are_named_in_one_line():
    config = {"beta": 0.1, "loss_type": "sigmoid", "max_length": None}
    a = Run(Path("a"), logs(), manifest={"trainer": "DPOTrainer", "config": config})
    b = Run(Path("b"), logs(), manifest={"trainer": "SFTTrainer", "config": {"loss_type": "nll", "packing": False}})
    lines = list(described(a, b, [], 0.0))
    assert lines[-4:] == [
        "  trainer: 'DPOTrainer' | 'SFTTrainer'",
        "  config.loss_type: 'sigmoid' | 'nll'",
        "  options of A alone: beta",
        "  options of B alone: packing",
    ]
    same = Run(Path("b"), logs(), manifest={"trainer": "DPOTrainer", "config": {**config, "packing": False}})
    assert list(described(a, same, [], 0.0))[-1] == "  config.packing: - | False"


def test_equal_runs():
    assert first_difference(logs(), logs()) == []
    assert first_difference([], []) == []


def test_first_step_and_every_metric_there():
    other = logs(loss=[0.7, 0.61, 0.9], **{"rewards/margins": [0.0, 0.2, 0.9]})
    found = first_difference(logs(), other)
    assert names(found) == [(20, "loss"), (20, "rewards/margins")]
    assert str(found[0]) == "loss: 0.6 | 0.61  (apart by 0.01, relative 0.0164)"


@pytest.mark.parametrize(("tolerance", "differs"), [(0.0, True), (1e-4, True), (1e-3, False)])
def test_tolerance(tolerance, differs):
    assert bool(first_difference(logs(), logs(loss=[0.7, 0.6005, 0.5]), tolerance)) is differs


def test_tolerance_is_relative_above_one():
    a, b = [{"step": 1, "loss": 1000.0}], [{"step": 1, "loss": 1000.5}]
    assert first_difference(a, b, 1e-3) == [] and first_difference(a, b, 1e-4)


def test_nan_is_itself_and_nothing_else():
    broken = logs(loss=[0.7, math.nan, math.inf])
    assert first_difference(broken, logs(loss=[0.7, math.nan, math.inf])) == []
    assert names(first_difference(broken, logs(), 1e9)) == [(20, "loss")]


def test_a_metric_that_only_one_has():
    assert names(first_difference(logs(), logs(kl=[0.1, 0.1, 0.1]))) == [(10, "kl")]


def test_what_one_run_never_logs_does_not_hide_where_they_part(tmp_path, capsys):
    """A reference that moves is logged from the first step on; the loss tells only at step 30 that it moved."""
    drifting = [entry | {"reference/drift": 0.5} for entry in logs(loss=[0.7, 0.6, 0.4])]
    for name, entries in (("a", drifting), ("b", logs()), ("c", [e | {"reference/drift": 0.5} for e in logs()])):
        tracker = JsonlTracker(tmp_path / name / "logs")
        for entry in entries:
            tracker.log_scalars(entry, entry["step"])
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["compare", a, b]) == 1
    out = capsys.readouterr().out
    assert "first differ at step 30, in loss" in out and "logged by A alone: reference/drift" in out
    assert main(["compare", b, c]) == 1
    assert "first differ at step 10, in reference/drift" in capsys.readouterr().out


def test_clocks_and_summaries_are_no_difference():
    clocks = {"wall_time": [1.0, 2.0, 3.0], "round_time": [9.0, 9.0, 9.0], "rewards/f/seconds_per_sample": [1.0] * 3}
    summary = {"step": 30, "train_loss": 0.6, "train_runtime": 5.0, "total_flos": 1.0}
    evaluation = {"step": 20, "eval_runtime": 5.0, "eval_samples_per_second": 2.0}
    assert first_difference([*logs(**clocks), evaluation, summary], logs()) == []


def test_a_longer_run_does_not_differ():
    assert first_difference(logs()[:2], logs()) == []


def test_a_step_that_only_one_logged():
    assert names(first_difference([logs()[0], logs()[2]], logs())) == [(20, "(a log at this step)")]


def test_manifests(tmp_path):
    a = Run(
        tmp_path, manifest={"config": {"beta": 0.1, "output_dir": "a"}, "environment": {"torch": "2.13"}, "data": {}}
    )
    b = Run(tmp_path, manifest={"config": {"beta": 0.2, "output_dir": "b"}, "environment": {"torch": "2.13"},
                                "data": {"train": {"rows": 5}}, "started": "now"})  # fmt: skip
    assert [d.name for d in manifest_differences(a, b)] == ["config.beta", "data.train.rows"]
    assert list(manifest_differences(a, a)) == []


def test_the_command(tmp_path, capsys):
    for name, entries, beta in (("a", logs(), 0.1), ("b", logs(loss=[0.7, 0.6, 0.4]), 0.1), ("c", logs(), 0.3)):
        for entry in entries:
            JsonlTracker(tmp_path / name / "logs").log_scalars(entry, entry["step"])
        (tmp_path / name / "run.json").write_text(json.dumps({"config": {"beta": beta}}))
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["compare", a, b]) == 1
    out = capsys.readouterr().out
    assert "first differ at step 30, in loss" in out and "data are equal" in out
    assert main(["compare", a, c]) == 0
    out = capsys.readouterr().out
    assert "agree exactly up to step 30" in out and "config.beta: 0.1 | 0.3" in out
    assert main(["compare", a, b, "--tolerance", "0.5"]) == 0
    assert "agree within 0.5 up to step 30" in capsys.readouterr().out
    (tmp_path / "c" / "run.json").unlink()
    assert main(["compare", a, c]) == 0
    assert "B has no run.json" in capsys.readouterr().out
    assert main(["compare", a, str(tmp_path / "absent")]) == 2
