"""The bfloat16 copy: it is the policy rounded, adapters merged, taken anew at each call; the policy is only read.

The oracle rounds the parameters of a deep copy, after peft's `merge_and_unload` where there is an adapter.
"""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from preftune.errors import ConfigError
from preftune.rollouts.local import LocalBackend
from preftune.rollouts.snapshot import Snapshot
from tests.unit.rollouts.helpers import generated, keys, make_prompts, sampling

PROMPTS = make_prompts()
KEYS = keys(len(PROMPTS))
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def rounded(model: nn.Module) -> nn.Module:
    """Parameters alone: `.to(bfloat16)` would also round the frequencies of rotary positions."""
    model = copy.deepcopy(model).eval()
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16)
    return model


def adapted(tiny_model, **options) -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(tiny_model("llama"), LoraConfig(**{**LORA, **options}))


def greedy(backend) -> list[list[int]]:
    return [list(x) for x in backend.generate(PROMPTS, 1, sampling(temperature=0.0), stream=KEYS).completion_ids]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_decodes_as_the_rounded_model(tiny_model, family):
    model = tiny_model(family).train()
    before = weights(model)
    backend = LocalBackend(model, precision="bfloat16")
    first = greedy(backend)
    assert first == generated(rounded(model), PROMPTS, 12)
    assert all(p.dtype == torch.float32 and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.training


def test_tied_weights_stay_tied_and_are_copied_once(tiny_model):
    with Snapshot(tiny_model("gemma2"), torch.bfloat16).filled() as model:
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.dtype == torch.bfloat16


def test_follows_every_kind_of_write(tiny_model):
    model = tiny_model("llama")
    backend = LocalBackend(model, precision="bfloat16")
    first = greedy(backend)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1)  # leaves no trace in the version counter
    second = greedy(backend)
    assert second != first
    assert all(map(torch.equal, backend._snapshot.model.parameters(), rounded(model).parameters()))
    backend.close()
    assert greedy(backend) == second


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3, 9]}],
    ids=["lora", "dora", "modules_to_save", "tokens"],
)
def test_adapters_are_merged_into_the_copy_alone(tiny_model, options):
    model = adapted(tiny_model, **options).train()
    if options.get("modules_to_save"):
        model.lm_head.modules_to_save["default"].weight.data.mul_(-1)
    for name, p in model.named_parameters():
        if "trainable_tokens_delta" in name:
            p.data.mul_(-1)
    before = weights(model)
    merged = copy.deepcopy(model).merge_and_unload()
    wanted = {name: p.to(torch.bfloat16) for name, p in merged.named_parameters()}
    with Snapshot(model, torch.bfloat16).filled() as copied:
        got = dict(copied.named_parameters())
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], p) for name, p in wanted.items())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert greedy(LocalBackend(model, precision="bfloat16")) == generated(rounded(merged), PROMPTS, 12)


def test_a_disabled_adapter_is_left_out(tiny_model):
    model = adapted(tiny_model)
    backend = LocalBackend(model, precision="bfloat16")
    with_adapter = greedy(backend)
    with model.disable_adapter():
        assert greedy(backend) == generated(rounded(tiny_model("llama")), PROMPTS, 12)
    assert greedy(backend) == with_adapter


def test_a_model_in_bfloat16_needs_no_copy(tiny_model):
    backend = LocalBackend(tiny_model("llama", dtype=torch.bfloat16), precision="bfloat16")
    greedy(backend)
    assert backend._snapshot is None


def test_what_cannot_be_copied(tiny_model):
    prompt_learning = get_peft_model(
        tiny_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ConfigError, match="virtual tokens"):
        Snapshot(prompt_learning)
    quantised = tiny_model("llama")
    quantised.lm_head.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"quantised.*lm_head\.weight"):
        Snapshot(quantised)
    torch.manual_seed(0)
    tied = get_peft_model(tiny_model("gemma2"), LoraConfig(target_modules=["embed_tokens"]))
    with pytest.raises(ConfigError, match="tied"):
        Snapshot(tied)


def test_an_autocast_forward_is_not_copied(tiny_model):
    model = tiny_model("llama")
    model._original_forward = model.forward
    model.forward = torch.autocast("cpu", torch.float16)(model.forward)
    assert "forward" not in vars(Snapshot(model).model)
