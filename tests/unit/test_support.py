"""The fixtures do what other tests rely on: deterministic, sharp, and cut off from the network.

A tiny model proves something only where leaving out a window, a cap or a sink is visible.
"""

from __future__ import annotations

import socket

import pytest
import torch

from tests.support import network
from tests.support.models import FAMILIES
from tests.support.tokenizers import VARIANTS, VOCAB_SIZE


@pytest.fixture(scope="module")
def ids():
    return torch.randint(6, VOCAB_SIZE, (1, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logps(model, ids):
    return model(ids).logits.log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_depend_on_the_seed_alone(tiny_model, ids, family):
    before = torch.random.get_rng_state()
    a = logps(tiny_model(family), ids)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(a, logps(tiny_model(family), ids))
    assert not torch.allclose(a, logps(tiny_model(family, seed=1), ids), atol=0.1)


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"layer_types": ["full_attention", "full_attention"]}),
        ("gemma3", {"layer_types": ["full_attention", "full_attention"]}),
        ("gpt_oss", {"layer_types": ["full_attention", "full_attention"]}),
    ],
)
def test_models_are_sharp(tiny_model, ids, family, without):
    whole = tiny_model(family, attn_implementation="eager")
    part = tiny_model(family, attn_implementation="eager", **without)
    part.load_state_dict(whole.state_dict())
    assert (logps(whole, ids) - logps(part, ids)).abs().max() > 1e-2


def test_sinks_are_sharp(tiny_model, ids):
    model = tiny_model("gpt_oss")
    before = logps(model, ids)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    assert (logps(model, ids) - before).abs().max() > 1e-2


def test_models_take_overrides_and_heads(tiny_model, ids):
    assert tiny_model("gpt2", num_hidden_layers=1).config.num_hidden_layers == 1
    assert tiny_model("qwen2", head="value")(ids).logits.shape == (1, 1)
    assert tiny_model(dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="wanted one of"):
        tiny_model("lama")


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokenizers_keep_every_string(make_tokenizer, variant):
    tokenizer = make_tokenizer(variant)
    text = "héllo <eos> 日本 x  y.\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert len(tokenizer) == VOCAB_SIZE


def test_tokenizer_variants(make_tokenizer, tokenizer):
    assert make_tokenizer("bos")("a")["input_ids"][0] == tokenizer.bos_token_id
    assert make_tokenizer("pad_is_eos").pad_token_id == tokenizer.eos_token_id
    assert make_tokenizer("no_pad").pad_token_id is None
    assert make_tokenizer("no_eos").eos_token_id is None
    assert make_tokenizer("no_template").chat_template is None
    assert "generation %" not in make_tokenizer("no_markers").chat_template
    fresh = make_tokenizer()
    fresh.pad_token = "<eos>"
    assert make_tokenizer().pad_token == "<pad>"


def test_assistant_tokens_are_marked(tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "yo<|im_end|>"


def test_rows_have_the_same_answers_in_every_form(preference_rows, sft_rows):
    assert {len(rows) for rows in preference_rows.values()} == {8}
    assert {len(rows) for rows in sft_rows.values()} == {8}
    text, messages = preference_rows["text"][0], preference_rows["messages"][0]
    assert messages["chosen"][0]["content"] == text["chosen"].strip()


@pytest.mark.parametrize("address", [("192.0.2.1", 443), ("name.invalid", 443), ("2001:db8::1", 80, 0, 0)])
def test_network_is_denied(address):
    family = socket.AF_INET6 if len(address) == 4 else socket.AF_INET
    with socket.socket(family) as s, pytest.raises(network.NetworkDeniedError):
        s.connect(address)
    with pytest.raises(network.NetworkDeniedError):
        socket.getaddrinfo(*address[:2])
    assert len(network.attempts) == 2
    network.attempts.clear()  # else the guard fails this very test


def test_loopback_is_allowed():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert client.getpeername() == server.getsockname()
