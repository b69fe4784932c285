"""Distributions on the narrow waist, against plain logits of prompt + branch alone; none is kept for all tokens.

Chunks are made small here, so that a mistake at a border would show.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from preftune.losses.distillation import alpha_divergence
from preftune.models import distributions, head
from preftune.models.distributions import compared_scores, logps_at, recalled, top_scores
from preftune.models.head import HeadSizes
from tests.unit.models.scoring_helpers import (
    double_copy,
    gradients,
    random_tree,
    slow_logits,
    weights_for,
    worst,
)

LAYOUTS = ["tree", "padded"]
T = 0.7


@pytest.fixture
def small_chunks(monkeypatch):
    """64 tokens of logits each, the least; trees below have more."""
    monkeypatch.setitem(head._SIZES, "cpu", HeadSizes(chunk_bytes=1))


def long_tree(model):
    return random_tree(model.config.vocab_size, lengths=[(9, (37, 25)), (0, (16,)), (3, (1, 58, 4))], masked=True)


def slow_logps(model, tree):
    return (slow_logits(model, tree) / T).log_softmax(-1)


def close(a, b):
    return torch.allclose(a.double(), b.double(), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_top_tokens_and_those_asked_for(tiny_model, small_chunks, family, layout):
    model = tiny_model(family)
    tree = long_tree(model)
    top = top_scores(model, tree, 5, layout=layout, temperature=T)
    slow = slow_logps(double_copy(model), tree)
    expected = slow.topk(5, dim=-1)
    assert torch.equal(top.ids_Tk, expected.indices)
    assert close(top.logps_Tk, expected.values)
    assert close(top.scores.logps, slow.gather(1, tree.target_ids[:, None])[:, 0])
    assert close(top.scores.entropy, -(slow.exp() * slow).sum(-1))
    assert top.logps_Tk.requires_grad and not top.scores.entropy.requires_grad
    with torch.no_grad():
        assert close(logps_at(model, tree, top.ids_Tk, layout=layout, temperature=T), expected.values)
    assert top_scores(model, tree, 10_000, layout=layout).ids_Tk.shape[1] == model.config.vocab_size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_top_tokens(tiny_model, small_chunks, layout):
    model, tree = tiny_model(), long_tree(tiny_model())
    weights = weights_for(tree)
    top = top_scores(model, tree, 3, layout=layout, temperature=T)
    got = gradients(model, ((top.logps_Tk.exp().sum(-1) + top.scores.logps).double() * weights).sum())
    twin = double_copy(model)
    slow = slow_logps(twin, tree)
    value = slow.topk(3, dim=-1).values.exp().sum(-1) + slow.gather(1, tree.target_ids[:, None])[:, 0]
    assert worst(got, gradients(twin, (value * weights).sum())) < 1e-4


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora on the head"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_comparison_with_what_another_model_said(tiny_model, small_chunks, layout, lora):
    """Values and gradients of D_alpha between two models, over all of the vocabulary."""
    model, other = tiny_model(), tiny_model(seed=1)
    if lora:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    tree = long_tree(other)
    recall = recalled(other, tree, layout=layout, temperature=T)
    numbers = torch.arange(len(tree.target_index))

    def compare(logps, at):
        return alpha_divergence(logps, recall.logps(numbers[at]), alpha=0.3)

    scores, values = compared_scores(model, tree, compare, layout=layout, temperature=T)
    twin = double_copy(model)
    slow = slow_logps(twin, tree)
    expected = alpha_divergence(slow, slow_logps(double_copy(other), tree).detach(), alpha=0.3)
    assert close(values, expected)
    assert close(scores.logps, slow.gather(1, tree.target_ids[:, None])[:, 0])
    weights = weights_for(tree)
    assert (
        worst(gradients(model, (values.double() * weights).sum()), gradients(twin, (expected * weights).sum())) < 1e-3
    )
    assert all(p.grad is None for p in other.parameters())


class Largest(TorchDispatchMode):
    """The most tokens of any tensor that has the vocabulary as its last axis."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.tokens = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.vocabulary:
                self.tokens = max(self.tokens, tensor.numel() // self.vocabulary)
        return out


@pytest.mark.parametrize("mode", ["topk", "full"])
def test_no_distribution_of_all_tokens_exists(tiny_model, small_chunks, mode):
    """TRL kept logits [B, T, V] of student and teacher; here 64 tokens of them at a time, backward included."""
    model, other = tiny_model(), tiny_model(seed=1)
    tree = long_tree(model)
    assert len(tree.target_index) > 80
    for one in (model, other):
        top_scores(one, tree, 1, layout="tree")  # what is probed once is not looked at
    with Largest(model.config.vocab_size) as seen:
        if mode == "topk":
            top = top_scores(model, tree, 5, layout="tree")
            with torch.no_grad():
                told = logps_at(other, tree, top.ids_Tk, layout="tree")
            (top.logps_Tk - told).sum().backward()
        else:
            recall, numbers = recalled(other, tree, layout="tree"), torch.arange(len(tree.target_index))
            _, values = compared_scores(
                model, tree, lambda s, at: alpha_divergence(s, recall.logps(numbers[at]), alpha=0.5), layout="tree"
            )
            values.sum().backward()
    assert 0 < seen.tokens <= 64


def test_sizes_are_those_of_the_device(monkeypatch, tiny_model):
    """A comparison takes a quarter of the chunk of a score."""
    asked = []
    original = head.in_chunks
    monkeypatch.setattr(distributions, "in_chunks", lambda *args: asked.append(args[3]) or original(*args))
    model = tiny_model()
    top_scores(model, random_tree(model.config.vocab_size), 2, layout="tree")
    sizes = head.sizes_for("cpu")
    assert asked == [replace(sizes, chunk_bytes=sizes.chunk_bytes // 4)]
