"""ContinuousBackend on a tiny model: greedy equals LocalBackend, nothing is disturbed, failures are errors.

The cache is kept small; by default transformers sizes it by free memory.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import ContinuousBatchingConfig

from preftune.errors import ConfigError, RolloutError
from preftune.rollouts.continuous import ContinuousBackend
from preftune.rollouts.local import LocalBackend
from tests.unit.rollouts.helpers import keys, make_prompts, sampling

PROMPTS = make_prompts((2, 6, 9))
KEYS = keys(3)
SMALL = {"num_blocks": 32, "max_batch_tokens": 64, "page_size": 32}


def as_lists(rollouts) -> list[list[int]]:
    return [list(ids) for ids in rollouts.completion_ids]


def test_greedy_equals_the_local_backend(tiny_model):
    model = tiny_model("llama")
    eos = tuple(range(2, 320, 9))
    wanted = sampling(8, temperature=0.0, eos_token_ids=eos)
    local = LocalBackend(model).generate(PROMPTS, 1, wanted, stream=KEYS)
    got = ContinuousBackend(model, options=SMALL).generate(PROMPTS, 1, wanted, stream=KEYS)
    assert as_lists(got) == as_lists(local)
    assert got.finish_reasons == local.finish_reasons
    assert got.logps is None


def test_samples_are_seeded_and_nothing_is_disturbed(tiny_model):
    model = tiny_model("llama").train()
    backend = ContinuousBackend(model, options=SMALL)
    state = torch.get_rng_state()
    first = as_lists(backend.generate(PROMPTS, 3, sampling(5), stream=KEYS))
    assert len(first) == 9 and len(set(map(tuple, first))) == 9
    assert as_lists(backend.generate(PROMPTS, 3, sampling(5), stream=KEYS)) == first
    assert as_lists(backend.generate(PROMPTS, 3, sampling(5), stream=keys(3, 1))) != first
    as_object = ContinuousBackend(model, options=ContinuousBatchingConfig(**SMALL))
    assert as_lists(as_object.generate(PROMPTS, 3, sampling(5), stream=KEYS)) == first
    assert backend._options.items() <= as_object._options.items()  # what it leaves open stays our choice
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and all(m.training for m in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_adapters(tiny_model):
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    wanted = sampling(6, temperature=0.0)
    local = LocalBackend(model).generate(PROMPTS, 1, wanted, stream=KEYS)
    assert as_lists(ContinuousBackend(model, options=SMALL).generate(PROMPTS, 1, wanted, stream=KEYS)) == as_lists(
        local
    )


def test_errors(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="page_sizes"):
        ContinuousBackend(model, options={"page_sizes": 3})
    with pytest.raises(ConfigError, match="virtual tokens"):
        ContinuousBackend(get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))
    with pytest.raises(RolloutError, match="does not run under"):
        ContinuousBackend(tiny_model("mamba"), options=SMALL).generate(PROMPTS, 1, sampling(3), stream=KEYS)
    short = tiny_model("gpt2", max_position_embeddings=20)
    with pytest.raises(RolloutError, match="20 positions"):
        ContinuousBackend(short, options=SMALL).generate(PROMPTS, 1, sampling(12), stream=KEYS)
