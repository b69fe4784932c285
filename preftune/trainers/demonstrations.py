"""Which attempt of a group shows the others how it is done, what is logged of that, and when to say that nothing is.

All from rewards alone, NaN where there is none: such an attempt has not succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from preftune.trainers.rounds import Figures

_THINKING, _END_OF_THINKING = "<think>", "</think>"


def demonstrations(
    rewards_PG: Float[Tensor, "P G"], *, threshold: float, skip_successful: bool
) -> list[list[int | None]]:
    """For each attempt the number within its group of the first successful one; None where there is none.

    Args:
        threshold: The reward from which on an attempt is successful.
        skip_successful: Successful attempts get None. Without it they get the first success too, be it themselves.

    One fact to check: rewards 0, 1, 1 give 1, None, None, or 1, 1, 1.
    """
    shown = []
    for succeeded in (rewards_PG >= threshold).tolist():
        first = succeeded.index(True) if any(succeeded) else None
        shown.append([None if skip_successful and own else first for own in succeeded])
    return shown


def without_thinking(text: str) -> str:
    """What comes after the thinking; thinking that never ends is all of it."""
    if _END_OF_THINKING in text:
        return text.rpartition(_END_OF_THINKING)[2].lstrip()
    return text.partition(_THINKING)[0].rstrip()


def success_figures(
    names: Sequence[str], rewards_PGK: Float[Tensor, "P G K"], rewards_PG: Float[Tensor, "P G"], *, tolerance: float
) -> Figures:
    """Rewards of a whole round; attempts without one are left out."""
    group = "self_distillation"
    figures: Figures = {}
    for k, name in enumerate(names):
        values = rewards_PGK[..., k][~rewards_PGK[..., k].isnan()]
        if len(values):
            figures[f"{group}/rewards/{name}"] = values.mean().item(), len(values)
    values = rewards_PG[~rewards_PG.isnan()]
    if len(values):
        figures[f"{group}/reward_mean"] = values.mean().item(), len(values)
        figures[f"{group}/reward_std"] = _std(values), len(values)
        figures[f"{group}/reward_min"] = values.min().item(), 1
        figures[f"{group}/reward_max"] = values.max().item(), 1
    groups = [row[~row.isnan()] for row in rewards_PG]
    figures[f"{group}/group_reward_std_mean"] = sum(map(_std, groups)) / len(groups), len(groups)
    flat = [len(row) < 2 or (row.max() - row.min()).item() <= tolerance for row in groups]
    figures[f"{group}/flat_group_fraction"] = sum(flat) / len(flat), len(flat)
    return figures


def _std(values: Tensor) -> float:
    return values.std().item() if len(values) > 1 else 0.0


@dataclass
class Streaks:
    """Counts how many rounds in a row something has been so.

    Attributes:
        interval: After so many, and again after as many more, it is said; 0: never.
    """

    interval: int
    counts: dict[str, int] = field(default_factory=dict)

    def see(self, now: Mapping[str, bool]) -> list[str]:
        """What is to be said after a round in which this was so, by name."""
        for name, is_so in now.items():
            self.counts[name] = self.counts.get(name, 0) + 1 if is_so else 0
        if not self.interval:
            return []
        return [name for name in now if self.counts[name] and self.counts[name] % self.interval == 0]


WARNINGS = {
    "flat": "all attempts of a prompt had the same reward in the last {n} rounds, so that none stands out. Use rewards "
    "with more levels, prompts that are sometimes answered well, or a higher temperature.",
    "unsuccessful": "no attempt reached success_reward_threshold={threshold} in the last {n} rounds. Lower it, give "
    "the model easier prompts, or set include_environment_feedback=True.",
    "untaught": "no completion of this process had a teacher in the last {n} rounds, so that nothing is distilled: "
    "attempts learn from a successful one of their group, or from feedback, and there was neither.",
}
