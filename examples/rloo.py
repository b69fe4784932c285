"""RLOO against a reward model: answers that it scores higher become more likely, with a KL penalty in the reward.

Run it: python examples/rloo.py MODEL REWARD_MODEL PROMPTS.jsonl   (a reward model made by `preftune reward`)
"""

import sys
from typing import Any

from datasets import Dataset, load_dataset

from preftune import RLOOConfig, RLOOTrainer


def train(model: str, reward_model: str, rows: Dataset, output_dir: str, **options: Any) -> RLOOTrainer:
    options = {"learning_rate": 1e-6, "num_generations": 4, "max_completion_length": 128, "beta": 0.05, **options}
    trainer = RLOOTrainer(model, reward_funcs=reward_model, args=RLOOConfig(output_dir, **options), train_dataset=rows)
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], load_dataset("json", data_files=sys.argv[3], split="train"), "rloo-output")
