"""LogCompletionsCallback: the right prompts, the right completions, once each, at the right steps."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import zipfile

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig, TrainerControl, TrainerState

from preftune.callbacks.completions import LogCompletionsCallback
from preftune.callbacks.generation import generate_completions
from preftune.callbacks.prompts import read_prompts
from preftune.callbacks.trackers.jsonl import jsonl_tracker, read_table
from tests.unit.callbacks.tiny_trainer import PROMPTS, eval_rows, tiny_trainer


def greedy(model, prompt: list[int], count: int) -> list[int]:
    """One full forward a token: no cache, no padding, no batch."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def table(tmp_path) -> list[dict]:
    jsonl_tracker(tmp_path / "logs").flush(10)
    return read_table(tmp_path / "logs", "completions")


class TestGeneration:
    def test_equals_greedy_token_by_token_whatever_the_batch(self, tiny_model, tokenizer):
        model = tiny_model("llama")
        prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
        assert len({len(p) for p in prompts}) == 3
        config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected = [greedy(model, p, 5) for p in prompts]
        for batch_size in (1, 2, 3):
            assert generate_completions(model, tokenizer, prompts, config, batch_size=batch_size) == expected
        assert generate_completions(model, tokenizer, [], config, batch_size=2) == []

    @pytest.mark.parametrize("as_list", [False, True])
    def test_ends_with_the_first_of_any_end_token(self, tiny_model, tokenizer, as_list):
        model = tiny_model("llama")
        prompt = tokenizer(PROMPTS[0])["input_ids"]
        free = greedy(model, prompt, 6)
        end = free[2]
        config = GenerationConfig(
            max_new_tokens=6, do_sample=False, eos_token_id=[end, 319] if as_list else end, pad_token_id=0
        )
        longer = tokenizer(PROMPTS[1])["input_ids"]
        first, _ = generate_completions(model, tokenizer, [prompt, longer], config, batch_size=2)
        assert first == free[: free.index(end) + 1]

    def test_keyword_arguments_win_over_the_config(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        config = GenerationConfig(max_new_tokens=7, temperature=0.5, do_sample=True)
        callback = LogCompletionsCallback(trainer, config, max_new_tokens=2)
        effective = callback.answers.effective_generation_config()
        assert (effective.max_new_tokens, effective.temperature) == (2, 0.5)
        assert config.max_new_tokens == 7
        lengths = []
        callback.answers._generate = lambda m, t, p, c: lengths.append(c.max_new_tokens) or [[7]] * len(p)
        callback.log_completions(1)
        assert lengths == [2]

    def test_end_and_pad_come_from_model_and_tokenizer(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        trainer.model.generation_config.eos_token_id = [2, 5]
        given = GenerationConfig(max_new_tokens=2)
        config = LogCompletionsCallback(trainer, given).answers.effective_generation_config()
        assert (config.eos_token_id, config.pad_token_id) == ([2, 5], 0)
        assert LogCompletionsCallback(trainer).answers.effective_generation_config().max_new_tokens == 128

    def test_sampling_repeats_itself_while_the_policy_stays(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        callback = LogCompletionsCallback(trainer, max_new_tokens=8, do_sample=True)
        first, _ = callback.log_completions(1), torch.rand(3)
        assert [r["completion"] for r in callback.log_completions(1)] == [r["completion"] for r in first]


class TestPrompts:
    def ids_and_texts(self, rows, tokenizer, count=None):
        return [(p.ids, p.text) for p in read_prompts(rows, tokenizer, count)]

    def test_text_gets_the_special_tokens_of_the_tokenizer(self, make_tokenizer):
        tokenizer = make_tokenizer("bos")
        ((ids, text),) = self.ids_and_texts([{"prompt": "Say hello."}], tokenizer)
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in ids[1:]
        assert text == "Say hello."

    def test_messages_go_through_the_template_with_one_beginning(self, make_tokenizer):
        tokenizer = make_tokenizer("bos")
        ((ids, text),) = self.ids_and_texts([{"prompt": [{"role": "user", "content": "Hi"}]}], tokenizer)
        assert ids.count(tokenizer.bos_token_id) == 1
        assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

    def test_a_beginning_that_is_a_mark_of_every_turn_is_shown(self, make_tokenizer):
        """SmolLM2's first token is `<|im_start|>`: without the first of them a conversation reads as if torn."""
        tokenizer = make_tokenizer("plain")
        tokenizer.bos_token = "<|im_start|>"
        ((_, text),) = self.ids_and_texts([{"prompt": [{"role": "user", "content": "Hi"}]}], tokenizer)
        assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

    def test_options_of_the_template_come_from_the_row(self, tokenizer):
        row = {"prompt": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"enable_thinking": True}}
        ((_, text),) = self.ids_and_texts([row], tokenizer)
        assert text.endswith("<|im_start|>assistant\n<think>\n")

    def test_a_prepared_preference_row(self, make_tokenizer):
        tokenizer = make_tokenizer("bos")
        ids = tokenizer("Say hello.")["input_ids"]
        row = {"prompt_ids": ids, "chosen_ids": [7], "rejected_ids": [8]}
        assert self.ids_and_texts([row], tokenizer) == [(ids, "Say hello.")]

    def test_a_prepared_sft_row_and_one_without_a_prompt(self, tokenizer):
        ids = tokenizer("Say hello.")["input_ids"]
        masked = {"input_ids": [*ids, 9, 9], "labels": [*[-100] * len(ids), 9, 9]}
        whole = {"input_ids": [9, 9], "labels": [9, 9]}
        assert self.ids_and_texts([whole, masked], tokenizer) == [(ids, "Say hello.")]
        with pytest.raises(ValueError, match="no row of the eval set has a prompt"):
            read_prompts([whole], tokenizer, None)

    def test_so_many_of_each_set(self, tokenizer):
        sets = {"a": [{"prompt": str(i)} for i in range(5)], "b": [{"prompt": "x"}]}
        prompts = read_prompts(sets, tokenizer, 2)
        assert [(p.dataset, p.text) for p in prompts] == [("a", "0"), ("a", "1"), ("b", "x")]
        assert len(read_prompts(sets["a"], tokenizer, None)) == 5

    def test_a_stream_is_read_no_further_than_needed(self, tokenizer):
        def rows():
            yield {"prompt": "first"}
            raise AssertionError("read too far")

        assert [p.text for p in read_prompts(rows(), tokenizer, 1)] == ["first"]


class TestConstruction:
    def test_without_an_eval_set(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        trainer.eval_dataset = None
        with pytest.raises(ValueError, match="no eval_dataset"):
            LogCompletionsCallback(trainer)

    def test_without_prompts(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        trainer.eval_dataset = Dataset.from_dict({"text": ["a"]})
        with pytest.raises(ValueError, match=r"columns \['text'\].*'prompt' column"):
            LogCompletionsCallback(trainer)
        trainer.eval_dataset = {"good": eval_rows(), "bad": Dataset.from_dict({"text": ["a"]})}
        with pytest.raises(ValueError, match="eval set 'bad'"):
            LogCompletionsCallback(trainer)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"freq": 0}, "freq=0"),
            ({"num_prompts": -1}, "num_prompts=-1"),
            ({"max_new_tokns": 3}, r"unknown generation options \['max_new_tokns'\]"),
        ],
    )
    def test_wrong_options(self, tmp_path, options, message):
        with pytest.raises(ValueError, match=message):
            LogCompletionsCallback(tiny_trainer(tmp_path), **options)

    def test_without_a_tokenizer(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        trainer.processing_class = None
        with pytest.raises(ValueError, match="NoneType; completions need a tokenizer"):
            LogCompletionsCallback(trainer)


class TestRun:
    @pytest.mark.parametrize("remove_unused_columns", [True, False])
    def test_the_table_grows_by_the_prompts_every_freq_steps(self, tmp_path, remove_unused_columns):
        trainer = tiny_trainer(tmp_path, remove_unused_columns=remove_unused_columns)
        trainer.add_callback(LogCompletionsCallback(trainer, freq=2, num_prompts=2, max_new_tokens=3))
        trainer.train()
        rows = table(tmp_path)
        assert [list(row) for row in rows] == [["step", "prompt", "completion"]] * 4
        assert [(row["step"], row["prompt"]) for row in rows] == [(s, p) for s in (2, 4) for p in PROMPTS[:2]]

    def test_the_completions_are_those_of_the_policy_at_that_step(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        trainer.add_callback(LogCompletionsCallback(trainer, freq=4, max_new_tokens=5, do_sample=False))
        trainer.train()
        tokenizer, model = trainer.processing_class, trainer.model.eval()
        free = [greedy(model, tokenizer(p)["input_ids"], 5) for p in PROMPTS]
        ended = [ids[: ids.index(2)] if 2 in ids else ids for ids in free]
        assert [r["completion"] for r in table(tmp_path)] == [
            tokenizer.decode(ids, skip_special_tokens=True) for ids in ended
        ]

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"eval_strategy": "steps", "eval_steps": 2}, [2, 4]),
            ({"eval_strategy": "no", "eval_steps": None, "max_steps": 20}, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
            ({"eval_strategy": "no", "eval_steps": None, "max_steps": 3}, [1, 2, 3]),
        ],
    )
    def test_default_frequency(self, tmp_path, options, expected):
        trainer = tiny_trainer(tmp_path, **options)
        callback = LogCompletionsCallback(trainer)
        logged: list[int] = []
        callback.log_completions = lambda step: logged.append(step) or []
        state = TrainerState(max_steps=trainer.args.max_steps, eval_steps=trainer.args.eval_steps)
        for step in range(1, trainer.args.max_steps + 1):
            state.global_step = step
            callback.on_step_end(trainer.args, state, TrainerControl())
        assert logged == expected

    def test_a_resumed_run_has_every_step_once(self, tmp_path):
        for checkpoint in (None, str(tmp_path / "checkpoint-2")):
            trainer = tiny_trainer(tmp_path, save_strategy="steps", save_steps=2)
            trainer.add_callback(LogCompletionsCallback(trainer, freq=1, num_prompts=1, max_new_tokens=2))
            trainer.train(resume_from_checkpoint=checkpoint)
            jsonl_tracker(tmp_path / "logs").close()
        assert [row["step"] for row in read_table(tmp_path / "logs", "completions")] == [1, 2, 3, 4]

    def test_several_sets_and_a_generate_of_ones_own(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        seen = []

        def generate(model, tokenizer, prompts, config):
            seen.append((model.training, [tokenizer.decode(p) for p in prompts]))
            return [tokenizer(" ok")["input_ids"] for _ in prompts]

        sets = {"a": [{"prompt": "x"}], "b": [{"prompt": "y"}]}
        callback = LogCompletionsCallback(trainer, dataset=sets, generate=generate)
        callback.log_completions(9)
        assert seen == [(False, ["x", "y"])]
        assert table(tmp_path) == [
            {"step": 9, "prompt": "x", "completion": " ok", "dataset": "a"},
            {"step": 9, "prompt": "y", "completion": " ok", "dataset": "b"},
        ]

    def test_rows_that_cannot_be_read_cost_one_warning(self, tmp_path, caplog):
        trainer = tiny_trainer(tmp_path)
        rows = [{"prompt": "a"}, {"prompt": 3}]
        callback = LogCompletionsCallback(trainer, dataset=rows, freq=1, num_prompts=2, max_new_tokens=2)
        trainer.add_callback(callback)
        trainer.train()
        assert trainer.state.global_step == trainer.args.max_steps
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "goes on" in r.getMessage()]
        assert len(warnings) == 1, warnings

    def test_other_ranks_generate_but_do_not_write(self, tmp_path, monkeypatch):
        trainer = tiny_trainer(tmp_path)
        callback = LogCompletionsCallback(trainer, num_prompts=1, max_new_tokens=2)
        monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
        callback.on_train_begin(trainer.args, TrainerState(is_world_process_zero=False), TrainerControl())
        assert len(callback.log_completions(1)) == 1
        jsonl_tracker(tmp_path / "logs").flush(10)
        assert not (tmp_path / "logs").exists()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_run_read_back(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_WEAVE", "true")
    with wandb.init(project="p", dir=tmp_path) as run:
        trainer = tiny_trainer(tmp_path)
        trainer.add_callback(LogCompletionsCallback(trainer, freq=2, num_prompts=2, max_new_tokens=2))
        trainer.train()
        assert wandb.run is run
    wandb.teardown()
    paths = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/completions*.table.json"))
    tables = [json.loads(path.read_text()) for path in paths]
    assert [t["columns"] for t in tables] == [["step", "prompt", "completion"]] * 2
    rows = sorted((row[0], row[1]) for t in tables for row in t["data"])
    assert rows == sorted((s, p) for s in (2, 4) for p in PROMPTS[:2])  # each row was uploaded once


@pytest.mark.skipif(importlib.util.find_spec("comet_ml") is None, reason="comet_ml is not installed")
def test_comet_offline_archive_read_back(tmp_path):
    import comet_ml

    config = comet_ml.ExperimentConfig(
        offline_directory=str(tmp_path),
        log_code=False,
        log_git_metadata=False,
        auto_output_logging=False,
        log_env_details=False,
    )
    experiment = comet_ml.start(online=False, api_key="x" * 25, experiment_config=config)
    trainer = tiny_trainer(tmp_path)
    trainer.add_callback(LogCompletionsCallback(trainer, freq=2, num_prompts=2, max_new_tokens=2))
    trainer.train()
    experiment.end()
    (archive,) = tmp_path.glob("*.zip")
    rows = []
    with zipfile.ZipFile(archive) as members:
        for line in members.read("messages.json").splitlines():
            payload = json.loads(line)["payload"]
            asset = payload.get("additional_params", {})
            if asset.get("fileName") == "completions.csv":
                assert asset["step"] in (2, 4)
                rows += list(csv.DictReader(io.StringIO(members.read(payload["file_path"]).decode())))
    assert [(int(row["step"]), row["prompt"]) for row in rows] == [(s, p) for s in (2, 4) for p in PROMPTS[:2]]
    assert all("completion" in row for row in rows)


@pytest.mark.parametrize("name", ["wandb", "comet_ml"])
def test_a_tracker_without_an_open_run_costs_one_warning(tmp_path, caplog, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    from preftune.callbacks.trackers.choose import default_trackers

    trainer = tiny_trainer(tmp_path)
    trainer.args.report_to = [name]
    tracker = next(t for t in default_trackers(trainer) if t.name == name.partition("_")[0])
    for step in range(3):
        tracker.log_table("completions", [{"step": step}], step)
    assert tracker.flush(10)
    assert tracker.failed == 3
    assert len([r for r in caplog.records if "Training goes on" in r.getMessage()]) == 1
