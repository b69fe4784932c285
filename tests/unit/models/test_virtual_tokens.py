"""Virtual tokens are put before a row and never scored: log-probabilities against forwards made by hand.

By hand: embeddings are concatenated, or keys and values laid into a cache, and the base model is run row by row.
"""

from __future__ import annotations

import pytest
import torch
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import DynamicCache

from preftune.data.tree import build_tree
from preftune.models.logprobs import choose_layout, token_scores
from preftune.models.reference import DisabledAdapter
from tests.support.models import tiny_model

PROMPTS = [[5, 6, 7, 8], [9, 10]]
BRANCHES = [[[11, 12, 13], [14]], [[16, 17], [18, 19, 20, 21]]]
TREE = build_tree(PROMPTS, BRANCHES)
VIRTUAL = 3
CONFIGS = {
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL),
    "p_tuning mlp": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, encoder_hidden_size=8),
    "p_tuning lstm": PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, encoder_hidden_size=8,
        encoder_reparameterization_type="LSTM", encoder_num_layers=1, encoder_dropout=0.0,
    ),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL),
    "prefix projected": PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, prefix_projection=True, encoder_hidden_size=8
    ),
}  # fmt: skip


def policy_of(kind: str, family: str = "llama"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return get_peft_model(tiny_model(family), CONFIGS[kind]).eval()


@torch.no_grad()
def by_hand(policy, kind: str, family: str) -> list[float]:
    """The summed log-probability of each branch from plain forwards of the base model in float32."""
    base, encoder = tiny_model(family), policy.prompt_encoder["default"]
    virtual = encoder(torch.arange(VIRTUAL)[None])
    sums = []
    for prompt, branches in zip(PROMPTS, BRANCHES, strict=True):
        for branch in branches:
            ids = torch.tensor([prompt + branch])
            if kind.startswith("prefix"):
                logits = base(input_ids=ids, past_key_values=cache_of(virtual, base)).logits[0]
            else:
                embedded = torch.cat([virtual, base.get_input_embeddings()(ids)], dim=1)
                logits = base(inputs_embeds=embedded).logits[0, VIRTUAL:]
            logps = logits.log_softmax(-1)
            sums.append(sum(logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(branch)))
    return sums


def cache_of(virtual: torch.Tensor, base) -> DynamicCache:
    """The values of a prefix, `[1, VIRTUAL, layers * 2 * heads * width]`, as keys and values of each layer."""
    config = base.config
    heads = config.num_key_value_heads
    parts = virtual.view(1, VIRTUAL, config.num_hidden_layers, 2, heads, -1)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        key, value = (parts[:, :, layer, i].transpose(1, 2) for i in (0, 1))
        cache.update(key, value, layer)
    return cache


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_log_probabilities_are_those_of_a_forward_made_by_hand(kind, family):
    policy = policy_of(kind, family)
    assert choose_layout(policy).layout == "padded"
    scores = token_scores(policy, TREE, layout="padded")
    expected = by_hand(policy, kind, family)
    assert scores.branch_logps.tolist() == pytest.approx(expected, abs=1e-4)
    base = token_scores(tiny_model(family), TREE, layout="padded").branch_logps
    assert (scores.branch_logps - base).abs().min() > 1e-2  # the tokens do something
    assert scores.logps.shape == TREE.target_index.shape


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_reach_what_makes_the_tokens_and_nothing_else(kind):
    policy = policy_of(kind)
    token_scores(policy, TREE, layout="padded").logps.sum().backward()
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)) == ("prompt_encoder" in name), name


def test_switching_them_off_leaves_the_forward_in_place():
    """PEFT's own switch leaves an attribute behind that a copy of the model would carry along."""
    policy = policy_of("prompt")
    reference = DisabledAdapter().branch_logps(policy, TREE, layout="padded")
    base = token_scores(tiny_model(), TREE, layout="padded").branch_logps
    torch.testing.assert_close(reference, base, rtol=0, atol=1e-5)
    assert "forward" not in vars(policy)
