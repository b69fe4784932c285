"""What observers cost: the same DPO run with nobody looking on and with all observers, step by step in turn.

Both processes are ours. The one that waits is stopped altogether, so that its threads do not work in the other's time.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from benchmarks.link import Worker
from benchmarks.setup import Setup
from benchmarks.speed import check_same_rows, one_step

BARE, WATCHED = "bare", "watched"


def in_turn(workers: dict[str, Worker], count: int, first: int = 0) -> dict[str, list[dict[str, Any]]]:
    """`count` steps of both; who goes first alternates, and who is not asked stands still."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for i in range(first, first + count):
        for name in list(workers) if i % 2 == 0 else list(workers)[::-1]:
            workers[name].release()
            taken[name].append(one_step(workers[name], "step"))
            workers[name].hold()
        times = ", ".join(f"{name} {taken[name][-1]['wall']:.2f} s" for name in workers)
        print(f"bench:   step {i + 1}: {times}", file=sys.stderr, flush=True)
    return taken


def measure(setup: Setup, profile: str) -> dict[str, Any]:
    """Steps of both after some to warm up; the first of them has what is done once, at the beginning."""
    job = setup.training_job("dpo", profile, "default", setup.warmup + setup.steps)
    print(f"bench: callbacks, {setup.model_title}: {job['pairs']} pairs", file=sys.stderr, flush=True)
    trackers: list[str] = []
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in (BARE, WATCHED):
            worker, output = stack.enter_context(setup.worker("ours"))
            built = worker.ask("train", **{**job, "output": str(output), "watched": name == WATCHED})
            trackers = built["trackers"]
            worker.ask("start")
            worker.hold()
            workers[name] = worker
        warm = in_turn(workers, setup.warmup)
        measured = in_turn(workers, setup.steps, first=setup.warmup)
        check_same_rows({name: warm[name] + measured[name] for name in workers})
        for worker in workers.values():
            worker.release()
            worker.ask("stop")
    return {
        "title": setup.profile(profile).title,
        "model": setup.model_title,
        "trackers": trackers,
        "begin": warm[WATCHED][0]["hooks"],
        "sides": {
            name: [{k: v for k, v in step.items() if k != "parts"} for step in steps]
            for name, steps in measured.items()
        },
        **{k: job[k] for k in ("pairs", "max_length", "precision", "device", "threads")},
    }
