"""`cast_lm_head_to_fp32` of GRPO from the config to every log-probability of a run, the sampler's included."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from preftune.configs.grpo import GRPOConfig
from preftune.errors import ConfigError
from preftune.models import float32_head, head, logprobs
from preftune.trainers.grpo import GRPOTrainer
from tests.support.runs import digest, logged, options

PROMPTS = ["the cat", "a longer prompt here", "dog", "one more of them"]


def letters(completions, **_):
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


def build(tmp_path, model, tokenizer, *, cast=True, peft_config=None, **changes):
    defaults = {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 8}
    return GRPOTrainer(
        model=model,
        reward_funcs=letters,
        args=GRPOConfig(**options(tmp_path, cast_lm_head_to_fp32=cast, **defaults | changes)),
        train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


@pytest.fixture
def products(monkeypatch):
    """Who computed a product with the head, with which setting: policy ("grad"), without gradient ("none"), sampler."""
    seen = []
    real_linear, real_generic, real_own = logprobs.linear_scores, logprobs.generic_scores, float32_head.float32_linear

    def linear(hidden, weight, bias, targets, options):
        seen.append(("grad" if torch.is_grad_enabled() else "none", options.float32_head))
        return real_linear(hidden, weight, bias, targets, options)

    def generic(logits_of, hidden, targets, vocabulary, options):
        seen.append(("entropy", options.float32_head and logits_of(hidden[:1]).dtype == torch.float32))
        return real_generic(logits_of, hidden, targets, vocabulary, options)

    def own(hidden, weight, bias):
        if hidden.ndim == 3:
            seen.append(("sampler", weight.dtype == torch.float32))
        return real_own(hidden, weight, bias)

    monkeypatch.setattr(logprobs, "linear_scores", linear)
    monkeypatch.setattr(logprobs, "generic_scores", generic)
    monkeypatch.setattr(float32_head, "float32_linear", own)
    assert head.float32_linear is real_own
    return seen


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_every_log_probability_of_a_run(tmp_path, tiny_model, tokenizer, products, lora):
    """Old ones and the reference's (no gradient), the policy's, and what is drawn in evaluation and training."""
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None
    trainer = build(
        tmp_path,
        tiny_model(dtype=torch.bfloat16),
        tokenizer,
        peft_config=adapter,
        beta=0.1,
        num_iterations=2,
        max_steps=2,
    )
    products.clear()  # of the check that a fresh adapter starts as the base
    trainer.train()
    assert trainer.reference.form == ("disabled_adapter" if lora else "frozen_copy")
    assert {kind for kind, _ in products} == {"grad", "none", "sampler"}
    assert all(in_float32 for _, in_float32 in products)
    assert all(map(math.isfinite, logged(trainer, "loss")))
    assert "forward" not in vars(trainer.model.get_output_embeddings())


def test_the_entropy_bonus_too(tmp_path, tiny_model, tokenizer, products):
    trainer = build(tmp_path, tiny_model(dtype=torch.bfloat16), tokenizer, entropy_coef=0.1, max_steps=1)
    trainer.train()
    assert "entropy" in {kind for kind, _ in products}
    assert all(in_float32 for _, in_float32 in products)


def test_nothing_is_cast_unasked(tmp_path, tiny_model, tokenizer, products):
    build(tmp_path, tiny_model(dtype=torch.bfloat16), tokenizer, cast=False, max_steps=1).train()
    assert {kind for kind, _ in products} == {"grad"}
    assert not any(in_float32 for _, in_float32 in products)


def test_in_float32_it_changes_nothing(tmp_path, tiny_model, tokenizer):
    """Bit for bit, without autocast: the product was float32 before."""
    ends = []
    for cast in (True, False):
        trainer = build(tmp_path / str(cast), tiny_model(), tokenizer, cast=cast, beta=0.1, max_steps=2)
        trainer.train()
        ends.append(digest(trainer))
    assert ends[0] == ends[1]


def test_a_head_that_cannot_be_cast_is_refused_at_construction(tmp_path, tiny_model, tokenizer):
    adapter = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ConfigError, match="cast_lm_head_to_fp32=True.*lora.*target_modules"):
        build(tmp_path, tiny_model(), tokenizer, peft_config=adapter)
