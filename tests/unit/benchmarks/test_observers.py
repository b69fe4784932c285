"""What the bench says of observers: figures against a run made by hand, and the clock of hooks against known sleeps."""

from __future__ import annotations

import json
import threading
import time

import pytest

from benchmarks import observer_table, report, run, summary
from benchmarks.observers import HookClock, thread_seconds


def steps(*walls: float, **more: object) -> list[dict]:
    return [{"wall": wall, "others": 0.0, **more} for wall in walls]


def made_by_hand() -> dict:
    """Watched steps take 1 s longer, all of it generation, and 1 % longer than that; hooks say 0.5 % and 0.25 %."""
    watched = steps(3.02, 5.04, generation=1.0, threads=0.01)
    for step, wall in zip(watched, (2.02, 4.04)):
        step["hooks"] = {"Loud": wall * 0.005, "Quiet": wall * 0.0025}
    return {
        "title": "t", "model": "m", "trackers": ["jsonl"], "pairs": 4, "begin": {"Loud": 0.25, "Quiet": 0.5},
        "sides": {"bare": steps(2.0, 4.0), "watched": watched},
    }  # fmt: skip


def test_figures_leave_generation_out():
    figures = summary.observer_figures(made_by_hand())
    assert figures["ratio"]["per_step"] == pytest.approx(1.01) == figures["ratio"]["of_medians"]
    assert figures["hooks"] == {"Loud": pytest.approx(0.005), "Quiet": pytest.approx(0.0025)}
    assert figures["share"] == pytest.approx(0.0075)
    assert figures["threads"] == pytest.approx(0.02 / 6.06)
    assert figures["generation"] == pytest.approx(2 / 6.06)
    assert figures["begin"] == 0.75


def test_the_page_has_the_section_and_its_verdict():
    origin = {"machine": {}, "versions": {}, "date": "d", "code": "c", "model": "m", "threads": 2, "command": "x"}
    entry = {**made_by_hand(), "origin": origin}
    page = report.render(json.loads(json.dumps({"callbacks": {"dpo": entry}})))
    assert "both < 2%: reached" in page and "Loud 0.500%, Quiet 0.250%" in page and "callbacks dpo: d" in page
    for step in entry["sides"]["watched"]:
        step["hooks"]["Loud"] *= 4
    assert "**short**" in observer_table.observers_section({"dpo": entry})


class Sleeper:
    """A callback whose hook does what was asked for, and a little of its own."""

    def asked(self) -> None:
        time.sleep(0.05)

    def on_log(self) -> None:
        self.asked()
        time.sleep(0.01)


def test_the_clock_tells_a_hook_from_what_was_asked_for():
    from transformers import TrainerCallback

    class Callback(Sleeper, TrainerCallback):
        pass

    callback = Callback()
    clock = HookClock([callback], (callback, "asked"))
    callback.on_log()
    taken = clock.take()
    assert 0.01 <= taken["hooks"]["Callback"] < 0.04 and taken["generation"] >= 0.05
    assert clock.take() == {"hooks": {"Callback": 0.0}, "generation": 0.0, "threads": 0.0}


def test_threads_of_ours_are_counted_and_no_others():
    end = threading.Event()

    def work() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        end.wait(10)

    before = thread_seconds()
    threads = [threading.Thread(target=work, name=name, daemon=True) for name in ("preftune-x", "another")]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while thread_seconds() - before < 0.05 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    spent = thread_seconds() - before
    end.set()
    assert 0.05 <= spent < 0.09


def test_trl_takes_no_part(monkeypatch):
    monkeypatch.setattr(run.environments, "trl_python", lambda folder: pytest.fail("no environment is wanted"))
    assert set(run.pythons(run.parse(["--only", "callbacks"]))) == {"ours"}
