"""DPO on preference pairs, the reference following the policy (TR-DPO), measured on held-out pairs before and after.

Run it: python examples/dpo.py MODEL PAIRS.json   (rows with prompt, chosen, rejected; or both whole conversations)
"""

import sys
from typing import Any

from datasets import Dataset, load_dataset

from preftune import DPOConfig, DPOTrainer


def train(model: str, rows: Dataset, output_dir: str, **options: Any) -> DPOTrainer:
    split = rows.train_test_split(test_size=0.1, seed=0)
    options = {"learning_rate": 5e-6, "sync_ref_model": True, "ref_model_sync_steps": 64, **options}
    trainer = DPOTrainer(
        model, args=DPOConfig(output_dir, **options), train_dataset=split["train"], eval_dataset=split["test"]
    )
    print("before:", trainer.score_pairs(split["test"]))
    trainer.train()
    print("after: ", trainer.score_pairs(split["test"]))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], load_dataset("json", data_files=sys.argv[2], split="train"), "dpo-output")
