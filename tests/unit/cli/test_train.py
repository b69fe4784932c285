"""The run function: what the trainer is built with, what is saved and printed, and what is refused before.

The trainer is a recorder; real training through the command line is in tests/integration.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from preftune.callbacks.health import HealthCallback
from preftune.callbacks.progress import RichProgressCallback
from preftune.cli import train
from preftune.cli.commands import COMMANDS
from preftune.cli.launch import LAUNCHED
from preftune.cli.options import load_options
from preftune.cli.parse import parse
from preftune.configs.model import ModelConfig
from preftune.errors import ConfigError, DataFormatError

ROWS = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(8)]
BUILT: list[Recorder] = []


class Recorder:
    """Stands for a trainer: keeps what it was given and the order of calls."""

    def __init__(self, **given) -> None:
        self.given, self.calls, self.saved = given, [], {}
        self.eval_dataset = given["eval_dataset"]
        self.model = torch.nn.Linear(1, 1)
        self.model.register_buffer("mask", torch.zeros(1, dtype=torch.bool))
        BUILT.append(self)

    def train(self):
        self.calls.append("train")
        return SimpleNamespace(metrics={"train_loss": 0.5})

    def save_model(self, folder):
        self.calls.append(f"save {folder}")

    def save_state(self):
        self.calls.append("state")

    def save_metrics(self, split, metrics):
        self.saved[split] = metrics

    def evaluate(self):
        self.calls.append("evaluate")
        return {"eval_loss": 0.25}

    def score_pairs(self, rows):
        self.calls.append(f"score {len(rows)}")
        share = SimpleNamespace(value=0.5, low=0.25, high=0.75)
        return SimpleNamespace(name="pair_accuracy", shares={"summed": share, "per_token": share})

    def score_rows(self, rows):
        self.calls.append(f"score rows {len(rows)}")
        return SimpleNamespace(name="row_accuracy", shares={})

    def push_to_hub(self):
        self.calls.append("push")

    def add_callback(self, callback):
        self.calls.append(f"add {callback}")

    def remove_callback(self, callback):
        self.calls.append(f"remove {callback.__name__}")

    def is_world_process_zero(self):
        return True


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    BUILT.clear()
    (tmp_path / "pairs.json").write_text(json.dumps(ROWS))
    for name in (LAUNCHED, "WORLD_SIZE", "LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*tokens: str, name: str = "dpo") -> Recorder:
    command = dataclasses.replace(COMMANDS[name], trainer=f"{__name__}:Recorder")
    options = load_options(command.option_classes)
    parsed = parse(["--model_name_or_path", "owner/tiny", "--dataset_name", "pairs.json", *tokens], options)
    assert train.run(command, parsed) == 0
    return BUILT[-1]


def test_the_plain_run(capsys):
    trainer = run()
    given = trainer.given
    assert given["model"] == "owner/tiny" and given["args"].output_dir == "tiny-DPO"
    assert given["args"].model_init_kwargs == {"revision": "main", "dtype": "float32"}
    assert given["train_dataset"].to_list() == ROWS and given["eval_dataset"] is None and given["peft_config"] is None
    assert [type(c) for c in given["callbacks"]] == [RichProgressCallback, HealthCallback]
    assert given["args"].disable_tqdm
    assert "quantization_config" not in given
    assert trainer.calls == ["train", "save tiny-DPO", "state"] and trainer.saved == {"train": {"train_loss": 0.5}}
    assert capsys.readouterr().out == "The model and its metrics are in tiny-DPO\n"


def test_held_out_pairs_are_scored_before_and_after(capsys):
    trainer = run("--test_split_size", "3", "--output_dir", "out")
    assert len(trainer.given["train_dataset"]) == 5 and len(trainer.given["eval_dataset"]) == 3
    assert trainer.calls == ["score 3", "train", "save out", "state", "score 3", "evaluate"]
    assert trainer.saved["eval"] == {"eval_loss": 0.25}
    assert trainer.saved["pair_accuracy"]["summed_before_low"] == 0.25 and len(trainer.saved["pair_accuracy"]) == 12
    out = capsys.readouterr().out
    assert "before training" in out and "after training" in out


def test_labelled_rows_are_scored_too(folder, capsys):
    rows = [{"prompt": f"p{i}", "completion": f"c{i}", "label": i % 2 == 0} for i in range(8)]
    (folder / "pairs.json").write_text(json.dumps(rows))
    trainer = run("--test_split_size", "3", name="kto")
    assert trainer.calls == ["score rows 3", "train", "save tiny-KTO", "state", "score rows 3", "evaluate"]
    assert trainer.saved["row_accuracy"] == {}
    assert capsys.readouterr().out.count("training, ") == 2


def test_no_more_pairs_than_needed(monkeypatch):
    monkeypatch.setattr(train, "MOST_SCORED", 2)
    assert "score 2" in run("--test_split_size", "3").calls


def test_sft_scores_no_pairs(folder):
    (folder / "pairs.json").write_text(json.dumps([{"text": "a"}] * 4))
    assert run("--test_split_size", "1", name="sft").calls == ["train", "save tiny-SFT", "state", "evaluate"]


def test_model_options_reach_from_pretrained():
    trainer = run(
        *("--dtype", "bfloat16", "--attn_implementation", "sdpa", "--model_revision", "v2"),
        *("--model_init_kwargs", "attn_implementation=eager", "use_cache=false"),
    )
    assert trainer.given["args"].model_init_kwargs == {
        "revision": "v2",
        "dtype": "bfloat16",
        "attn_implementation": "eager",
        "use_cache": False,
    }


def test_adapter_and_quantization():
    trainer = run("--use_peft", "--lora_r", "4", "--load_in_8bit")
    assert isinstance(trainer.given["peft_config"], LoraConfig) and trainer.given["peft_config"].r == 4
    assert trainer.given["quantization_config"].load_in_8bit


def test_adapter_options_without_adapter_are_mentioned():
    with pytest.warns(UserWarning, match="lora_r, use_dora without use_peft"):
        run("--lora_r", "4", "--use_dora")


@pytest.mark.parametrize(
    ("progress", "callbacks", "calls"),
    [("auto", 1, []), ("plain", 1, []), ("bar", 0, []), ("none", 0, ["remove PrinterCallback"])],
)
def test_progress(progress, callbacks, calls):
    trainer = run("--progress", progress, "--no_health")
    assert len(trainer.given["callbacks"]) == callbacks
    assert [call for call in trainer.calls if call.startswith("remove")] == calls
    assert trainer.given["args"].disable_tqdm == (progress != "bar")


def test_answers_to_held_out_prompts(monkeypatch):
    """Held-out rows are there for them without any evaluation; what they lack is told in one line."""
    made = []

    def callback(trainer, **options):
        made.append((trainer, options))
        if trainer.eval_dataset.column_names == ["text"]:
            raise ValueError("it has no prompts")
        return "answers"

    monkeypatch.setattr(train, "LogCompletionsCallback", callback)
    trainer = run("--eval_completions", "2", "--test_split_size", "3", "--eval_completion_tokens", "7")
    assert made == [(trainer, {"num_prompts": 2, "max_new_tokens": 7})]
    assert trainer.calls[:2] == ["add answers", "score 3"]
    with pytest.raises(ConfigError, match="split 'test'"):
        run("--eval_completions", "2")
    Path("pairs.json").write_text(json.dumps([{"text": "a"}] * 4))
    with pytest.raises(ConfigError, match="eval_completions=2: it has no prompts"):
        run("--eval_completions", "2", "--test_split_size", "1", name="sft")


def test_boolean_buffers_are_left_out_where_asked_for():
    assert run("--ignore_bias_buffers").model._ddp_params_and_buffers_to_ignore == ["mask"]


def test_push_to_hub():
    assert run("--push_to_hub").calls[-1] == "push"


def test_contradictions_fail_before_the_data_is_read(folder):
    (folder / "pairs.json").unlink()
    with pytest.raises(ConfigError, match="sync_ref_model.*bema_ref_model"):
        run("--sync_ref_model", "--bema_ref_model")
    assert BUILT == []


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        (["--loss_type", "no_such_module:loss"], ConfigError, "no module 'no_such_module'"),
        (["--loss_type", "json:lods"], ConfigError, "Did you mean 'loads'"),
        (["--columns", "chosen=better"], DataFormatError, "maps 'chosen' to 'better'"),
        (["--eval_strategy", "steps"], ConfigError, "split 'test'"),
        (["--dataset_test_split", "validation"], ConfigError, "split 'validation'"),
        (["--test_split_size", "8"], ConfigError, "leaves 0"),
    ],
)
def test_what_fails_before_the_model_is_loaded(tokens, kind, message):
    with pytest.raises(kind, match=message):
        run(*tokens)
    assert BUILT == []


def test_a_loss_in_the_current_folder(folder, monkeypatch):
    (folder / "my_pair_losses.py").write_text("def mine(policy, ref, **_):\n    return None\n")
    monkeypatch.syspath_prepend(str(folder))
    assert run("--loss_type", "my_pair_losses:mine").given["args"].loss_type == ["my_pair_losses:mine"]


def test_a_process_that_would_train_alone(monkeypatch):
    monkeypatch.setenv(LAUNCHED, "2")
    with pytest.raises(ConfigError, match="2 processes were asked for"):
        run()
    assert BUILT == []


def test_device_map_of_quantised_weights(monkeypatch):
    monkeypatch.setattr(train, "get_kbit_device_map", lambda: {"": 3})
    assert train.model_init_kwargs(ModelConfig(load_in_4bit=True))["device_map"] == {"": 3}
    assert "device_map" not in train.model_init_kwargs(ModelConfig())


def test_streams_are_not_scored():
    streamed = Dataset.from_list(ROWS).to_iterable_dataset()
    assert train.score_held_out(COMMANDS["dpo"], SimpleNamespace(eval_dataset=streamed)) is None


def test_rewards_are_resolved_before_anything_is_loaded():
    from preftune.cli.train import reward_functions
    from preftune.configs.script import RewardArguments
    from preftune.rewards import exact_match_reward

    found = reward_functions(RewardArguments(["exact_match_reward", "math:fsum"], "owner/judge"))
    assert found == [exact_match_reward, math.fsum, "owner/judge"]
    with pytest.raises(ConfigError, match="exact_match_reward"):
        reward_functions(RewardArguments(["exact_mach_reward"]))
    with pytest.raises(ConfigError, match="No reward is given"):
        RewardArguments()
