"""A reward model with LoRA from a causal language model, measured on held-out pairs before and after.

Run it: python examples/reward.py MODEL PAIRS.json   (rows with prompt, chosen, rejected)
"""

import sys
from typing import Any

from datasets import Dataset, load_dataset
from peft import LoraConfig

from preftune import RewardConfig, RewardTrainer


def train(model: str, pairs: Dataset, output_dir: str, **options: Any) -> RewardTrainer:
    split = pairs.train_test_split(test_size=0.1, seed=0)
    options = {"center_rewards_coefficient": 0.01, "eval_strategy": "epoch", **options}
    trainer = RewardTrainer(
        model,
        args=RewardConfig(output_dir, **options),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        peft_config=LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    print("before:", trainer.score_pairs(split["test"]))
    trainer.train()
    print("after: ", trainer.score_pairs(split["test"]))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], load_dataset("json", data_files=sys.argv[2], split="train"), "reward-output")
