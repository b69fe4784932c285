"""A run that was killed anywhere and resumed ends like the one that was not: the same sha256 of all that moves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM

from preftune import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from preftune.errors import CheckpointError
from preftune.trainers import base
from preftune.trainers import state as checkpoints
from tests.support.runs import die, digest, killed, logged, options

MOVING = {"sync": {"sync_ref_model": True, "ref_model_sync_steps": 2}, "fixed": {}}
MOVING["bema"] = {"bema_ref_model": True, "bema_update_freq": 1, "ref_model_update_freq": 2}


def build(tmp_path, tiny_model, tokenizer, rows, form="fixed", lora=False, **changes):
    args = options(tmp_path, max_steps=6, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2, **changes)
    return DPOTrainer(
        model=tiny_model(),
        args=DPOConfig(**args, **MOVING[form]),
        train_dataset=Dataset.from_list(rows["text"] * 2),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj", "v_proj"]) if lora else None,
    )


@pytest.mark.parametrize("form", ["fixed", "sync", "bema"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_resume_equals_uninterrupted(tmp_path, tiny_model, tokenizer, preference_rows, form, lora):
    parts = (tiny_model, tokenizer, preference_rows, form, lora)
    straight = build(tmp_path / "a", *parts, logging_steps=3)
    straight.train()
    resumed = build(tmp_path / "b", *parts, logging_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert digest(resumed) == digest(straight)
    # the last log window (steps 4-6) spans the checkpoint of step 4
    assert logged(resumed, "rewards/margins") == logged(straight, "rewards/margins")
    assert logged(resumed, "loss") == logged(straight, "loss")
    assert logged(resumed, "num_tokens")[-1] == logged(straight, "num_tokens")[-1]


FATAL = {
    "while_writing": (base, "save_running_state"),
    "before_rename": (checkpoints, "publish"),
    "after_rename": (base, "rotate_checkpoints"),
}


@pytest.mark.parametrize("where", ["mid_accumulation", *FATAL])
def test_killed_and_resumed(tmp_path, tiny_model, tokenizer, preference_rows, where):
    parts = (tiny_model, tokenizer, preference_rows, "sync")
    straight = build(tmp_path / "a", *parts)
    straight.train()

    def run() -> None:
        trainer = build(tmp_path / "b", *parts)
        if where == "mid_accumulation":
            step = trainer.training_step
            calls = []

            def fatal(*args, **kwargs):
                calls.append(1)
                return die() if len(calls) == 10 else step(*args, **kwargs)

            trainer.training_step = fatal
        else:
            owner, name = FATAL[where]
            original = vars(owner)[name]

            def at_step_four(*args, **kwargs):
                return die() if trainer.state.global_step == 4 else original(*args, **kwargs)

            setattr(owner, name, at_step_four)
        trainer.train()

    assert killed(run) == signal.SIGKILL
    saved = sorted(p.name for p in (tmp_path / "b").glob("checkpoint-*"))
    assert saved == (
        ["checkpoint-2", "checkpoint-4"] if where in ("mid_accumulation", "after_rename") else ["checkpoint-2"]
    )
    resumed = build(tmp_path / "b", *parts)
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed) == digest(straight)
    assert not (tmp_path / "b" / ".partial").exists() or not list((tmp_path / "b" / ".partial").iterdir())


def test_sft_resumes(tmp_path, tiny_model, tokenizer, sft_rows):
    def make(folder: str) -> SFTTrainer:
        args = options(tmp_path / folder, max_steps=6, save_strategy="steps", save_steps=4, packing=True, max_length=48)
        rows = Dataset.from_list(sft_rows["messages"] * 3)
        return SFTTrainer(model=tiny_model(), args=SFTConfig(**args), train_dataset=rows, processing_class=tokenizer)

    straight, resumed = make("a"), make("b")
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert digest(resumed) == digest(straight)


def damage_file(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    if how == "cut":
        weights.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        (folder / "optimizer.pt").unlink()


@pytest.mark.parametrize("how,word", [("cut", "bytes"), ("flipped", "checksum"), ("missing", "missing")])
def test_damaged_checkpoint_is_refused_or_passed_over(
    tmp_path, tiny_model, tokenizer, preference_rows, how, word, caplog
):
    first = build(tmp_path, tiny_model, tokenizer, preference_rows)
    first.train()
    damage_file(tmp_path / "checkpoint-6", how)
    again = build(tmp_path, tiny_model, tokenizer, preference_rows)
    with pytest.raises(CheckpointError, match=word):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert checkpoints.resolve_checkpoint(True, str(tmp_path)) == str(tmp_path / "checkpoint-4")
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-6 is not whole" in caplog.text
    assert digest(again) == digest(first)


def test_nothing_to_resume_from_is_said(tmp_path, tiny_model, tokenizer, preference_rows):
    trainer = build(tmp_path, tiny_model, tokenizer, preference_rows)
    with pytest.raises(CheckpointError, match="no checkpoint-N folder"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="no such folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


def test_config_field_is_honoured(tmp_path, tiny_model, tokenizer, preference_rows):
    first = build(tmp_path, tiny_model, tokenizer, preference_rows)
    first.train()
    folder = str(tmp_path / "checkpoint-4")
    again = build(tmp_path / "b", tiny_model, tokenizer, preference_rows, resume_from_checkpoint=folder)
    again.train()
    assert [e["step"] for e in again.state.log_history if "loss" in e] == [1, 2, 3, 4, 5, 6]
    assert digest(again) == digest(first)


def test_another_set_of_moving_parts_is_refused(tmp_path, tiny_model, tokenizer, preference_rows):
    build(tmp_path, tiny_model, tokenizer, preference_rows, "sync").train()
    other = build(tmp_path / "b", tiny_model, tokenizer, preference_rows, "fixed")
    with pytest.raises(CheckpointError, match="reference"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_run_built_from_the_checkpoint_is_refused(tmp_path, tiny_model, tokenizer, preference_rows):
    """Its reference would be the trained policy: the loss would start anew at log 2."""
    build(tmp_path, tiny_model, tokenizer, preference_rows).train()
    folder = str(tmp_path / "checkpoint-4")
    trained = LlamaForCausalLM.from_pretrained(folder)
    other = build(tmp_path / "b", lambda: trained, tokenizer, preference_rows)
    with pytest.raises(CheckpointError, match="the model that the run began with"):
        other.train(resume_from_checkpoint=folder)
