"""Findings on histories made by hand: each fires on its failure and stays silent on a healthy run, at any window.

`healthy` is the base of all; a case changes one or two metrics of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preftune.callbacks import findings
from preftune.callbacks.data_findings import data_findings
from preftune.callbacks.findings import CHECKS, SEVERE, Finding, find, scan

Change = dict[str, Callable[[int], Any]]
LOGS = 25


def dpo(i: int) -> dict[str, Any]:
    """A DPO run as it should be: chosen stays, rejected falls, accuracy rises."""
    return {
        "loss": 0.69 - 0.01 * i,
        "grad_norm": 1.0 + 0.1 * (i % 3),
        "learning_rate": 1e-5,
        "rewards/accuracies": min(0.9, 0.5 + 0.05 * i),
        "rewards/margins": 0.1 * i,
        "rewards/chosen": 0.01 * i,
        "logps/chosen": -100.0 - 0.1 * i,
        "logps/rejected": -120.0 - i,
        "entropy": 1.5 - 0.02 * i,
    }


def grpo(i: int) -> dict[str, Any]:
    return {
        "loss": 0.01,
        "grad_norm": 0.5,
        "reward": 0.3 + 0.02 * i,
        "frac_reward_zero_std": 0.2,
        "completions/clipped_ratio": 0.05,
        "completions/mean_length": 100.0 + (i % 4),
        "clip_ratio/region_mean": 0.01,
        "kl": 0.05,
        "entropy": 1.0,
    }


def kto(i: int) -> dict[str, Any]:
    return {"loss": 0.5, "kl": 0.1, "rewards/chosen": 0.05 * i, "logps/chosen": -90.0, "logps/rejected": -95.0}


def history(base: Callable[[int], dict[str, Any]], change: Change | None = None, logs: int = LOGS) -> list[dict]:
    """Logs every 10 steps."""
    entries = []
    for i in range(logs):
        entry = {"step": 10 * (i + 1), **base(i)}
        entries.append(entry | {name: of(i) for name, of in (change or {}).items()})
    return entries


def codes(entries: list[dict]) -> set[str]:
    return {finding.code for finding in scan(entries)}


FIRES = [
    ("loss_not_finite", dpo, {"loss": lambda i: math.nan if i == 20 else 0.5}),
    ("loss_not_finite", dpo, {"grad_norm": lambda i: math.inf if i == 3 else 1.0}),
    ("grad_norm_spike", dpo, {"grad_norm": lambda i: 11.0 if i == 15 else 1.0}),
    (
        "chosen_collapse",
        dpo,
        {"logps/chosen": lambda i: -100.0 - 3 * i, "logps/rejected": lambda i: -120.0},  # -103 to -166: over 30 %
    ),
    (
        "margins_while_both_fall",
        dpo,
        {"logps/chosen": lambda i: -100.0 - 0.5 * i, "logps/rejected": lambda i: -120.0 - i},  # 6 nats of 101
    ),
    ("accuracy_stuck", dpo, {"rewards/accuracies": lambda i: 0.5 + (0.1 if i % 2 else -0.1)}),
    ("accuracy_stuck", lambda i: {"loss": 0.69, "accuracy": 0.52}, {}),
    ("truncated", grpo, {"completions/clipped_ratio": lambda i: 0.05 * i}),
    ("no_signal", grpo, {"frac_reward_zero_std": lambda i: 0.9}),
    ("kl_clamped", kto, {"kl": lambda i: 0.0}),
    ("far_from_reference", grpo, {"kl": lambda i: 0.1 * i}),
    ("ratio_clipped", grpo, {"clip_ratio/region_mean": lambda i: 0.4}),
    ("entropy_collapse", grpo, {"entropy": lambda i: 1.0 * 0.8**i}),
    ("longer_is_better", grpo, {"completions/mean_length": lambda i: 100.0 + 10 * i}),
]


@pytest.mark.parametrize(("code", "base", "change"), FIRES, ids=[f"{c}-{i}" for i, (c, _, _) in enumerate(FIRES)])
def test_fires_alone(code, base, change):
    """One failure is one finding, with a remedy and the steps at which it was seen."""
    (finding,) = scan(history(base, change))
    assert finding.code == code and finding.is_severe == (code in SEVERE)
    assert finding.step is not None and 10 <= finding.step <= finding.last_step <= 10 * LOGS
    assert finding.title and finding.text and finding.remedy


SILENT = [
    (dpo, {}),
    (grpo, {}),
    (kto, {}),
    (dpo, {"grad_norm": lambda i: 9.0 if i == 15 else 1.0}),
    (dpo, {"grad_norm": lambda i: 30.0 if i == 0 else 1.0}),  # the first steps are often large
    (dpo, {"logps/chosen": lambda i: -10.0 - 0.3 * i, "logps/rejected": lambda i: -20.0 + i}),  # large share, few nats
    (dpo, {"rewards/accuracies": lambda i: 0.5 if i < 10 else 0.8}),
    (dpo, {"rewards/margins": lambda i: 0.0, "logps/chosen": lambda i: -100.0 - 0.5 * i}),
    (grpo, {"completions/clipped_ratio": lambda i: 0.9 if i == 12 else 0.1}),  # a single round
    (grpo, {"entropy": lambda i: 0.04 * 0.5**i}),  # was low at the start
    (grpo, {"completions/mean_length": lambda i: 100.0 + 10 * i, "reward": lambda i: 0.5}),  # longer, not better
    (grpo, {"completions/mean_length": lambda i: 100.0 - 2 * i}),  # shorter and better
    (kto, {"kl": lambda i: 0.0, "rewards/chosen": lambda i: 0.0}),  # nothing has moved
    (dpo, {"kl": lambda i: 5.0}),  # per-token KL is an online metric
]


@pytest.mark.parametrize(("base", "change"), SILENT)
def test_stays_silent(base, change):
    assert codes(history(base, change)) == set()


@pytest.mark.parametrize(("code", "base", "change"), FIRES, ids=[f"{c}-{i}" for i, (c, _, _) in enumerate(FIRES)])
def test_values_that_are_no_numbers_are_passed_over(code, base, change):
    entries = history(base, change)
    noisy = [entry | {"note": "text", "list": [1.0], "nothing": None, "flag": True} for entry in entries]
    summary = {"step": 10 * LOGS, "train_loss": math.nan}
    evaluation = {"step": 50, "eval_loss": math.nan, "eval_entropy": 0.0}
    assert codes([*noisy[:5], evaluation, *noisy[5:], summary]) == {code}


def test_nothing_logged():
    assert find([]) == [] and scan([]) == []
    assert scan([{"step": 1, "eval_loss": math.nan}, {"step": 2, "loss": None}]) == []


@given(st.integers(0, findings.LEAST - 1))
def test_too_few_logs_for_a_trend(logs):
    """Trends need a beginning and an end: nothing is said before there are both."""
    change: Change = {"logps/chosen": lambda i: -100.0 - 50 * i, "entropy": lambda i: 0.1**i}
    assert codes(history(dpo, change, logs)) <= {"loss_not_finite"}


def test_first_and_last_step_of_a_finding():
    """frac_reward_zero_std is 1 from log 10 to log 14: the mean of five logs is above 0.8 at log 14 alone."""
    entries = history(grpo, {"frac_reward_zero_std": lambda i: 1.0 if 10 <= i <= 14 else 0.0})
    (finding,) = scan(entries)
    assert (finding.step, finding.last_step) == (150, 150)
    (longer,) = scan(history(grpo, {"frac_reward_zero_std": lambda i: 1.0 if 10 <= i <= 16 else 0.0}))
    assert (longer.step, longer.last_step) == (150, 170)


def test_long_histories_lose_no_log():
    """Of 60,000 logs one is NaN, at an odd place."""
    entries = [{"step": i, "loss": math.nan if i == 43_217 else 0.5} for i in range(60_000)]
    (finding,) = scan(entries)
    assert finding.code == "loss_not_finite" and "43217" in finding.text
    assert 0 <= finding.step - 43_217 < findings.WINDOW


def test_severe_findings_come_first():
    change: Change = {"completions/clipped_ratio": lambda i: 0.9, "entropy": lambda i: 0.5**i}
    assert [finding.code for finding in scan(history(grpo, change))] == ["entropy_collapse", "truncated"]


def test_every_code_is_its_key_and_in_the_docs():
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs" / "health.md").read_text()
    for code, base, change in FIRES:
        assert code in CHECKS
        finding = CHECKS[code](history(base, change))
        assert finding is None or finding.code == code
    assert {code for code, _, _ in FIRES} == set(CHECKS)
    for code in [*CHECKS, "rows_dropped", "rows_cut", "chosen_longer"]:
        assert f"## {code}\n" in page or f"### {code}\n" in page, code


class TestData:
    def report(self, **changes: Any) -> dict[str, Any]:
        return {
            "rows_in": 1000,
            "rows_out": 1000,
            "cut": {"count": 0},
            "dropped": {},
            "lengths": {"chosen_ids": {"p50": 100}, "rejected_ids": {"p50": 95}},
        } | changes

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"rows_out": 700, "dropped": {"no_prompt": {"count": 300, "rows": [1]}}}, "rows_dropped"),
            ({"cut": {"count": 150}}, "rows_cut"),
            ({"lengths": {"chosen_ids": {"p50": 140}, "rejected_ids": {"p50": 100}}}, "chosen_longer"),
        ],
    )
    def test_fires(self, changes, code):
        (finding,) = data_findings({"train": self.report(**changes)})
        assert finding.code == code and finding.step is None and "train" in finding.text

    def test_reasons_are_those_of_the_data_report_and_the_commonest_says_what_to_do(self):
        dropped = {"identical": {"count": 100}, "prompt_fills": {"count": 200}, "of_the_future": {"count": 1}}
        (finding,) = data_findings({"train": self.report(rows_out=699, dropped=dropped)})
        assert "100 with chosen equal to rejected; 200 with a prompt that fills max_length" in finding.text
        assert "1 with of the future" in finding.text
        assert finding.remedy == "Raise max_length, or shorten the prompts."

    def test_one_finding_names_all_sets_and_rows_that_are_scored_again_are_none(self):
        bad = self.report(rows_out=500, cut={"count": 400}, dropped={"overlong": {"count": 500}})
        found = data_findings({"train": bad, "eval": bad, "scored": bad})
        assert [finding.code for finding in found] == ["rows_dropped", "rows_cut"]
        for finding in found:
            assert finding.text.count("'train'") == finding.text.count("'eval'") == 1 and "scored" not in finding.text

    def test_lengths_of_a_handful_of_rows_say_nothing(self):
        lengths = {"chosen_ids": {"p50": 140}, "rejected_ids": {"p50": 100}}
        assert data_findings({"eval": self.report(rows_in=6, rows_out=6, lengths=lengths)}) == []

    @pytest.mark.parametrize(
        "report", [{}, {"rows_in": 0, "rows_out": 0}, {"rows_in": 10, "rows_out": 9}, {"rows_in": 9, "rows_out": 9}]
    )
    def test_stays_silent(self, report):
        assert data_findings({"train": report, "eval": self.report()}) == []


def test_text_of_a_finding():
    assert str(Finding("code", "Title", "Seen.", "Do.")) == "Title. Seen. Do."
