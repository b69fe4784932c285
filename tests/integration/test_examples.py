"""The examples run as they stand, and are as short as they promise."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
from datasets import Dataset

from tests.support.runs import logged

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_new_pair_loss_in_fewer_than_sixty_lines(tmp_path, tiny_model, tokenizer, preference_rows):
    """SimPO of the first batch by hand, from the means that the trainer's own pair table gives."""
    assert len((EXAMPLES / "extend_pair_loss.py").read_text().splitlines()) < 60
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    example, rows = load("extend_pair_loss"), Dataset.from_list(preference_rows["text"][:2])
    options = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "gamma": 0.25,
    }
    options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = example.train(str(tmp_path / "model"), rows, str(tmp_path / "out"), **options)
    assert trainer.reference is None and trainer.ref_model is None
    start = example.SimPOTrainer(
        str(tmp_path / "model"), args=example.SimPOConfig(str(tmp_path / "b")), train_dataset=rows
    )
    table = start.score_pairs(rows)
    margins = 2.0 * (table.chosen_logps / table.chosen_lengths - table.rejected_logps / table.rejected_lengths) - 0.25
    expected = sum(math.log1p(math.exp(-m)) for m in margins) / 2
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    assert logged(trainer, "simpo/margin")[0] == pytest.approx(margins.mean(), rel=1e-5)


def test_kto(tmp_path, tiny_model, tokenizer, preference_rows):
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = Dataset.from_list(preference_rows["text"] * 2)
    options = {"max_steps": 2, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = load("kto").train(str(tmp_path / "model"), rows, str(tmp_path / "out"), **options)
    assert trainer.reference.form == "disabled_adapter"
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_a_new_online_algorithm_in_fewer_than_a_hundred_lines(tmp_path, tiny_model, tokenizer):
    """GMPO: on-policy the ratio is 1 and the loss -mean(A) = 0; on the second pass tokens leave the bounds."""
    assert len((EXAMPLES / "extend_online.py").read_text().splitlines()) < 100
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = Dataset.from_list([{"prompt": text} for text in ["the cat", "a dog", "who", "it"]])
    options = {"max_steps": 2, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    options |= {"num_iterations": 2, "learning_rate": 0.1, "epsilon": 0.01, "max_completion_length": 5}

    def short(completions, **_):
        return [-float(len(text)) for text in completions]

    trainer = load("extend_online").train(str(tmp_path / "model"), rows, short, str(tmp_path / "out"), **options)
    assert logged(trainer, "loss")[0] == pytest.approx(0.0, abs=1e-6)
    clipped = logged(trainer, "gmpo/clip_ratio")
    assert clipped[0] == 0.0 < clipped[1]


SHORT = {"max_steps": 2, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}


@pytest.fixture
def model(tmp_path, tiny_model, tokenizer):
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_sft_and_dpo(tmp_path, model, sft_rows, preference_rows):
    sft = load("sft").train(model, Dataset.from_list(sft_rows["messages"] * 3), str(tmp_path / "a"), **SHORT)
    assert sft.args.packing and len(logged(sft, "loss")) == 2
    dpo = load("dpo").train(model, Dataset.from_list(preference_rows["text"] * 3), str(tmp_path / "b"), **SHORT)
    assert logged(dpo, "loss")[0] == pytest.approx(math.log(2))


def test_grpo_and_rloo(tmp_path, model, tiny_model, tokenizer):
    rows = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(6)]
    short = SHORT | {"max_completion_length": 5, "per_device_train_batch_size": 8}
    grpo = load("grpo").train(model, Dataset.from_list(rows), str(tmp_path / "a"), **short)
    assert grpo.rewards.names == ["ends_as_asked", "numeric_match_reward"]
    assert grpo.reference.form == "reference_adapter" and len(logged(grpo, "reward")) == 2
    tiny_model(head="value").save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    prompts = Dataset.from_list([{"prompt": row["question"]} for row in rows])
    rloo = load("rloo").train(model, str(tmp_path / "judge"), prompts, str(tmp_path / "b"), **short)
    assert rloo.rewards.names == ["judge"] and len(logged(rloo, "rewards/judge/mean")) == 2


def test_sdft_and_sdpo(tmp_path, model):
    rows = Dataset.from_list([{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(6)])
    short = SHORT | {"max_completion_length": 5, "per_device_train_batch_size": 8}
    sdft = load("sdft").train(model, rows, str(tmp_path / "a"), **short)
    assert sdft.reference.form == "disabled_adapter" and min(logged(sdft, "sdft/distillation_loss")) > 0
    sdpo = load("sdpo").train(model, rows, str(tmp_path / "b"), **short)
    assert sdpo.reference.form == "reference_adapter" and len(logged(sdpo, "sdpo/distillation_loss")) == 2
