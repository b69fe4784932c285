"""Which curves a report shows, in which groups, and their points: few enough to draw, with every extreme kept.

A metric that no group names is shown under "Other", so nothing that was logged is hidden.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preftune.callbacks.findings import Entry
from preftune.callbacks.metric_names import DRIFT, FACTS, LAST_MOVE, MOVES

MAX_POINTS = 1200
"""Of a curve; longer ones keep the lowest and the highest value of each stretch."""

Points = tuple[list[int], list[float | None]]
"""Steps, and the value at each; None where it was not finite."""


@dataclass(frozen=True)
class Event:
    """Something that happened at a step: "sync", "BEMA", "reference moved", "resumed", "not finite"."""

    step: int
    kind: str


@dataclass(frozen=True)
class Plot:
    """One diagram.

    Attributes:
        title: What it shows, with the unit.
        metrics: Names logged by trainers; a pattern (with `*`) stands for all that match. `eval_` twins come along.
        note: How to read it, in a sentence.
    """

    title: str
    metrics: tuple[str, ...]
    note: str = ""


GROUPS: dict[str, tuple[Plot, ...]] = {
    "Learning": (
        Plot("Loss", ("loss",)),
        Plot("Token accuracy", ("mean_token_accuracy",), "Share of target tokens that are the most probable one."),
        Plot("Gradient norm", ("grad_norm",), "Of the last step before each log, before clipping."),
        Plot("Learning rate", ("learning_rate",)),
        Plot("Auxiliary loss", ("aux_loss",)),
    ),
    "Preferences": (
        Plot("Reward accuracy", ("rewards/accuracies", "accuracy"), "Share of rows judged right; chance is 0.5."),
        Plot("Reward margin", ("rewards/margins", "margin"), "Reward of chosen less that of rejected."),
        Plot("Implicit rewards", ("rewards/chosen", "rewards/rejected"), "beta (log p - log p_ref)."),
        Plot("Log-probabilities (nats)", ("logps/chosen", "logps/rejected"), "Summed over a completion."),
        Plot("Mean logits", ("logits/chosen", "logits/rejected")),
        Plot("Scores", ("mean_reward", "min_reward", "max_reward")),
    ),
    "Rewards": (
        Plot("Reward", ("reward",), "All functions together, with their weights."),
        Plot("Rewards by function", ("rewards/*/mean",)),
        Plot("Spread of rewards", ("reward_std", "rewards/*/std")),
        Plot("Groups without signal", ("frac_reward_zero_std",), "Share of groups whose rewards are all equal."),
    ),
    "Self-distillation": (
        Plot("Distance from the teacher", ("self_distillation/distillation_loss", "self_distillation/policy_loss")),
        Plot(
            "Attempts and groups that succeed",
            ("self_distillation/success_sample_fraction", "self_distillation/success_group_fraction"),
            "Only what has a success or feedback to learn from has a teacher.",
        ),
        Plot(
            "Attempts with a teacher",
            ("self_distillation/reprompt_sample_fraction", "self_distillation/feedback_used_fraction"),
        ),
        Plot("Groups without signal", ("self_distillation/flat_group_fraction",)),
    ),
    "Policy and reference": (
        Plot("KL to the reference (nats)", ("kl",)),
        Plot("Drift", (DRIFT,), "Norm of policy minus reference."),
        Plot("Entropy (nats a token)", ("entropy",)),
        Plot("Entropy bonus", ("entropy_coef",)),
    ),
    "Lengths": (
        Plot("Length (tokens)", ("completions/mean_length", "completions/min_length", "completions/max_length")),
        Plot("Cut off", ("completions/clipped_ratio",), "Share that ran out of max_completion_length."),
        Plot(
            "Length of those that ended (tokens)",
            ("completions/*_terminated_length",),
        ),
    ),
    "Clipping": (
        Plot("Clipped tokens", ("clip_ratio/*_mean", "*_clip_ratio"), "Share of tokens at which the clip acts."),
        Plot("Clipped tokens, extremes", ("clip_ratio/low_min", "clip_ratio/high_max")),
        Plot("Sampler against trainer (nats)", ("sampling/sampling_logp_difference/*",)),
        Plot("Importance ratios", ("sampling/importance_sampling_ratio/*",)),
    ),
    "Time": (
        Plot("Seconds to draw and reward a round", ("round_time",)),
        Plot("Seconds of a reward a completion", ("rewards/*/seconds_per_sample",)),
    ),
}  # fmt: skip
_NOT_CURVES = FACTS | {"wall_time"}
_SUMMARY = re.compile(r"train_|(eval_|test_).*(runtime|per_second)$")
_MARKED = re.compile(r"(eval_)?(loss|rewards/(chosen|rejected|accuracies|margins)|kl|reference/drift|logps/.*)$")


def series_of(entries: Sequence[Entry]) -> dict[str, Points]:
    """Every number that was logged, by name, thinned to `MAX_POINTS`; of a step logged twice the last value."""
    values: dict[str, dict[int, float]] = {}
    for entry in entries:
        for name, value in entry.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name.removeprefix("eval_") not in _NOT_CURVES and not _SUMMARY.match(name):
                values.setdefault(name, {})[entry["step"]] = float(value)
    return {name: thinned(sorted(points.items())) for name, points in values.items()}


def thinned(points: Sequence[tuple[int, float]], most: int = MAX_POINTS) -> Points:
    """About `most` points at most: of each stretch the lowest, the highest and the first that is not finite."""
    if len(points) <= most:
        kept = list(points)
    else:
        stretch = math.ceil(len(points) / (most // 2))
        kept = [points[0]]
        for start in range(0, len(points), stretch):
            kept += _extremes(points[start : start + stretch])
        kept = sorted(dict([*kept, points[-1]]).items())
    return [step for step, _ in kept], [_rounded(value) for _, value in kept]


def _extremes(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    finite = [point for point in points if math.isfinite(point[1])]
    broken = [point for point in points if not math.isfinite(point[1])][:1]
    if not finite:
        return broken
    return [min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1]), *broken]


def grouped(names: Iterable[str]) -> list[dict[str, Any]]:
    """The plots that these metrics fill: `[{"title", "plots": [{"title", "note", "metrics", "marked"}]}]`."""
    left = known = dict.fromkeys(names)
    groups = []
    for title, plots in GROUPS.items():
        filled = []
        for plot in plots:
            metrics = [name for wanted in plot.metrics for name in left if _matches(name, wanted, known)]
            if metrics:
                filled.append(_described(plot.title, plot.note, metrics))
            left = {name: None for name in left if name not in metrics}
        if filled:
            groups.append({"title": title, "plots": filled})
    others: dict[str, list[str]] = {}
    for name in left:
        others.setdefault(re.sub(r"^(eval|test)_", "", name), []).append(name)
    if others:
        plots = [_described(title, "", metrics) for title, metrics in others.items()]
        groups.append({"title": "Other", "plots": plots})
    return groups


def events_of(entries: Sequence[Entry], manifest: Mapping[str, Any] | None, resumed_at: Sequence[int]) -> list[Event]:
    """Moves of the reference, resumes and values that are not finite, in order of steps."""
    events = [Event(step, "resumed") for step in resumed_at]
    events += [Event(step, kind) for step, kind in moves_of(entries, (manifest or {}).get("config", {}))]
    for entry in entries:
        if any(isinstance(value, float) and not math.isfinite(value) for value in entry.values()):
            events.append(Event(entry["step"], "not finite"))
    kept = sorted(set(events), key=lambda event: (event.step, event.kind))
    return kept if len(kept) <= MAX_POINTS else kept[:: math.ceil(len(kept) / MAX_POINTS)]


def moves_of(entries: Sequence[Entry], config: Mapping[str, Any]) -> list[tuple[int, str]]:
    """(step, kind) of each move of the reference.

    Logs name the last move before each of them; where there were more, the options say when.
    """
    logged = [e[LAST_MOVE] for e in entries if LAST_MOVE in e]
    steps = sorted({int(step) for step in logged})
    count = max((int(e.get(MOVES, 0)) for e in entries), default=0)
    if not steps:
        return []
    kind, first, every = "reference moved", 0, 0
    if config.get("sync_ref_model"):
        kind = "sync"
        first = every = config.get("ref_model_sync_steps", 0)
    elif config.get("bema_ref_model"):
        kind, every = "BEMA", config.get("ref_model_update_freq", 0)
        after = config.get("ref_model_update_after", 0)
        first = after if after >= 1 else every
    if every and count > len(steps):
        steps = list(range(first, steps[-1] + 1, every))
    return [(step, kind) for step in steps]


def _described(title: str, note: str, metrics: list[str]) -> dict[str, Any]:
    return {"title": title, "note": note, "metrics": metrics, "marked": any(map(_MARKED.match, metrics))}


def _matches(name: str, wanted: str, names: Container[str]) -> bool:
    """`rewards/*/mean` takes what stands between; `eval_loss` and `eval_maths_loss` go with `loss`."""
    pattern = re.escape(wanted).replace(r"\*", ".+")
    base = re.sub(r"^(eval|test)_", "", name)
    of_a_set = r"(\w+_)?" if base != name and base not in names else ""
    return re.fullmatch(of_a_set + pattern, base) is not None


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
