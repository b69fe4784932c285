"""Training steps of both sides, interleaved: one works while the other waits, on the same rows in the same order."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from typing import Any

from benchmarks.environments import ROOT, worker_environment
from benchmarks.kinds import KINDS
from benchmarks.link import Worker
from benchmarks.quiet import Noise
from benchmarks.setup import Setup

PROFILED_STEPS = 1
Step = dict[str, Any]


def machine_peak(setup: Setup, *more: str) -> dict[str, float]:
    """GFLOP/s of the best matrix product by precision, measured now in a process of its own.

    With `--bandwidth` as `more`: GB/s that can be read from memory.
    """
    shape = setup.shape
    command = [str(setup.pythons.get("ours") or setup.pythons["trl"]), "-m", "benchmarks.peak"]
    command += ["--hidden", str(shape.hidden), "--intermediate", str(shape.intermediate)]
    command += ["--vocabulary", str(shape.vocabulary), "--threads", str(setup.threads), "--device", setup.device, *more]
    environment = worker_environment(setup.threads, setup.cache)
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def one_step(worker: Worker, do: str) -> Step:
    """One step of one side, with the share of the machine that others used meanwhile."""
    noise = Noise()
    step = worker.ask(do)
    own = step["user"] + step["system"] + step["children"]
    return {**step, "others": noise.share(own, step["wall"])}


def interleaved(workers: dict[str, Worker], do: str, count: int, first: int = 0) -> dict[str, list[Step]]:
    """`count` steps of every side; who goes first alternates, so that a drifting machine favours nobody."""
    taken: dict[str, list[Step]] = {side: [] for side in workers}
    for i in range(first, first + count):
        sides = list(workers) if i % 2 == 0 else list(workers)[::-1]
        for side in sides:
            taken[side].append(one_step(workers[side], do))
        times = ", ".join(f"{side} {taken[side][-1]['wall']:.2f} s" for side in workers)
        print(f"bench:   {do} {i + 1}: {times}", file=sys.stderr, flush=True)
    return taken


def check_same_rows(taken: dict[str, list[Step]]) -> None:
    """Both sides must have met the same tokens, batch by batch.

    Raises:
        RuntimeError: they did not, so that no ratio of their times would mean anything.
    """
    digests = {side: [step["digest"] for step in steps] for side, steps in taken.items()}
    if len({tuple(d) for d in digests.values()}) > 1:
        raise RuntimeError(f"the sides trained on different rows: {digests}")


def measure(setup: Setup, profile: str, variant: str, kind: str = "dpo") -> dict[str, Any]:
    """One A/B run: builds both trainers, warms up, measures, profiles one more step, stops."""
    job = setup.training_job(kind, profile, variant, setup.warmup + setup.steps + PROFILED_STEPS)
    what = f"{kind}, {setup.model_title}, {profile}, {variant}: {job['pairs']} {KINDS[kind].title}"
    print(f"bench: speed, {what}", file=sys.stderr, flush=True)
    is_online = KINDS[kind].is_online
    peaks, bandwidths = [machine_peak(setup)], [machine_peak(setup, "--bandwidth")] if is_online else []
    with contextlib.ExitStack() as stack:
        workers, built = {}, {}
        for side in setup.pythons:
            worker, output = stack.enter_context(setup.worker(side))
            built[side] = worker.ask("train", **{**job, "output": str(output)})
            workers[side] = worker
        for worker in workers.values():
            worker.ask("start")
        warm = interleaved(workers, "step", setup.warmup)
        measured = interleaved(workers, "step", setup.steps, first=setup.warmup)
        profiled = interleaved(workers, "profile", PROFILED_STEPS)
        check_same_rows({side: warm[side] + measured[side] + profiled[side] for side in workers})
        ended = {side: worker.ask("stop") for side, worker in workers.items()}
    peaks.append(machine_peak(setup))
    bandwidths += [machine_peak(setup, "--bandwidth")] if is_online else []
    sides = {
        side: {
            "built": built[side]["built"],
            "warmup_wall": [s["wall"] for s in warm[side]],
            "steps": [{k: v for k, v in s.items() if k != "parts"} for s in measured[side]],
            "parts": profiled[side][0]["parts"],
            "losses": [entry["loss"] for entry in ended[side]["logs"] if "loss" in entry],
            "before": built[side]["memory_before"]["now"],
            "peak": ended[side]["memory"],
        }
        for side in workers
    }
    kept = ("pairs", "max_length", "precision", "device", "threads")
    return {
        "trainer": kind,
        "title": setup.profile(profile).title,
        "variant": variant,
        "model": setup.model_title,
        "shape": dataclasses.asdict(setup.shape),
        "peaks": peaks,
        "sides": sides,
        **({"bandwidths": bandwidths, "answer_tokens": setup.answer_tokens} if is_online else {}),
        **{k: job[k] for k in kept},
    }
