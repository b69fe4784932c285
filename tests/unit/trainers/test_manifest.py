"""run.json: what it says, that it keeps no secret, that the row order is the one that was used, no harm."""

from __future__ import annotations

import hashlib
import json
import math
import re

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from preftune.callbacks.environment import MANIFEST, read_manifest
from preftune.configs.dpo import DPOConfig
from preftune.data.rounds import round_loader
from preftune.trainers.dpo import DPOTrainer
from preftune.trainers.manifest import (
    RunManifest,
    changed_fields,
    dataset_identity,
    final_metrics,
    row_order,
    without_secrets,
)
from tests.support.runs import digest, options


@pytest.fixture
def make(tiny_model, tokenizer, preference_rows, tmp_path):
    def make(name="run", callbacks=None, **changes) -> DPOTrainer:
        return DPOTrainer(
            tiny_model("llama"),
            args=DPOConfig(**options(tmp_path / name, **changes)),
            train_dataset=Dataset.from_list(preference_rows["text"]),
            processing_class=tokenizer,
            callbacks=callbacks,
        )

    return make


def test_what_it_says(make, tmp_path):
    trainer = make(hub_token="hf_very_secret", beta=0.25, max_steps=3)
    trainer.train()
    text = (tmp_path / "run" / MANIFEST).read_text()
    assert "hf_very_secret" not in text
    manifest = json.loads(text)
    assert manifest["trainer"] == "DPOTrainer" and manifest["max_steps"] == 3
    assert manifest["config"]["beta"] == 0.25
    assert {"beta", "max_steps", "hub_token"} <= set(manifest["config_changed"])
    assert "loss_type" not in manifest["config_changed"]
    assert manifest["seeds"]["seed"] == 0
    assert manifest["decisions"]["attention_layout"] == "tree" and manifest["decisions"]["reference"] == "frozen_copy"
    assert manifest["environment"]["torch"]
    assert manifest["data"]["reports"]["train"]["rows_in"] == manifest["data"]["train"]["rows"]
    parameters = sum(p.numel() for p in trainer.model.parameters())
    assert manifest["parameters"] == {"all": parameters, "trainable": parameters}
    assert manifest["result"]["steps"] == 3 and manifest["result"]["seconds"] > 0
    assert {"loss", "train_loss", "rewards/margins"} <= set(manifest["result"]["metrics"])


class Loader(TrainerCallback):
    """Keeps the dataloader of training."""

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        self.loader = train_dataloader


@pytest.mark.parametrize("changes", [{"seed": 3}, {"data_seed": 7}])
def test_row_order_is_the_one_that_is_used(make, changes):
    """Row i of the data is read as the k-th row of the first epoch exactly where the order says so."""
    seen = Loader()
    trainer = make(callbacks=[seen], num_train_epochs=1, max_steps=-1, **changes)
    used: list[int] = []
    numbers = {tuple(row["chosen_ids"]): i for i, row in enumerate(trainer.train_dataset)}
    collate = trainer.data_collator

    def spy(rows):
        used.extend(numbers[tuple(row["chosen_ids"])] for row in rows)
        return collate(rows)

    trainer.data_collator = spy
    trainer.train()
    assert len(set(used)) == len(trainer.train_dataset)
    described = row_order(seen.loader)
    manifest = read_manifest(trainer.args.output_dir)
    assert described["sha256"] == hashlib.sha256(repr(used).encode()).hexdigest()
    assert manifest["data"]["row_order"]["sha256"] == described["sha256"]


def test_row_order_of_rounds():
    """Five prompts in rounds of two: the rounds read the first four of the order."""
    prompts = Dataset.from_list([{"prompt_ids": [i]} for i in range(5)])
    loader = round_loader(prompts, round_prompts=2, steps_per_round=3, seed=1, shuffle=True)
    read = [row["prompt_ids"][0] for item in loader for row in item.rows]
    (left,) = set(range(5)) - set(read)
    assert row_order(loader) == {"rows": 5, "sha256": hashlib.sha256(repr([*read, left]).encode()).hexdigest()}


