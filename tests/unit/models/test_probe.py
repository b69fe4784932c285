"""The probe: what it finds, that it is thorough, and that it leaves nothing behind.

Families are told apart by numbers alone; a made-up family shows that no name decides.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from preftune.errors import ConfigError
from preftune.models import logprobs, probe
from preftune.models.head import LogitTransform
from preftune.models.logprobs import choose_layout, token_scores
from preftune.models.probe import HeadPlan, head_plan
from tests.support.models import tiny_config
from tests.unit.models.scoring_helpers import double_copy, random_tree, slow_logps

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(model_type, **fields):
    config = AutoConfig.for_model(model_type, **{**SMALL, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("model_type", "fields", "scale", "softcap"),
    [
        ("llama", {}, 1.0, None),
        ("cohere", {"logit_scale": 0.25}, 0.25, None),
        ("granite", {"logits_scaling": 8.0, "attention_multiplier": 0.3}, 1 / 8, None),
        ("hyperclovax", {"logits_scaling": 2.0}, 2.0, None),
        ("nanochat", {"final_logit_softcapping": 2.0}, 1.0, 2.0),
    ],
)
def test_what_follows_the_head(monkeypatch, model_type, fields, scale, softcap):
    """Granite divides by the field that HyperCLOVA X multiplies with: only numbers tell."""
    model = build(model_type, **fields)
    plan = head_plan(model)
    assert (plan.transform.scale, plan.transform.softcap, plan.full_logits) == (pytest.approx(scale), softcap, False)
    tree = random_tree(61)
    with torch.no_grad():
        wanted = slow_logps(double_copy(model), tree)
        for layout in ("tree", "padded"):
            assert (token_scores(model, tree, layout=layout).logps.double() - wanted).abs().max() < 1e-4
        monkeypatch.setattr(logprobs, "head_plan", lambda _: HeadPlan(LogitTransform(), plan.neutralised))
        moved = (token_scores(model, tree, layout="tree").logps - wanted).abs().max()
    assert moved > 1e-2 or (scale, softcap) == (1.0, None)


def with_forward(model, change):
    """A subclass of the model's class whose forward changes the output; the layout machinery knows nothing of it."""
    base = type(model)

    class Odd(base):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, **keywords):
            output = super().forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **keywords
            )
            return change(self, output)

    model.__class__ = Odd
    return model


def test_unknown_transform_takes_full_logits():
    def change(model, output):
        output.logits = output.logits + 0.1 * output.logits.sin()
        return output

    model = with_forward(build("llama"), change)
    assert head_plan(model).full_logits
    choice = choose_layout(model)
    assert choice.layout == "tree"
    assert "full logits" in choice.reason
    tree = random_tree(61)
    for layout in ("tree", "padded"):
        scores = token_scores(model, tree, layout=layout, temperature=0.8, outputs={"entropy"})
        wanted = slow_logps(double_copy(model), tree, 0.8)
        assert (scores.logps.double() - wanted).abs().max() < 1e-4
    scores.logps.sum().backward()
    assert model.lm_head.weight.grad.abs().max() > 1e-3


def test_logits_from_elsewhere_take_full_logits():
    def change(model, output):
        output.logits = output.logits[..., :50]
        return output

    assert head_plan(with_forward(build("llama"), change)).full_logits


def test_a_leak_between_branches_is_found():
    """A forward that mixes each position with the one before it: what recurrence and convolution do."""
    model = build("llama")
    body = model.model

    def mix(module, args, states):
        return states + 0.01 * torch.cat([states[:, :1], states[:, :-1]], dim=1)

    body.layers[0].register_forward_hook(mix)
    choice = choose_layout(model)
    assert choice.layout == "padded"
    assert "changing one branch" in choice.reason


def test_other_positions_are_found():
    """A forward that drops position_ids: no branch sees another, but the second starts where the first ended."""
    model = build("llama")
    base = type(model)

    class Odd(base):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, **keywords):
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **keywords)

    model.__class__ = Odd
    choice = choose_layout(model)
    assert choice.layout == "padded"
    assert "differ from those of 'padded'" in choice.reason


def test_a_window_longer_than_the_probe_is_found():
    """The model masks to a window that it does not name to its attention function: no short run can show it."""
    model = build("mistral", sliding_window=4096)
    assert choose_layout(model).layout == "tree"
    hidden = build("mistral", sliding_window=4096)
    for layer in hidden.model.layers:
        attention = layer.self_attn
        attention.config = copy.deepcopy(attention.config)
        attention.config.sliding_window = None
    choice = choose_layout(hidden)
    assert choice.layout == "padded"
    assert "mask" in choice.reason


def test_chunked_attention_is_found():
    model = build("llama4_text", head_dim=8, attention_chunk_size=8192, num_local_experts=2, intermediate_size_mlp=48)
    choice = choose_layout(model)
    assert choice.layout == "padded"
    assert "chunked" in choice.reason


def test_alibi_falls_back():
    config = AutoConfig.for_model("bloom", vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    choice = choose_layout(model)
    assert choice.layout == "padded"
    assert "AttentionInterface" in choice.reason


def test_requests(tiny_model):
    model, hybrid = tiny_model("llama"), tiny_model("lfm2")
    assert choose_layout(model, "padded").layout == "padded"
    assert choose_layout(model, "tree").layout == "tree"
    with pytest.raises(ConfigError, match="changing one branch"):
        choose_layout(hybrid, "tree")
    with pytest.raises(ConfigError, match="'auto', 'tree' or 'padded'"):
        choose_layout(model, "packed")  # pyright: ignore


def test_probes_once_and_leaves_nothing(tiny_model, monkeypatch):
    model = tiny_model("gemma2").train()
    model.model.layers[0].eval()
    flags = [m.training for m in model.modules()]
    config = copy.deepcopy(model.config.to_dict())
    torch.manual_seed(3)
    random_state = torch.get_rng_state()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    model.register_forward_hook(lambda *_: torch.rand(3) is None or None)  # a model that draws random numbers
    first = choose_layout(model)
    assert calls
    assert not any(calls)
    probes = len(calls)
    assert choose_layout(model) == first
    head_plan(model)
    assert len(calls) == probes
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == tiny_model("gemma2").config._attn_implementation
    assert all(p.grad is None for p in model.parameters())


def test_cache_does_not_keep_models_alive():
    model = build("cohere", logit_scale=0.25)
    choose_layout(model)
    assert model in probe._layouts
    assert model in probe._plans
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_copy_is_probed_for_itself(tiny_model):
    model = tiny_model("gemma2")
    head_plan(model)
    twin = copy.deepcopy(model)
    twin.config.final_logit_softcapping = None
    assert head_plan(twin).transform.softcap is None
    assert head_plan(model).transform.softcap == 3.0


def test_low_precision_models(tiny_model):
    for family, layout in (("llama", "tree"), ("lfm2", "padded")):
        assert choose_layout(tiny_model(family, dtype=torch.bfloat16)).layout == layout


def test_config_of_test_models_is_sharp():
    """The families are compared with weights wide enough that features show."""
    assert tiny_config("llama").initializer_range >= 0.2
