"""Peak resident memory of a few training steps, each side alone in a process of its own."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.setup import Setup

STEPS = 4
WIDE_VOCABULARY = 151936


def peak(setup: Setup, side: str, job: dict[str, Any]) -> dict[str, float]:
    """MiB: before the trainer is built, after it is built, and the highest of the whole process."""
    with setup.worker(side) as (worker, output):
        built = worker.ask("train", **{**job, "output": str(output)})
        worker.ask("start")
        for _ in range(STEPS - 1):
            worker.ask("step")
        last = worker.ask("step")
        ended = worker.ask("stop")
    return {
        "before": built["memory_before"]["now"],
        "built": built["memory"]["now"],
        "between_steps": last["memory"]["now"],
        "peak": ended["memory"]["peak"],
        "gpu_peak": ended["memory"]["gpu_peak"],
    }


def measure(setup: Setup, profile: str, variant: str, vocabulary: int, kind: str = "dpo") -> dict[str, Any]:
    """The peaks of all sides, one after the other. Another vocabulary than the model's gets random weights."""
    print(f"bench: memory, {kind}, {profile}, {variant}, vocabulary {vocabulary}", file=sys.stderr, flush=True)
    own = vocabulary == setup.shape.vocabulary
    job = setup.training_job(kind, profile, variant, STEPS, None if own else setup.wide_model(vocabulary))
    return {
        "trainer": kind,
        "title": setup.profile(profile).title,
        "variant": variant,
        "vocabulary": vocabulary,
        "pairs": job["pairs"],
        "steps": STEPS,
        "device": setup.device,
        "sides": {side: peak(setup, side, job) for side in setup.pythons},
    }
