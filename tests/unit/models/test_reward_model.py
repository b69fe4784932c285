"""Reward models: where values are read, how a head comes to be, and that an adapter does not lose it.

The oracle is transformers' own classifier on an ordinary padded batch.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PromptTuningConfig, get_peft_model

from preftune.data.reward import RewardCollator
from preftune.errors import ConfigError
from preftune.models.load import enable_router_loss, with_tokens
from preftune.models.logprobs import branch_values, choose_layout
from preftune.models.reward_model import (
    agree_on_padding,
    check_reward_model,
    load_reward_model,
    warn_of_frozen_head,
    with_score_head,
)
from tests.unit.models.scoring_helpers import double_copy, gradients, rows_of, worst

PAD, EOS = 0, 2
# Answers that share much, little and nothing; some end in EOS, which may be the padding token, one has it inside. All
# are of six tokens at least: eager attention gives NaN where a window of six sees padding alone.
PAIRS = [
    ([5, 6, 7, 8, 9, EOS], [5, 6, 7, 11, 10, 10, EOS]),
    ([12, 13, 15, 16, 17, 18, EOS, EOS], [12, 13, 15, 16, 17, EOS]),
    ([20, EOS, 21, 22, 23, 24], [30, 31, 32, 33, 34, 35, 36, 37, 38, EOS]),
]
FAMILIES = ["llama", "qwen2", "gemma2", "gpt2", "mistral", "qwen3_moe"]


def tree_of(pairs):
    return RewardCollator()([{"chosen_ids": c, "rejected_ids": r} for c, r in pairs])["tree"]


def batch_forward(model, rows, pad):
    """The classifier's own logits `[rows]` of a batch padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return model(input_ids=ids, attention_mask=mask).logits[:, 0]


@pytest.mark.parametrize("pad", [PAD, EOS])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_a_padded_batch(tiny_model, family, pad):
    """Tree, padded layout and the classifier itself: values and gradients, also with the EOS token as padding."""
    model = tiny_model(family, head="value")
    model.config.pad_token_id = pad
    assert choose_layout(model).layout == "tree"
    twin, tree = double_copy(model), tree_of(PAIRS)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 2.0], dtype=torch.float64)
    wanted = batch_forward(twin, rows_of(tree), pad)
    slow = gradients(twin, (wanted * weights).sum())
    for layout in ("tree", "padded"):
        values = branch_values(model, tree, layout=layout)
        assert (values.double() - wanted).abs().max() < 1e-4
        assert worst(gradients(model, (values * weights).sum()), slow) < 1e-4


def test_where_the_value_is_read_matters(tiny_model):
    """The choice of the padding token moves these values: the tests above can fail."""
    model, tree = tiny_model("llama", head="value"), tree_of(PAIRS)
    with torch.no_grad():
        at_eos = branch_values(model, tree, layout="tree")
        model.config.pad_token_id = EOS
        before_eos = branch_values(model, tree, layout="tree")
    assert ((at_eos - before_eos).abs() > 1e-2).tolist() == [True, True, True, True, False, True]


def test_layers_that_leak_fall_back_to_padding(tiny_model):
    """The probe works on classifiers too: a layer that mixes neighbours would let one answer see the other."""

    def mix(module, args, states):
        return states + 0.01 * torch.cat([states[:, :1], states[:, :-1]], dim=1)

    model, tree = tiny_model("llama", head="value"), tree_of(PAIRS)
    model.model.layers[0].register_forward_hook(mix)
    assert choose_layout(model).layout == "padded"
    with torch.no_grad():
        wanted = batch_forward(model, rows_of(tree), PAD)
        assert torch.allclose(branch_values(model, tree, layout="padded"), wanted, atol=1e-5)
        assert not torch.allclose(branch_values(model, tree, layout="tree"), wanted, atol=1e-3)


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def causal(tmp_path, tiny_model):
    tiny_model("llama").save_pretrained(tmp_path / "causal")
    return str(tmp_path / "causal")


