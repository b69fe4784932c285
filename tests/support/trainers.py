"""Every trainer with a config, rows and a tiny model, for what must hold of all of them.

Rows are those of `tests.support.rows`; online trainers get a reward that counts small letters.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from preftune import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from tests.support.models import tiny_model
from tests.support.rows import preference_rows, sft_rows
from tests.support.runs import options

PAIRS = preference_rows()["text"]
LABELLED = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 3 > 0} for n, row in enumerate(PAIRS)]
PROMPTS = [{"prompt": row["prompt"]} for row in PAIRS]
TRAINERS: dict[str, tuple[Any, Any, list[dict]]] = {
    "sft": (SFTTrainer, SFTConfig, sft_rows()["prompt_completion"]),
    "dpo": (DPOTrainer, DPOConfig, PAIRS),
    "kto": (KTOTrainer, KTOConfig, LABELLED),
    "reward": (RewardTrainer, RewardConfig, PAIRS),
    "grpo": (GRPOTrainer, GRPOConfig, PROMPTS),
    "rloo": (RLOOTrainer, RLOOConfig, PROMPTS),
}
ONLINE = ("grpo", "rloo")


def letters(completions, **_) -> list[float]:
    """The share of small letters in each text."""
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


def build(folder, kind: str, tokenizer, *, rows: list[dict] | None = None, **changes: Any) -> Any:
    """A trainer of the kind; `changes` are options of its config, or `ref_model` and `peft_config`."""
    trainer, config, own_rows = TRAINERS[kind]
    given = {name: changes.pop(name) for name in ("peft_config", "ref_model") if name in changes}
    given |= {"reward_funcs": letters} if kind in ONLINE else {}
    return trainer(
        tiny_model(head="value" if kind == "reward" else "causal"),
        args=config(**options(folder, **changes)),
        train_dataset=Dataset.from_list(own_rows if rows is None else rows),
        processing_class=tokenizer,
        **given,
    )
