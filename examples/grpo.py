"""GRPO on grade-school mathematics: half a point for a bare number, half for the right one; LoRA, a moving reference.

Run it: python examples/grpo.py MODEL GSM8K.jsonl   (rows with question and answer, which ends in "#### 18")
"""

import re
import sys
from typing import Any

from datasets import Dataset, load_dataset
from peft import LoraConfig

from preftune import GRPOConfig, GRPOTrainer
from preftune.rewards import numeric_match_reward

ASK = "{question}\nThink in a few steps. End with '#### ' and the number."


def ends_as_asked(completions: list[Any], **_: Any) -> list[float]:
    return [float(bool(re.search(r"#### -?[\d,.]+\s*$", answer[-1]["content"]))) for answer in completions]


def prompts(rows: Dataset) -> Dataset:
    return rows.map(lambda row: {"prompt": [{"role": "user", "content": ASK.format(question=row["question"])}]})


def train(model: str, rows: Dataset, output_dir: str, **options: Any) -> GRPOTrainer:
    split = prompts(rows).train_test_split(test_size=min(64, len(rows) // 2), seed=0)
    options = {
        "learning_rate": 2e-5, "num_generations": 8, "max_completion_length": 200, "beta": 0.02, "sync_ref_model": True,
        "ref_model_sync_steps": 64, "reward_weights": [0.5, 0.5], "log_completions": True, **options,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model,
        reward_funcs=[ends_as_asked, numeric_match_reward],
        args=GRPOConfig(output_dir, **options),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], load_dataset("json", data_files=sys.argv[2], split="train"), "grpo-output")