def test_a_causal_checkpoint_gets_one_output(causal, caplog):
    """R134; one line says that the head is new, the global random state stays, the seed decides."""
    state = torch.random.get_rng_state()
    model: Any = load_reward_model(causal, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.num_labels == 1 and model.score.weight.shape == (1, 32)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"the score head of {causal} is new and random: the checkpoint is not that of a reward model"
    ]
    again: Any = load_reward_model(causal, seed=3)
    other: Any = load_reward_model(causal, seed=4)
    assert torch.equal(model.score.weight, again.score.weight)
    assert not torch.equal(model.score.weight, other.score.weight)
    assert torch.equal(model.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_a_reward_model_is_loaded_in_silence(tmp_path, tiny_model, caplog):
    model = tiny_model("llama", head="value")
    model.save_pretrained(tmp_path)
    loaded: Any = load_reward_model(str(tmp_path))
    assert torch.equal(loaded.score.weight, model.score.weight)
    assert not caplog.records


def test_weights_that_are_really_missing_are_shown(tmp_path, tiny_model, caplog):
    model = tiny_model("llama", head="value")
    weights = {n: w for n, w in model.state_dict().items() if "layers.1.mlp" not in n}
    model.save_pretrained(tmp_path, state_dict=weights)
    load_reward_model(str(tmp_path))
    assert any("layers" in r.getMessage() and "MISSING" in r.getMessage() for r in caplog.records)


def test_what_is_no_reward_model_is_refused(tmp_path, tiny_model, causal):
    two = tiny_model("llama", head="value", num_labels=2)
    two.save_pretrained(tmp_path / "two")
    for model in (two, str(tmp_path / "two")):
        with pytest.raises(ConfigError, match="reward models require `num_labels=1`"):
            load_reward_model(model)
    with pytest.raises(ConfigError, match="num_labels=2"):
        load_reward_model(causal, init_kwargs={"num_labels": 2})
    with pytest.raises(ConfigError, match="LlamaForCausalLM, which has no `score` head"):
        load_reward_model(tiny_model("llama"))
    with pytest.raises(ConfigError, match="already a"):
        load_reward_model(tiny_model("llama", head="value"), init_kwargs={"dtype": "bfloat16"})


def test_experts_of_a_classifier_are_not_balanced(tiny_model):
    """Its output holds no router logits, so there is nothing to add and nothing to switch on."""
    model = tiny_model("qwen3_moe", head="value")
    assert enable_router_loss(model, None) == 0.0 and not model.config.output_router_logits


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_padding_token_of_tokenizer_and_model(tiny_model, make_tokenizer):
    model, plain, none = tiny_model("llama", head="value"), make_tokenizer("plain"), make_tokenizer("no_pad")
    assert with_tokens(plain) is plain
    padded = with_tokens(none)
    assert padded is not none and none.pad_token is None and padded.pad_token == "<eos>"
    agree_on_padding(model, padded)
    assert model.config.pad_token_id == EOS
    changed = with_tokens(plain, pad_token="<unk>", eos_token="<|im_end|>", chat_template="x")
    assert (changed.pad_token, changed.eos_token, changed.chat_template) == ("<unk>", "<|im_end|>", "x")
    assert (plain.pad_token, plain.eos_token) == ("<pad>", "<eos>") and plain.chat_template != "x"
    with pytest.raises(ConfigError, match=r"pad_token='<nope>' is not in the tokenizer's vocabulary.*'<pad>'"):
        with_tokens(plain, pad_token="<nope>")
    bare = make_tokenizer("no_eos")
    bare.pad_token = None
    with pytest.raises(ConfigError, match="no padding and no EOS token"):
        with_tokens(bare)
    plain.add_tokens(["<new>"])
    with pytest.raises(ConfigError, match="id 320, and the model knows ids below 320"):
        agree_on_padding(model, with_tokens(plain, pad_token="<new>"))


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {"task_type": "SEQ_CLS", "target_modules": ["q_proj"]},
        {"task_type": "CAUSAL_LM", "target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "modules_to_save": ["score", "norm"]},
    ],
    ids=["seq_cls", "causal", "own_list"],
)
def test_an_adapter_keeps_its_head(tmp_path, causal, how):
    """R132: the head is trained, saved once, and there again on a fresh base; the config given is as it was."""
    given = LoraConfig(r=2, **how)
    before = given.to_dict()
    model = get_peft_model(load_reward_model(causal, seed=1), with_score_head(given))
    assert given.to_dict() == before
    assert sum(p.requires_grad for p in model.score.parameters()) == 1
    warn_of_frozen_head(model)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
    tree = tree_of(PAIRS)
    fresh = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=1)
    with torch.no_grad():
        assert torch.equal(branch_values(fresh, tree, layout="tree"), branch_values(model.eval(), tree, layout="tree"))


def test_said_aloud(tiny_model, caplog):
    with_score_head(LoraConfig(task_type="CAUSAL_LM"))
    assert "SEQ_CLS" in caplog.text
    caplog.clear()
    with_score_head(LoraConfig(task_type="SEQ_CLS"))
    with_score_head(LoraConfig(modules_to_save=["score"]))
    assert with_score_head(None) is None and with_score_head("lora") == "lora" and not caplog.records
    warn_of_frozen_head(get_peft_model(tiny_model("llama", head="value"), LoraConfig(target_modules=["q_proj"])))
    assert "score head is not trained" in caplog.text


def test_prompt_tuning_trains_the_head(tiny_model):
    config = with_score_head(PromptTuningConfig(num_virtual_tokens=3, task_type="SEQ_CLS"))
    model = get_peft_model(tiny_model("llama", head="value"), config).eval()
    assert any(p.requires_grad for p in model.score.parameters())
    assert choose_layout(model).layout == "padded"
    check_reward_model(model)
    tree = tree_of(PAIRS)
    rows = rows_of(tree)
    with torch.no_grad():
        values = branch_values(model, tree, layout="padded")
        wanted = torch.cat([model(input_ids=torch.tensor([row])).logits[:, 0] for row in rows])
    assert torch.allclose(values, wanted, atol=1e-5)
