"""SFT on conversations: only what the assistant says is learned, several of them packed into each row.

Run it: python examples/sft.py MODEL CHATS.jsonl   (rows with messages, or prompt and completion)
"""

import sys
from typing import Any

from datasets import Dataset, load_dataset

from preftune import SFTConfig, SFTTrainer


def train(model: str, rows: Dataset, output_dir: str, **options: Any) -> SFTTrainer:
    options = {"learning_rate": 2e-5, "packing": True, "max_length": 2048, "assistant_only_loss": True, **options}
    trainer = SFTTrainer(model, args=SFTConfig(output_dir, **options), train_dataset=rows)
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], load_dataset("json", data_files=sys.argv[2], split="train"), "sft-output")
