"""What the logs of a run say about its health, in words: pure functions from log entries to findings.

The health callback looks at them while the run goes on, the report afterwards. Thresholds are the constants here, and
docs/health.md explains them; metrics that a trainer does not log are never found at fault.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Entry = Mapping[str, Any]
"""One log of a trainer with its `step`; values that are no numbers are passed over."""

START, RECENT, WINDOW = 3, 5, 20
"""Logs that tell how a run began, that tell how it is now, and that are looked at together."""
LEAST = START + RECENT  # logs below which a trend is not judged

SPIKE = 10.0  # times the median gradient norm of the window
COLLAPSE_SHARE, COLLAPSE_NATS = 0.3, 10.0  # of where log p(chosen) began, and at least so much
BOTH_FALL_SHARE, BOTH_FALL_NATS, MARGIN_RISE = 0.05, 2.0, 0.1
STUCK_BAND = 0.05  # around an accuracy of one half
STUCK_LOGS = 15
TRUNCATED = 0.3  # of completions
NO_SIGNAL = 0.8  # of groups
FAR_KL = 1.0  # nats a token
CLIPPED = 0.3  # of tokens
ENTROPY_SHARE, ENTROPY_FLOOR = 0.1, 0.05  # of where it began, which was above the floor (nats a token)
CORRELATION, LENGTH_RISE = 0.8, 0.2


@dataclass(frozen=True)
class Finding:
    """Something about a run that its owner should know.

    Attributes:
        code: Its name: what `stop_on` takes, and the heading of docs/health.md that explains it.
        title: A few words.
        text: What was seen, with the numbers.
        remedy: What to try.
        step: The optimizer step at which it was first seen; None for what has no step, such as data.
        last_step: The last step at which it was seen.
    """

    code: str
    title: str
    text: str
    remedy: str
    step: int | None = None
    last_step: int | None = None

    @property
    def is_severe(self) -> bool:
        """Whether a run that goes on like this is lost."""
        return self.code in SEVERE

    def __str__(self) -> str:
        return f"{self.title}. {self.text} {self.remedy}"


SEVERE = ("loss_not_finite", "chosen_collapse", "entropy_collapse")


def find(entries: Sequence[Entry]) -> list[Finding]:
    """The findings at the last of `entries`: the first few logs of training of a run and its last `WINDOW`.

    Logs of evaluation and summaries may be among them.
    """
    training = [entry for entry in entries if is_training(entry)]
    if not training:
        return []
    step = int(training[-1]["step"])
    found = [check(training) for check in CHECKS.values()]
    return [replace(finding, step=step, last_step=step) for finding in found if finding is not None]


def scan(history: Sequence[Entry]) -> list[Finding]:
    """All findings of a whole run, each once with its first and last step and the words of the last; severe ones first.

    Very long histories are looked at in strides, never so wide that a log is passed over.
    """
    training = [entry for entry in history if is_training(entry)]
    stride = min(WINDOW // 2, max(1, len(training) // 2000))
    seen: dict[str, Finding] = {}
    for end in sorted({*range(1, len(training), stride), len(training)}):
        for finding in find(training[: min(START, end)] + training[max(START, end - WINDOW) : end]):
            first = seen.get(finding.code, finding)
            seen[finding.code] = replace(finding, step=first.step)
    return sorted(seen.values(), key=lambda finding: (not finding.is_severe, finding.step))


def is_training(entry: Entry) -> bool:
    """Whether it is a log of training, and neither of evaluation nor the summary at the end."""
    return "loss" in entry and "step" in entry


# The checks: each takes logs of training, oldest first, at least one, and judges the last of them.


def _loss_not_finite(entries: Sequence[Entry]) -> Finding | None:
    recent = entries[-WINDOW:]
    bad = {name: e["step"] for e in recent for name in ("loss", "grad_norm") if _is_broken(e.get(name))}
    if not bad:
        return None
    where = ", ".join(f"{name} at step {step}" for name, step in bad.items())
    return Finding(
        "loss_not_finite",
        "The loss or its gradient is not finite",
        f"NaN or infinity: {where}.",
        "Go back to a checkpoint before it; lower learning_rate or set max_grad_norm; with fp16 try bf16 or float32.",
    )


def _grad_norm_spike(entries: Sequence[Entry]) -> Finding | None:
    """The latest value of the window that stands out from those before it; the first steps of a run have none."""
    norms = _series(entries[-WINDOW:], "grad_norm")
    for i in reversed(range(LEAST, len(norms))):
        middle = statistics.median(value for _, value in norms[:i])
        step, value = norms[i]
        if 0 < SPIKE * middle < value:
            return Finding(
                "grad_norm_spike",
                "The gradient norm spikes",
                f"It was {value:.3g} at step {step}, {value / middle:.0f} times the median of the logs before it.",
                "Look at the rows of that step; lower learning_rate, raise warmup_steps or lower max_grad_norm.",
            )
    return None


def _chosen_collapse(entries: Sequence[Entry]) -> Finding | None:
    change = _change(entries, "logps/chosen")
    if change is None:
        return None
    first, now = change
    if first - now <= max(COLLAPSE_SHARE * abs(first), COLLAPSE_NATS):
        return None
    return Finding(
        "chosen_collapse",
        "Chosen answers become improbable",
        f"The mean log-probability of chosen answers fell from {first:.1f} to {now:.1f} nats.",
        "Raise beta, lower learning_rate, or add the sft loss (loss_type=['sigmoid', 'sft']).",
    )


def _margins_while_both_fall(entries: Sequence[Entry]) -> Finding | None:
    margin, chosen, rejected = (_change(entries, k) for k in ("rewards/margins", "logps/chosen", "logps/rejected"))
    if margin is None or chosen is None or rejected is None:
        return None
    falls = [first - now > max(BOTH_FALL_SHARE * abs(first), BOTH_FALL_NATS) for first, now in (chosen, rejected)]
    if not all(falls) or margin[1] - margin[0] <= MARGIN_RISE:
        return None
    return Finding(
        "margins_while_both_fall",
        "Margins grow while both answers lose probability",
        f"Log p(chosen) went from {chosen[0]:.1f} to {chosen[1]:.1f} and log p(rejected) from {rejected[0]:.1f} to "
        f"{rejected[1]:.1f} nats, while the margin rose by {margin[1] - margin[0]:.2f}.",
        "The mass goes to answers that are in no pair: add the sft loss, raise beta, or stop earlier.",
    )


def _accuracy_stuck(entries: Sequence[Entry]) -> Finding | None:
    for name in ("rewards/accuracies", "accuracy"):
        values = [value for _, value in _series(entries[-STUCK_LOGS:], name)]
        if len(values) < STUCK_LOGS or abs(_mean(values) - 0.5) > STUCK_BAND:
            continue
        return Finding(
            "accuracy_stuck",
            "Reward accuracy stays at chance",
            f"{name} was {_mean(values):.2f} on average over the last {len(values)} logs.",
            "Check that chosen and rejected are not swapped or alike in half of the rows; raise learning_rate.",
        )
    return None


def _truncated(entries: Sequence[Entry]) -> Finding | None:
    share = _now(entries, "completions/clipped_ratio")
    if share is None or share <= TRUNCATED:
        return None
    return Finding(
        "truncated",
        "Many completions are cut off",
        f"{share:.0%} of completions ran out of max_completion_length.",
        "Raise max_completion_length, reward brevity, or set mask_truncated_completions=True.",
    )


def _no_signal(entries: Sequence[Entry]) -> Finding | None:
    share, reward = _now(entries, "frac_reward_zero_std"), _now(entries, "reward")
    if share is None or share <= NO_SIGNAL:
        return None
    level = "" if reward is None else f" (mean reward {reward:.3g})"
    return Finding(
        "no_signal",
        "Most groups teach nothing",
        f"In {share:.0%} of groups all completions have the same reward{level}, so their advantages are 0.",
        "Where rewards are high the task is learned: take harder prompts. Where they are low: easier prompts, a reward "
        "with steps in between, more num_generations or a higher temperature.",
    )


def _kl_clamped(entries: Sequence[Entry]) -> Finding | None:
    """KTO: the baseline is a mean log-ratio of mismatched answers, clamped at 0 from below."""
    recent = [entry for entry in entries[-WINDOW:] if "logps/chosen" in entry and "rewards/chosen" in entry]
    values = [value for _, value in _series(recent, "kl")]
    moved = [abs(value) for _, value in _series(recent, "rewards/chosen")]
    if len(values) < LEAST or any(values) or max(moved, default=0.0) < 0.01:
        return None
    return Finding(
        "kl_clamped",
        "KTO's baseline is clamped at 0",
        f"kl was 0 in all of the last {len(values)} logs: mismatched answers have become less probable than before.",
        "The loss has no baseline then: lower learning_rate, raise beta, or use loss_type='apo_zero_unpaired'.",
    )


def _far_from_reference(entries: Sequence[Entry]) -> Finding | None:
    if "reward" not in entries[-1]:
        return None  # per-token KL is logged by online trainers
    value = _now(entries, "kl")
    if value is None or value <= FAR_KL:
        return None
    return Finding(
        "far_from_reference",
        "The policy is far from its reference",
        f"KL to the reference was {value:.2f} nats a token on average over the last {RECENT} logs.",
        "Its text may no longer be language: read some completions; raise beta or lower learning_rate.",
    )


def _ratio_clipped(entries: Sequence[Entry]) -> Finding | None:
    share = _now(entries, "clip_ratio/region_mean")
    if share is None or share <= CLIPPED:
        return None
    return Finding(
        "ratio_clipped",
        "Much of the gradient is clipped away",
        f"The clip acted on {share:.0%} of tokens on average over the last {RECENT} logs.",
        "Updates reuse completions for too long: lower num_iterations, steps_per_generation or learning_rate.",
    )


def _entropy_collapse(entries: Sequence[Entry]) -> Finding | None:
    change = _change(entries, "entropy")
    if change is None or change[0] < ENTROPY_FLOOR or change[1] >= ENTROPY_SHARE * change[0]:
        return None
    return Finding(
        "entropy_collapse",
        "Entropy has collapsed",
        f"It fell from {change[0]:.3g} to {change[1]:.3g} nats a token.",
        "Unless the task has one right answer, raise beta, temperature or (GRPO) entropy_coef, or lower learning_rate.",
    )


def _longer_is_better(entries: Sequence[Entry]) -> Finding | None:
    pairs = [
        (length, reward)
        for entry in entries[-WINDOW:]
        if (length := number(entry.get("completions/mean_length"))) is not None
        and (reward := number(entry.get("reward"))) is not None
    ]
    change = _change(entries, "completions/mean_length")
    if change is None or len(pairs) < LEAST or change[1] <= (1 + LENGTH_RISE) * change[0]:
        return None
    lengths, rewards = zip(*pairs)
    if min(map(_spread, (lengths, rewards))) == 0 or statistics.correlation(lengths, rewards) <= CORRELATION:
        return None
    return Finding(
        "longer_is_better",
        "Reward grows with length",
        f"Mean length went from {change[0]:.0f} to {change[1]:.0f} tokens, and its correlation with reward over the "
        f"last {len(pairs)} logs is {statistics.correlation(lengths, rewards):.2f}.",
        "Read some completions: where they are longer but not better, penalise length or fix the reward; loss_type "
        "'dr_grpo' has no length bias of its own.",
    )


CHECKS: dict[str, Callable[[Sequence[Entry]], Finding | None]] = {
    "loss_not_finite": _loss_not_finite,
    "grad_norm_spike": _grad_norm_spike,
    "chosen_collapse": _chosen_collapse,
    "margins_while_both_fall": _margins_while_both_fall,
    "accuracy_stuck": _accuracy_stuck,
    "truncated": _truncated,
    "no_signal": _no_signal,
    "kl_clamped": _kl_clamped,
    "far_from_reference": _far_from_reference,
    "ratio_clipped": _ratio_clipped,
    "entropy_collapse": _entropy_collapse,
    "longer_is_better": _longer_is_better,
}


def number(value: Any) -> float | None:
    """The value where it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _is_broken(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _series(entries: Iterable[Entry], name: str) -> list[tuple[int, float]]:
    """(step, value) of the entries that have a finite number under `name`."""
    found = ((entry["step"], number(entry.get(name))) for entry in entries)
    return [(step, value) for step, value in found if value is not None]


def _now(entries: Sequence[Entry], name: str) -> float | None:
    """Mean over the last `RECENT` logs, where so many have the metric."""
    values = [value for _, value in _series(entries[-RECENT:], name)]
    return _mean(values) if len(values) == RECENT else None


def _change(entries: Sequence[Entry], name: str) -> tuple[float, float] | None:
    """Mean over the first and over the last logs, where there are enough for both."""
    values = [value for _, value in _series(entries, name)]
    return (_mean(values[:START]), _mean(values[-RECENT:])) if len(values) >= LEAST else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)
