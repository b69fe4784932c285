"""`isolated` gives everything back, and the law: a run ends with the same weights whatever watches it."""

from __future__ import annotations

import io
import logging
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import GenerationConfig

from preftune.callbacks.completions import LogCompletionsCallback
from preftune.callbacks.jsonl_log import JsonlLogCallback
from preftune.callbacks.progress import RichProgressCallback
from preftune.callbacks.trackers.base import Tracker
from preftune.models.isolation import isolated
from tests.unit.callbacks.tiny_trainer import tiny_trainer, weights_hash


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def random_states() -> tuple:
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()


class TestRandomStates:
    def test_restored_after_draws_and_seeds(self):
        before = random_states()
        with isolated(seed=7):
            first = draws()
        with isolated():
            draws()
            torch.manual_seed(99)
        assert random_states() == before
        with isolated(seed=7):
            assert draws() == first

    def test_without_a_seed_the_block_sees_the_state_of_training(self):
        with isolated():
            inside = draws()
        assert draws() == inside

    def test_restored_when_the_block_raises(self):
        before = random_states()
        with pytest.raises(ZeroDivisionError), isolated(seed=1):
            draws()[0] / 0
        assert random_states() == before

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
    def test_cuda(self):
        torch.rand((), device="cuda")
        before = torch.cuda.get_rng_state()
        with isolated(seed=1):
            torch.rand((), device="cuda")
        assert torch.equal(torch.cuda.get_rng_state(), before)


class TestModel:
    def test_mode_of_every_submodule(self, tiny_model):
        model = tiny_model("llama").train()
        model.model.layers[0].eval()  # a frozen tower
        before = {name: module.training for name, module in model.named_modules()}
        assert len(set(before.values())) == 2
        with isolated(model):
            assert not any(module.training for module in model.modules())
        assert {name: module.training for name, module in model.named_modules()} == before

    def test_restored_when_the_block_raises(self, tiny_model):
        model = tiny_model("llama").train()
        with pytest.raises(RuntimeError), isolated(model):
            raise RuntimeError
        assert all(module.training for module in model.modules())

    @pytest.mark.parametrize("lora", [False, True])
    def test_gradient_checkpointing(self, tiny_model, lora):
        model = tiny_model("llama").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        layers = [m for m in model.modules() if "gradient_checkpointing" in vars(m)]
        assert len(layers) > 1
        before = [m.gradient_checkpointing for m in layers]
        with isolated(model):
            assert not any(m.gradient_checkpointing for m in layers)
        assert [m.gradient_checkpointing for m in layers] == before
        assert any(before)

    def test_generation_config_is_the_same_object_with_the_same_fields(self, tiny_model):
        model = tiny_model("llama")
        config = model.generation_config
        before = config.to_dict()
        with isolated(model):
            config.update(max_new_tokens=5, do_sample=True)
            config.invented = 1
            model.generation_config = GenerationConfig(top_k=3)
        assert model.generation_config is config
        assert config.to_dict() == before


class TestTokenizer:
    def test_sides_and_what_the_backend_keeps(self, make_tokenizer):
        tokenizer = make_tokenizer("plain")
        before = tokenizer.backend_tokenizer.to_str(), tokenizer.padding_side, tokenizer.truncation_side
        with isolated(tokenizer=tokenizer):
            tokenizer.padding_side, tokenizer.truncation_side = "left", "left"
            tokenizer(["a", "a longer text"], padding=True, truncation=True, max_length=5)
            assert tokenizer.backend_tokenizer.to_str() != before[0]
        assert (tokenizer.backend_tokenizer.to_str(), tokenizer.padding_side, tokenizer.truncation_side) == before

    def test_a_tokenizer_that_pads_and_truncates_on_its_own_still_does(self, make_tokenizer):
        tokenizer = make_tokenizer("plain")
        tokenizer(["a", "a longer text"], padding="max_length", truncation=True, max_length=5)
        before = tokenizer.backend_tokenizer.to_str()
        with isolated(tokenizer=tokenizer):
            tokenizer(["a", "a longer text"])
        assert tokenizer.backend_tokenizer.to_str() == before


class Broken(Tracker):
    name = "broken"

    def log_scalars(self, scalars, step):
        raise OSError("down")

    def log_table(self, name, rows, step):
        raise OSError("down")

    def close(self):
        raise OSError("down")


def progress(trainer):
    return RichProgressCallback(Console(file=io.StringIO(), force_terminal=True), refresh_per_second=50)


def jsonl(trainer):
    return JsonlLogCallback()


def completions(trainer):
    return LogCompletionsCallback(trainer, freq=1, max_new_tokens=4, do_sample=True)


def completions_to_a_broken_tracker(trainer):
    return LogCompletionsCallback(trainer, freq=1, max_new_tokens=4, do_sample=True, trackers=[Broken()])


def draws_and_changes_everything(model, tokenizer, prompts, config):
    """A `generate` that behaves as badly as it can."""
    draws()
    torch.manual_seed(0)
    model.train()
    tokenizer.padding_side = "left"
    model.generation_config.max_length = 3
    return [[7] for _ in prompts]


def bad_generation(trainer):
    return LogCompletionsCallback(trainer, freq=1, generate=draws_and_changes_everything)


EVERYTHING = [progress, jsonl, completions, completions_to_a_broken_tracker, bad_generation]


def hash_of_run(tmp_path, makers, **options) -> str:
    trainer = tiny_trainer(tmp_path, **options)
    for make in makers:
        trainer.add_callback(make(trainer))
    trainer.train()
    return weights_hash(trainer.model)


class TestTheLaw:
    """Attention dropout, a collator that draws, two micro-batches a step: one stray draw gives other weights."""

    @pytest.fixture(scope="class")
    def undisturbed(self, tmp_path_factory) -> str:
        return hash_of_run(tmp_path_factory.mktemp("alone"), [])

    @pytest.mark.parametrize("make", EVERYTHING)
    def test_each_alone(self, tmp_path, undisturbed, make):
        assert hash_of_run(tmp_path, [make]) == undisturbed

    def test_all_together_with_lora_dropout_and_checkpointing(self, tmp_path_factory):
        checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        options = {"lora": True, **checkpointing}
        alone = hash_of_run(tmp_path_factory.mktemp("a"), [], **options)
        assert hash_of_run(tmp_path_factory.mktemp("b"), EVERYTHING, **options) == alone

    def test_it_is_the_isolation_that_does_it(self, tmp_path, undisturbed, monkeypatch):
        """The control: without `isolated` the weights do change, so the tests above can fail."""
        monkeypatch.setattr("preftune.callbacks.answers.isolated", lambda *args, **kwargs: nullcontext())
        assert hash_of_run(tmp_path, [bad_generation]) != undisturbed

    def test_a_broken_tracker_costs_one_warning(self, tmp_path, caplog):
        with caplog.at_level(logging.WARNING, logger="preftune"):
            hash_of_run(tmp_path, [completions_to_a_broken_tracker])
        warnings = [r.getMessage() for r in caplog.records if r.name.startswith("preftune")]
        assert len(warnings) == 1
        assert "'broken': OSError: down" in warnings[0]