def test_a_resumed_run_keeps_its_beginning(make, tmp_path):
    make(save_strategy="steps", save_steps=2, max_steps=2).train()
    first = read_manifest(tmp_path / "run")
    trainer = make(save_strategy="steps", save_steps=2, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    manifest = read_manifest(tmp_path / "run")
    assert manifest["started"] == first["started"]
    assert [item["step"] for item in manifest["resumed"]] == [2]
    assert manifest["result"]["steps"] == 4


def test_a_folder_that_cannot_be_written_costs_a_warning(make, tmp_path, caplog):
    trainer = make(max_steps=1)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / f".{MANIFEST}.new").mkdir()
    trainer.train()
    assert any("could not be written" in record.message for record in caplog.records)


def test_changes_no_run(make):
    digests = []
    for name, wanted in (("a", True), ("b", False)):
        trainer = make(name)
        if not wanted:
            trainer.remove_callback(RunManifest)
        trainer.train()
        digests.append(digest(trainer))
    assert digests[0] == digests[1]


def test_secrets_by_name():
    given = {"token": "a", "api_key": "b", "x": {"wandb_api_key": "c"}, "eos_token": "<e>", "list": [{"password": "d"}]}
    kept = without_secrets(given | {"hub_token": None})
    assert re.findall(r'"[abcd]"', json.dumps(kept)) == []
    assert kept["eos_token"] == "<e>" and kept["hub_token"] is None


def test_changed_fields(tmp_path):
    """What the config itself fills in (bf16, accelerator_config, ...) was not asked for by anybody."""
    assert changed_fields(DPOConfig(str(tmp_path), use_cpu=True)) == ["output_dir"]
    assert "label_smoothing" in changed_fields(DPOConfig(str(tmp_path), label_smoothing=0.1, use_cpu=True))


class TestDataset:
    def test_content_decides(self):
        rows = [{"ids": [i, i + 1], "text": str(i)} for i in range(600)]
        a, b = (dataset_identity(Dataset.from_list(rows)) for _ in range(2))
        assert a["sampled_sha256"] == b["sampled_sha256"] and a["rows"] == 600
        rows[0]["ids"] = [5]
        assert dataset_identity(Dataset.from_list(rows))["sampled_sha256"] != a["sampled_sha256"]

    def test_at_most_256_rows_are_read(self):
        """Of 511 rows every second one, so that row 1 does not matter and row 2 does."""
        rows = [{"ids": [i]} for i in range(511)]
        sha, other, sampled = (
            dataset_identity(Dataset.from_list([*rows[:i], {"ids": [-1]}, *rows[i + 1 :]]))["sampled_sha256"]
            for i in (1, 3, 2)
        )
        assert sha == other != sampled

    def test_no_transform_of_the_user_runs(self):
        def transform(batch):
            raise AssertionError("it may draw random numbers")

        rows = Dataset.from_list([{"ids": [1]}])
        rows.set_transform(transform)
        assert dataset_identity(rows)["rows"] == 1

    def test_streams(self):
        assert dataset_identity(Dataset.from_list([{"a": 1}]).to_iterable_dataset()) == {"streaming": True}
        assert row_order(None) is None and row_order([1, 2]) is None


def test_final_metrics():
    """Training metrics of the last log, the last evaluation, and the summary."""
    history = [
        {"step": 1, "loss": 1.0, "gone": 2.0},
        {"step": 1, "eval_loss": 0.9},
        {"step": 2, "loss": 0.5},
        {"step": 2, "train_loss": math.nan},
    ]
    metrics = final_metrics(history)
    assert math.isnan(metrics.pop("train_loss"))
    assert metrics == {"loss": 0.5, "eval_loss": 0.9}
