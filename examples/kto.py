"""KTO with LoRA on single completions that users liked or not, measured on held-out rows before and after.

Run it: python examples/kto.py MODEL ROWS.json   (rows with prompt, completion, label; or messages, label; or pairs)
"""

import sys
from typing import Any

from datasets import Dataset, load_dataset
from peft import LoraConfig

from preftune import KTOConfig, KTOTrainer


def train(model: str, rows: Dataset, output_dir: str, **options: Any) -> KTOTrainer:
    split = rows.train_test_split(test_size=0.1, seed=0)
    options = {"learning_rate": 5e-5, "eval_strategy": "epoch", **options}
    trainer = KTOTrainer(
        model,
        args=KTOConfig(output_dir, **options),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    print("before:", trainer.score_rows(split["test"]))
    trainer.train()
    print("after: ", trainer.score_rows(split["test"]))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], load_dataset("json", data_files=sys.argv[2], split="train"), "kto-output")
