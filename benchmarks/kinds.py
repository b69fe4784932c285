"""The trainers that are measured, one `Kind` each: class, rows, sizes of a step, wanted ratios. Pure, without torch.

A worker knows what to build from its kind alone; the two sides differ in the module their classes come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Wanted = tuple[float, float]
GENERATIONS = 8
ANSWER_TOKENS = 32
PACKED_TOKENS = 1024
DOCUMENTS = 4
"""Documents written for each packed row of the short profile, which holds about 3.7 of them."""


@dataclass(frozen=True)
class Kind:
    """One trainer and how a step of it looks.

    Attributes:
        trainer: What its class names begin with: `KTO` is KTOTrainer and KTOConfig.
        title: What its rows are.
        count: Rows, pairs or prompts a step on a CPU; None: the length profile says.
        options: Options of both configs besides the common ones.
        wanted: TRL's time of a step over ours, the least and the aim; None: the length profile says.
        wanted_parts: The same of the parts of an online step.
    """

    trainer: str
    title: str
    count: int | None
    options: dict[str, Any] = field(default_factory=dict)
    wanted: Wanted | None = None
    wanted_parts: dict[str, Wanted] = field(default_factory=dict)

    @property
    def is_online(self) -> bool:
        return "num_generations" in self.options


OFFLINE = {"train_sampling_strategy": "sequential"}
PACKED = {**OFFLINE, "packing": True}
ONLINE = {"num_generations": GENERATIONS, "shuffle_dataset": False}
PARTS = {"rollout": (3.0, 6.0), "training": (4.0, 6.0)}

KINDS = {
    "dpo": Kind("DPO", "pairs", None, OFFLINE),
    "sft": Kind("SFT", "prompt and completion, scored on completions", 4, OFFLINE, (2.5, 4.0)),
    "sft-packed": Kind("SFT", f"conversations packed to {PACKED_TOKENS} tokens, all scored", 1, PACKED, (1.5, 4.0)),
    "kto": Kind("KTO", "labelled completions, good and bad in turn", 4, OFFLINE, (3.0, 5.0)),
    "reward": Kind("Reward", "pairs", 2, OFFLINE, (2.0, 3.0)),
    "grpo": Kind("GRPO", f"prompts, {GENERATIONS} answers each", 1, ONLINE, (3.0, 6.0), PARTS),
    "rloo": Kind("RLOO", f"prompts, {GENERATIONS} answers each, KL", 1, ONLINE, (4.0, 6.0), PARTS),
}
TINY_PROMPTS = 4


def rows_of(kind: str, pairs: Sequence[Row]) -> list[Row]:
    """Rows of the kind from preference pairs of messages, one each."""
    if kind == "sft":
        return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    if kind == "sft-packed":
        return [{"messages": pair["prompt"] + pair["chosen"]} for pair in pairs]
    if kind == "kto":
        return [
            {"prompt": pair["prompt"], "completion": pair["rejected" if i % 2 else "chosen"], "label": i % 2 == 0}
            for i, pair in enumerate(pairs)
        ]
    if KINDS[kind].is_online:
        return [{"prompt": pair["prompt"]} for pair in pairs]
    return list(pairs)


def pairs_needed(kind: str, count: int, steps: int) -> int:
    """Preference pairs that `steps` steps of `count` rows are made of, and one step more."""
    return count * (steps + 1) * (DOCUMENTS if kind == "sft-packed" else 1)
