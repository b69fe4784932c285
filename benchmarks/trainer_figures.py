"""From the raw steps of a trainer other than DPO to the figures that are reported. Pure: numbers in, numbers out.

A step of GRPO or RLOO is a rollout and all the rest, its training pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.stats import Ratio, ratio, spread
from benchmarks.summary import OURS, TRL
from benchmarks.work import ModelShape, decode_bytes, done_flops, needed_flops, row_tokens

Step = dict[str, Any]
PARTS: dict[str, Callable[[Step], float]] = {
    "step": lambda step: step["wall"],
    "rollout": lambda step: step["rollout"]["wall"],
    "training": lambda step: step["wall"] - step["rollout"]["wall"],
    "CPU": lambda step: step["user"] + step["system"] + step["children"],
}


def parts_of(run: dict[str, Any]) -> list[str]:
    """What of a step was timed."""
    is_online = "bandwidths" in run
    return [name for name in PARTS if is_online or name in ("step", "CPU")]


def side_figures(run: dict[str, Any], side: str) -> dict[str, Any]:
    """Times, throughput and shares of one side.

    "share_of_peak" is None where the side forwarded positions in a way that the model of work does not know.
    """
    steps: Sequence[Step] = run["sides"][side]["steps"]
    kind, shape = run["trainer"], ModelShape(**run["shape"])
    peak = 1e9 * max(p[run["precision"]] for p in run["peaks"])
    is_online = "rollout" in parts_of(run)
    learning = sum(map(PARTS["training" if is_online else "step"], steps))
    done = [done_flops(kind, step, shape, run["device"], is_ours=side == OURS) for step in steps]
    known = [flops for flops in done if flops is not None]
    real = [row_tokens(step["trees"]) for step in steps]
    memory = "gpu_peak" if run["device"] == "cuda" else "peak"
    return {
        "seconds": {name: spread([PARTS[name](step) for step in steps]) for name in parts_of(run)},
        "real_tokens_per_second": median(n / step["wall"] for n, step in zip(real, steps, strict=True)),
        "forwarded_per_real": sum(step["forwarded"] + step["looked_at"] for step in steps) / sum(real),
        "share_of_peak": sum(known) / learning / peak if len(known) == len(steps) else None,
        "needed_share_of_peak": sum(needed_flops(kind, step, shape) for step in steps) / learning / peak,
        "system_share": sum(s["system"] for s in steps) / sum(map(PARTS["CPU"], steps)),
        "peak_memory": run["sides"][side]["peak"][memory],
        "others_median": median(s["others"] for s in steps),
        "others_highest": max(s["others"] for s in steps),
        "peak_gflops": peak / 1e9,
        **(decode_figures(run, steps, shape) if is_online else {}),
    }


def decode_figures(run: dict[str, Any], steps: Sequence[Step], shape: ModelShape) -> dict[str, float]:
    """How fast tokens were drawn, and how near the memory's speed: the weights, read once a decoding step."""
    fastest = 1e9 * max(b["gigabytes"] for b in run["bandwidths"])
    bound = decode_bytes(shape) / fastest
    decoding = [step["rollout"]["wall"] - step["prefill"] for step in steps]
    counts = [step["decode_steps"] for step in steps]
    return {
        "completion_tokens": sum(step["scored"] for step in steps) / len(steps),
        "rollout_tokens_per_second": median(step["scored"] / step["rollout"]["wall"] for step in steps),
        "prefill_seconds": median(step["prefill"] for step in steps),
        "decode_step_seconds": sum(decoding) / sum(counts),
        "decode_bound_seconds": bound,
        "share_of_bandwidth": bound * sum(counts) / sum(decoding),
    }


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """Both sides, and TRL's time over ours for each part of a step, per step and (online) per completion token."""
    found: dict[str, Any] = {"sides": {side: side_figures(run, side) for side in run["sides"]}}
    if {TRL, OURS} <= set(run["sides"]):
        steps = [run["sides"][side]["steps"] for side in (TRL, OURS)]
        names = parts_of(run)
        found["ratios"] = {name: ratio(*([PARTS[name](s) for s in of_side] for of_side in steps)) for name in names}
        if "rollout" in names:
            found["token_ratios"] = {name: per_token(name, *steps) for name in names}
        losses = [run["sides"][side]["losses"] for side in (TRL, OURS)]
        found["first_losses"] = [series[0] for series in losses if series]
        found["largest_loss_gap"] = max((abs(a - b) for a, b in zip(*losses, strict=False)), default=None)
    return found


def per_token(part: str, trl: Sequence[Step], ours: Sequence[Step]) -> Ratio:
    """TRL's time over ours for each completion token that the side drew (or learned from)."""
    return ratio(*([PARTS[part](step) / step["scored"] for step in steps] for steps in (trl, ours)))
