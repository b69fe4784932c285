"""Rows per second of the constructor's data preparation, on caches that are always cold."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.setup import Setup

FEW = 8


def once(setup: Setup, side: str, profile: str, count: int, num_proc: int | None) -> dict[str, Any]:
    """Seconds and rows per second of one constructor call in a fresh process, less one on eight rows.

    The eight-row one runs without worker processes, so that starting those counts as preparation.
    """
    with setup.worker(side) as (worker, output):
        job = setup.job(profile, "default", output, model=str(setup.tiny_model()), steps=1, num_proc=num_proc)
        answer = worker.ask(
            "prepare",
            **job,
            rows=str(setup.rows(profile, count)),
            few_rows=str(setup.rows(profile, FEW, seed=1)),
            other_few_rows=str(setup.rows(profile, FEW, seed=2)),
        )
    many, few = answer["many"], answer["few"]
    wall = many["wall"] - few["wall"]
    cpu = sum(many[k] - few[k] for k in ("user", "system", "children"))
    return {"wall": wall, "cpu": cpu, "rows_per_second": count / wall, "kept": answer["kept"]}


def measure(setup: Setup, profile: str, count: int, num_proc: int | None, repeats: int) -> dict[str, Any]:
    """Every side `repeats` times, in turn."""
    print(f"bench: preparation, {count} rows, dataset_num_proc={num_proc}", file=sys.stderr, flush=True)
    taken: dict[str, list[dict[str, Any]]] = {side: [] for side in setup.pythons}
    for i in range(repeats):
        for side in list(taken) if i % 2 == 0 else list(taken)[::-1]:
            taken[side].append(once(setup, side, profile, count, num_proc))
            print(f"bench:   {side} {taken[side][-1]['rows_per_second']:.0f} rows/s", file=sys.stderr, flush=True)
    kept = {side: {run["kept"] for run in runs} for side, runs in taken.items()}
    if len(set().union(*kept.values())) > 1:
        raise RuntimeError(f"the sides kept different numbers of rows: {kept}")
    return {"title": setup.profile(profile).title, "rows": count, "num_proc": num_proc, "sides": taken}
