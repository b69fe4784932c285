"""The narrow waist: what `token_scores` and `branch_values` promise, under PEFT, wrappers, casts and re-entry.

Numbers are held against plain forwards of each prompt + branch alone.
"""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from preftune.data.tree import build_tree, select_prompts
from preftune.errors import ConfigError
from preftune.models.logprobs import branch_values, choose_layout, token_scores
from tests.unit.models.scoring_helpers import (
    double_copy,
    gradients,
    random_tree,
    rows_of,
    slow_logits,
    slow_logps,
    weights_for,
    worst,
)

LAYOUTS = ["tree", "padded"]
ALL = frozenset({"entropy", "mean_logits", "is_top1", "log_sum_sq_probs"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_temperature(tiny_model, layout):
    model = tiny_model("gemma2")
    tree = random_tree(model.config.vocab_size, masked=True)
    scores = token_scores(model, tree, layout=layout, temperature=0.6, outputs=ALL)
    with torch.no_grad():
        z = slow_logits(double_copy(model), tree) / 0.6
    p = z.softmax(-1)
    close = lambda a, b: torch.allclose(a.double(), b, atol=1e-4)  # noqa: E731
    assert close(scores.logps, p.log().gather(1, tree.target_ids[:, None]).squeeze(1))
    assert close(scores.entropy, -(p * p.log()).sum(-1))
    assert close(scores.mean_logits, z.mean(-1))
    assert close(scores.is_top1, (z.argmax(-1) == tree.target_ids).double())
    assert close(scores.log_sum_sq_probs, p.square().sum(-1).log())
    assert scores.logps.requires_grad
    assert scores.logps.dtype == torch.float32
    assert not any(getattr(scores, name).requires_grad for name in ALL)
    assert scores.branch_index is tree.branch_index
    assert scores.num_branches == tree.num_branches
    assert scores.aux_loss is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_not_asked_for_is_none(tiny_model, layout):
    model = tiny_model("llama")
    tree = random_tree(model.config.vocab_size)
    scores = token_scores(model, tree, layout=layout, outputs={"is_top1"})
    assert scores.is_top1 is not None
    assert scores.entropy is scores.mean_logits is scores.log_sum_sq_probs is None
    with torch.no_grad():
        assert not token_scores(model, tree, layout=layout).logps.requires_grad


def test_wrong_arguments(tiny_model):
    model = tiny_model("llama")
    tree = random_tree(model.config.vocab_size)
    with pytest.raises(ConfigError, match="perplexity"):
        token_scores(model, tree, layout="tree", outputs={"perplexity"})
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="above 0"):
            token_scores(model, tree, layout="tree", temperature=temperature)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_and_order(tiny_model, layout):
    """Scores of a selection of prompts are the same entries of the scores of all."""
    model = tiny_model("llama")
    tree = random_tree(model.config.vocab_size)
    with torch.no_grad():
        whole = token_scores(model, tree, layout=layout).branch_logps
        part = token_scores(model, select_prompts(tree, [2, 0]), layout=layout).branch_logps
    assert torch.allclose(part, whole[[3, 4, 5, 0, 1]], atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_scored_token(tiny_model, layout):
    """The loss of a micro-batch without scored tokens is zero, and every parameter still takes part in backward."""
    model = tiny_model("llama")
    tree = build_tree([[5, 6]], [[[7, 8], [9]]], [[[0, 0], [0]]])
    got = gradients(model, token_scores(model, tree, layout=layout).branch_logps.sum())
    assert set(got) == {n for n, _ in model.named_parameters()}
    assert all(g.abs().sum() == 0 for g in got.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixture_of_experts_loss(tiny_model, layout):
    model = tiny_model("qwen3_moe", output_router_logits=True)
    tree = random_tree(model.config.vocab_size)
    aux = token_scores(model, tree, layout=layout).aux_loss
    assert aux.shape == ()
    aux.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0


# --- PEFT -------------------------------------------------------------------------------------------------------------


def adapted(tiny_model, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(tiny_model("llama"), config)
        for name, p in model.named_parameters():
            if "lora_B" in name or "prompt_encoder" in name:
                p.data.normal_(std=0.3)
    return model.eval()


ADAPTERS = {
    "body": LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM"),
    "head": LoraConfig(target_modules=["q_proj", "lm_head"], r=2, task_type="CAUSAL_LM"),
    "saved head": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2, task_type="CAUSAL_LM"),
    "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefix": PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(tiny_model, name):
    model = adapted(tiny_model, ADAPTERS[name])
    tree = random_tree(model.config.vocab_size, [(4, (3, 5)), (2, (6, 1))])
    choice = choose_layout(model)
    virtual = name in ("prompt", "prefix")
    assert choice.layout == ("padded" if virtual else "tree"), choice.reason
    assert ("virtual tokens" in choice.reason) == virtual
    if virtual:
        with pytest.raises(ConfigError, match="virtual tokens"):
            choose_layout(model, "tree")
    weights = weights_for(tree)
    scores = token_scores(model, tree, layout=choice.layout)
    got = gradients(model, (scores.logps * weights).sum())
    twin = copy.deepcopy(model).double()
    wanted_logps = slow_logps_with_virtual(twin, tree, 3 if name == "prompt" else 0)
    wanted = gradients(twin, (wanted_logps * weights).sum())
    assert (scores.logps.double() - wanted_logps).abs().max() < 1e-4
    assert worst(got, wanted) < 1e-4
    plain = slow_logps(double_copy(model.get_base_model()), tree) if virtual else None
    if plain is not None:
        assert (plain - wanted_logps).abs().max() > 1e-2
    assert "forward" not in model.get_output_embeddings().__dict__


def slow_logps_with_virtual(model, tree, offset):
    """Each row alone; prompt tuning puts `offset` virtual positions before the logits of a row."""
    columns = tree.position_ids[tree.predict_index].tolist()
    rows = [model(input_ids=torch.tensor([row])).logits[0, offset:] for row in rows_of(tree)]
    logits = torch.stack([rows[b][c] for b, c in zip(tree.branch_index.tolist(), columns)])
    return torch.log_softmax(logits, -1).gather(1, tree.target_ids[:, None]).squeeze(1)


def test_disabled_adapter_is_the_base_model(tiny_model):
    model = adapted(tiny_model, ADAPTERS["head"])
    tree = random_tree(model.config.vocab_size)
    with torch.no_grad():
        on = token_scores(model, tree, layout="tree").logps
        with model.disable_adapter():
            off = token_scores(model, tree, layout="tree").logps
    base = slow_logps(double_copy(tiny_model("llama")), tree)
    assert (off - base).abs().max() < 1e-4
    assert (on - base).abs().max() > 1e-2


# --- wrappers and re-entry --------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """What DDP and a DeepSpeed engine look like from outside, casting outputs as accelerate's FSDP2 set-up does."""

    def __init__(self, module, dtype=None):
        super().__init__()
        self.module, self.dtype, self.calls = module, dtype, 0

    def forward(self, *args, **keywords):
        self.calls += 1
        output = self.module(*args, **keywords)
        for key, value in output.items():
            if self.dtype is not None and torch.is_tensor(value):
                output[key] = value.to(self.dtype)
        return output


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrapped_and_cast(tiny_model, layout, dtype):
    """The call goes through the wrapper, and a cast of its outputs to few bits loses nothing of the values."""
    model = tiny_model("llama")
    wrapper = Wrapper(model, dtype)
    tree = random_tree(model.config.vocab_size)
    assert choose_layout(wrapper).layout == "tree"
    calls = wrapper.calls
    scores = token_scores(wrapper, tree, layout=layout)
    assert wrapper.calls == calls + 1
    plain = token_scores(model, tree, layout=layout)
    assert torch.equal(scores.logps, plain.logps)
    got, wanted = gradients(model, scores.logps.sum()), gradients(model, plain.logps.sum())
    assert worst(got, wanted) < 1e-6
    value_model = tiny_model("llama", head="value")
    with torch.no_grad():
        assert torch.equal(
            branch_values(Wrapper(value_model, dtype), tree, layout=layout),
            branch_values(value_model, tree, layout=layout),
        )


@pytest.mark.parametrize("adapter", [False, True])
def test_nested_call_inside_the_head(tiny_model, adapter):
    """A hook on the head that scores another tree with the same model: both are right, nothing stays behind."""
    model = tiny_model("gemma2")
    if adapter:
        model = get_peft_model(model, ADAPTERS["head"]).eval()
    tree, other = random_tree(model.config.vocab_size), random_tree(model.config.vocab_size, seed=5)
    with torch.no_grad():
        wanted = [token_scores(model, t, layout="tree").logps for t in (tree, other)]
    inner = []

    def hook(*_):
        if not inner:
            inner.append(None)
            inner[0] = token_scores(model, other, layout="tree").logps

    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(hook)
    with torch.no_grad():
        outer = token_scores(model, tree, layout="tree").logps
    handle.remove()
    assert torch.equal(outer, wanted[0])
    assert torch.equal(inner[0], wanted[1])
    assert "forward" not in head.__dict__
    assert model.config.final_logit_softcapping == 3.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_inside_restores_everything(tiny_model, layout):
    model = tiny_model("gemma2")
    tree = random_tree(model.config.vocab_size)
    token_scores(model, tree, layout=layout)
    before = model.config._attn_implementation

    def fail(*_):
        raise ZeroDivisionError

    for module in (model.model.layers[1], model.lm_head):
        handle = module.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            token_scores(model, tree, layout=layout)
        handle.remove()
    assert "forward" not in model.lm_head.__dict__
    assert model.config.final_logit_softcapping == 3.0
    assert model.config._attn_implementation == before


def test_a_copy_made_in_the_middle_is_a_model_of_its_own(tiny_model):
    model = tiny_model("gemma2")
    tree = random_tree(model.config.vocab_size)
    with torch.no_grad():
        wanted = model(tree.input_ids[None]).logits
    copies = []
    handle = model.model.norm.register_forward_hook(lambda *_: copies.append(copy.deepcopy(model)))
    token_scores(model, tree, layout="tree")
    handle.remove()
    twin = copies[-1]
    assert twin.lm_head.forward.__self__ is twin.lm_head
    with torch.no_grad():
        assert torch.equal(twin(tree.input_ids[None]).logits, wanted)
        model.lm_head.weight.zero_()
        assert torch.equal(twin(tree.input_ids[None]).logits, wanted)


@pytest.mark.parametrize("bound", [False, True])
def test_bare_linear_head_with_another_forward_is_not_bypassed(tiny_model, bound):
    """A head whose forward someone replaced (accelerate's offloading does) is called, not read."""
    model = tiny_model("llama")
    tree = random_tree(model.config.vocab_size)
    plain = model.lm_head.forward
    model.lm_head.forward = MethodType(lambda _, x: plain(x) * 2, model.lm_head) if bound else lambda x: plain(x) * 2
    twin = double_copy(tiny_model("llama"))
    with torch.no_grad():
        wanted = slow_logps(twin, tree, temperature=0.5)
        assert (token_scores(model, tree, layout="tree").logps.double() - wanted).abs().max() < 1e-4
    del model.lm_head.forward
    assert isinstance(model, LlamaForCausalLM)


# --- scalar heads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, 2, None])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_the_classifier(tiny_model, layout, family, pad):
    """Row by row through the classifier itself, also where rows end in the padding token because it is the EOS."""
    model = tiny_model(family, head="value")
    model.config.pad_token_id = pad
    prompts, branches = [[5, 6, 7], [8]], [[[9, 10, 2], [11, 2, 2, 2]], [[2], [12, 13]]]
    tree = build_tree(prompts, branches)
    values = branch_values(model, tree, layout=layout)
    twin = double_copy(model)
    wanted = torch.cat([twin(input_ids=torch.tensor([row])).logits[:, 0] for row in rows_of(tree)])
    assert values.dtype == torch.float32
    assert (values.double() - wanted).abs().max() < 1e-4
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    assert worst(gradients(model, (values * weights).sum()), gradients(twin, (wanted * weights).sum())) < 1e-4
    assert model.config.pad_token_id == pad
    assert "forward" not in model.score.__dict__
    assert choose_layout(model).layout == "tree"


def test_values_want_a_scalar_head(tiny_model):
    tree = random_tree(100)
    with pytest.raises(ConfigError, match="no scalar head"):
        branch_values(tiny_model("llama"), tree, layout="tree")
    with pytest.raises(ConfigError, match="num_labels=1"):
        branch_values(tiny_model("llama", head="value", num_labels=2), tree, layout="tree")


def test_values_under_peft(tiny_model):
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["score"], r=2, task_type="SEQ_CLS")
    model = get_peft_model(tiny_model("llama", head="value"), config).eval()
    tree = random_tree(model.config.vocab_size)
    wanted = torch.cat([model(input_ids=torch.tensor([row])).logits[:, 0] for row in rows_of(tree) if row])
    values = branch_values(model, tree, layout="tree")
    assert torch.allclose(values, wanted, atol=1e-4)
    values.sum().backward()
    assert any(p.grad is not None and "score" in n for n, p in model.named_parameters())
