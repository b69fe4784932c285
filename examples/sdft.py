"""SDFT on grade-school mathematics: the teacher reads the worked solution, the student learns to answer without it.

Run it: python examples/sdft.py MODEL GSM8K.jsonl   (rows with question and answer, the worked solution)
"""

import sys
from typing import Any

from datasets import Dataset, load_dataset
from peft import LoraConfig

from preftune import SDFTConfig, SDFTTrainer

TEACH = "{prompt}\n\nHere is one way to solve it:\n{privileged_context}\n\nNow answer in your own words."


def lessons(rows: Dataset) -> Dataset:
    return rows.map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["question"]}],
            "privileged_context": row["answer"],
        },
        remove_columns=rows.column_names,
    )


def train(model: str, rows: Dataset, output_dir: str, **options: Any) -> SDFTTrainer:
    split = lessons(rows).train_test_split(test_size=min(64, len(rows) // 2), seed=0)
    options = {
        "learning_rate": 2e-5, "num_generations": 4, "max_completion_length": 256, "teacher_prompt_template": TEACH,
        "teacher_model_kind": "base", "distillation_mode": "topk_logits", "distillation_topk": 100,
        "distillation_add_tail": True, **options,
    }  # fmt: skip
    trainer = SDFTTrainer(
        model,
        args=SDFTConfig(output_dir, **options),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], load_dataset("json", data_files=sys.argv[2], split="train"), "sdft-output")
