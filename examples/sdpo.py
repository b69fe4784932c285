"""SDPO on grade-school mathematics: failed attempts learn from the model itself, shown one that came out right.

Run it: python examples/sdpo.py MODEL GSM8K.jsonl   (rows with question and answer, which ends in "#### 18")
"""

import sys
from typing import Any

from datasets import Dataset, load_dataset
from peft import LoraConfig

from preftune import SDPOConfig, SDPOTrainer

ASK = "{question}\nThink in a few steps. End with '#### ' and the number."


def prompts(rows: Dataset) -> Dataset:
    return rows.map(lambda row: {"prompt": [{"role": "user", "content": ASK.format(question=row["question"])}]})


def train(model: str, rows: Dataset, output_dir: str, **options: Any) -> SDPOTrainer:
    options = {
        "learning_rate": 1e-5, "num_generations": 8, "max_completion_length": 256, "distillation_mode": "topk_logits",
        "distillation_topk": 20, "distillation_weight": 0.9, "log_completions": True, **options,
    }  # fmt: skip
    trainer = SDPOTrainer(
        model,
        reward_funcs="numeric_match_reward",
        args=SDPOConfig(output_dir, **options),
        train_dataset=prompts(rows),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], load_dataset("json", data_files=sys.argv[2], split="train"), "sdpo-output")
