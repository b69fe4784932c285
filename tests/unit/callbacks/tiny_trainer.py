"""A plain transformers.Trainer on a tiny model in which every source of randomness matters.

Attention dropout draws from torch, and the collator from `random` and numpy: who moves one of them changes the weights.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.support.models import tiny_model
from tests.support.tokenizers import make_tokenizer

PROMPTS = ["What is the capital of France?", "Two and two is", "Name a colour."]


def random_collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Replaces one token of each row by a random one."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    for row in ids:
        row[random.randrange(len(row))] = int(np.random.randint(6, 300))
    return {"input_ids": ids, "labels": ids.clone()}


def train_rows(count: int = 32, length: int = 12) -> Dataset:
    draw = np.random.default_rng(0)
    return Dataset.from_dict({"input_ids": draw.integers(6, 300, (count, length)).tolist()})


def eval_rows() -> Dataset:
    return Dataset.from_dict({"input_ids": [[7 + i] * 12 for i in range(len(PROMPTS))], "prompt": PROMPTS})


def tiny_trainer(
    output_dir: Path,
    callbacks: list[TrainerCallback] | None = None,
    *,
    trainer_class: type = Trainer,
    lora: bool = False,
    **options: Any,
) -> Trainer:
    """Four optimizer steps of two micro-batches, evaluated every second step, on one CPU thread."""
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "remove_unused_columns": False,
        "seed": 3,
    }
    args = TrainingArguments(output_dir=str(output_dir), **{**defaults, **options})
    model: Any = tiny_model("llama", attention_dropout=0.2)
    if lora:
        torch.manual_seed(0)  # PEFT draws the adapter from the global state
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], lora_dropout=0.2))
    return trainer_class(
        model=model,
        args=args,
        train_dataset=train_rows(),
        eval_dataset=eval_rows(),
        processing_class=make_tokenizer("plain"),
        data_collator=random_collator,
        callbacks=callbacks,
    )


def weights_hash(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
