"""From the raw steps of a run to the figures that are reported. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.stats import ratio, spread
from benchmarks.work import ModelShape, Work, padded_work, real_tokens, shared_work

TRL, OURS = "trl", "ours"


def work_done(step: dict[str, Any], device: str) -> Work:
    """What a step's batch went through, from its lengths and the number of positions really forwarded.

    Raises:
        ValueError: that number is neither the shared-prompt nor the padded one, so that the model of work is wrong.
    """
    lengths = [tuple(row) for row in step["lengths"]]
    shared, padded = shared_work(lengths), padded_work(lengths, head_everywhere=device == "cpu")
    if step["forwarded"] == shared.tokens:
        return shared
    if step["forwarded"] == padded.tokens:
        return padded
    wanted = f"{shared.tokens} (shared prompts) or {padded.tokens} (padded)"
    raise ValueError(f"{step['forwarded']} positions were forwarded; {wanted} expected")


def _cpu(step: dict[str, Any]) -> float:
    return step["user"] + step["system"] + step["children"]


def side_figures(run: dict[str, Any], side: str) -> dict[str, Any]:
    """Times, throughput and shares of one side of a speed run."""
    steps: Sequence[dict[str, Any]] = run["sides"][side]["steps"]
    shape, online = ModelShape(**run["shape"]), run["variant"] == "default"
    peak = 1e9 * max(p[run["precision"]] for p in run["peaks"])
    lengths = [[tuple(row) for row in step["lengths"]] for step in steps]
    done = [work_done(step, run["device"]) for step in steps]
    walls = [step["wall"] for step in steps]
    low, middle, high = spread(walls)

    def share(works: Sequence[Work]) -> float:
        return sum(w.flops(shape, reference_forward=online) for w in works) / sum(walls) / peak

    real = [real_tokens(batch) for batch in lengths]
    return {
        "seconds": middle,
        "seconds_low": low,
        "seconds_high": high,
        "cpu_seconds": median(map(_cpu, steps)),
        "system_share": sum(s["system"] for s in steps) / sum(map(_cpu, steps)),
        "faults": median(s["faults"] for s in steps),
        "real_tokens_per_second": median(n / wall for n, wall in zip(real, walls, strict=True)),
        "forwarded_per_real": sum(s["forwarded"] for s in steps) / sum(real),
        "share_of_peak": share(done),
        "needed_share_of_peak": share([shared_work(batch) for batch in lengths]),
        "others_median": median(s["others"] for s in steps),
        "others_highest": max(s["others"] for s in steps),
        "build_seconds": run["sides"][side]["built"]["wall"],
        "peak_gflops": {name: max(p[name] for p in run["peaks"]) for name in run["peaks"][0]},
    }


def speed_figures(run: dict[str, Any]) -> dict[str, Any]:
    """Both sides of a speed run, and TRL's time over ours where both are there."""
    figures: dict[str, Any] = {"sides": {side: side_figures(run, side) for side in run["sides"]}}
    if {TRL, OURS} <= set(run["sides"]):
        steps = {side: run["sides"][side]["steps"] for side in (TRL, OURS)}
        figures["wall_ratio"] = ratio(*([s["wall"] for s in steps[side]] for side in (TRL, OURS)))
        figures["cpu_ratio"] = ratio(*([_cpu(s) for s in steps[side]] for side in (TRL, OURS)))
        losses = [run["sides"][side]["losses"] for side in (TRL, OURS)]
        figures["first_losses"] = [series[0] for series in losses if series]
        figures["largest_loss_gap"] = max((abs(a - b) for a, b in zip(*losses, strict=False)), default=None)
    return figures


def memory_figures(run: dict[str, Any]) -> dict[str, Any]:
    """Our peak over TRL's: of the process, and of what came on top of the libraries loaded before."""
    key = "gpu_peak" if run["device"] == "cuda" else "peak"
    figures: dict[str, Any] = {"key": key, "peaks": {side: m[key] for side, m in run["sides"].items()}}
    if {TRL, OURS} <= set(run["sides"]):
        trl, ours = run["sides"][TRL], run["sides"][OURS]
        figures["ratio"] = ours[key] / trl[key]
        figures["ratio_above_imports"] = (ours["peak"] - ours["before"]) / (trl["peak"] - trl["before"])
    return figures


def preparation_figures(run: dict[str, Any]) -> dict[str, Any]:
    """Rows per second of each side, and ours over TRL's."""
    rates = {side: [r["rows_per_second"] for r in runs] for side, runs in run["sides"].items()}
    figures: dict[str, Any] = {
        "rows_per_second": {side: spread(values) for side, values in rates.items()},
        "rows_per_cpu_second": {
            side: median(run["rows"] / r["cpu"] for r in runs) for side, runs in run["sides"].items()
        },
    }
    if {TRL, OURS} <= set(rates):
        figures["ratio"] = ratio(rates[OURS], rates[TRL])
    return figures


def observer_figures(run: dict[str, Any]) -> dict[str, Any]:
    """What observers cost: the step's time with them over that without, and the time in their hooks; generation apart.

    `share` is that of the time of the watched steps less generation, `threads` the CPU time of background threads
    beside it (they work while the step does).
    """
    bare, watched = run["sides"]["bare"], run["sides"]["watched"]
    own = [step["wall"] - step["generation"] for step in watched]
    hooks = {name: sum(step["hooks"][name] for step in watched) for name in watched[0]["hooks"]}
    return {
        "ratio": ratio(own, [step["wall"] for step in bare]),
        "seconds": {"bare": spread([step["wall"] for step in bare]), "watched": spread(own)},
        "hooks": {name: seconds / sum(own) for name, seconds in hooks.items()},
        "share": sum(hooks.values()) / sum(own),
        "threads": sum(step["threads"] for step in watched) / sum(own),
        "generation": sum(step["generation"] for step in watched) / sum(own),
        "begin": sum(run["begin"].values()),
        "others_highest": max(step["others"] for step in [*bare, *watched]),
    }
