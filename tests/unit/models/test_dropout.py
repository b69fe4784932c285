"""Dropout is off in modules and in forwards that read a probability; an adapter's own stays as the user set it."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptEncoderConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from preftune.models.dropout import disable_dropout
from tests.support.models import tiny_model

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS = {
    # reads the probability from its config in each forward
    "falcon": SMALL | {"attention_dropout": 0.5, "hidden_dropout": 0.5, "alibi": False},
    # F.dropout with an attribute, and whole layers dropped
    "opt": SMALL
    | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5},
    "gpt_neox": SMALL | {"intermediate_size": 64, "attention_dropout": 0.5, "hidden_dropout": 0.5},
}  # fmt: skip


def dropping(family: str, attention: str | None = None):
    if family == "gpt2":
        return tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5, attn_implementation=attention)
    if family in OTHERS:
        config = AutoConfig.for_model(family, **OTHERS[family])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return tiny_model(family, attention_dropout=0.5, attn_implementation=attention)


@torch.no_grad()
def logits(model: torch.nn.Module, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return model(torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "qwen3_moe", *OTHERS])
def test_training_mode_then_computes_what_eval_mode_does(family, attention):
    """W9: `attention_dropout` is no module; two seeds differ before, and agree with eval mode after."""
    model = dropping(family, attention).train()
    assert not torch.equal(logits(model, 0), logits(model, 1))
    config = copy.deepcopy(model.config.to_dict())
    disable_dropout(model)
    assert model.training
    trained = [logits(model, seed) for seed in (0, 1)]
    assert torch.equal(*trained)
    torch.testing.assert_close(trained[0], logits(model.eval(), 0), rtol=0, atol=1e-5)
    assert model.config.to_dict() == config  # what is saved


def test_the_dropout_of_an_adapter_stays():
    config = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(dropping("llama"), config).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    disable_dropout(model)
    drops = {name: m.p for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert drops
    assert set(drops.values()) == {0.5}
    assert all("lora_dropout" in name for name in drops)
    assert not torch.equal(logits(model, 0), logits(model, 1))
    with model.disable_adapter():
        assert torch.equal(logits(model, 0), logits(model, 1))


def test_the_dropout_of_a_prompt_encoder_stays():
    config = PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=8, encoder_num_layers=2,
        encoder_reparameterization_type="LSTM", encoder_dropout=0.5,
    )  # fmt: skip
    model = get_peft_model(dropping("llama"), config).train()
    assert isinstance(model, PeftModel)
    disable_dropout(model)
    assert model.prompt_encoder["default"].lstm_head.dropout == 0.5
    assert model.base_model.model.layers[0].self_attn.attention_dropout == 0.0
