"""Offloaded activations: bit-equal gradients, weights and small tensors left alone, and what is moved counted."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from preftune.data.tree import build_tree
from preftune.models.logprobs import scoring, token_scores
from preftune.models.offload import offloading
from tests.support.models import tiny_model

TREE = build_tree([[5, 6, 7, 8] * 4], [[[11, 12, 13] * 3, [14, 15] * 4]])


def lora():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.2))


def gradients(model: nn.Module, layout, offload: bool, checkpointing: dict | None = None):
    """Gradients of one step by name, and what was moved."""
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
        model.enable_input_require_grads()
    model.train()
    torch.manual_seed(7)
    with scoring(model, layout), offloading(model, min_bytes=1024 if offload else 2**60, from_host=True) as moved:
        token_scores(model, TREE, layout=layout).logps.sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, moved


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("make", [tiny_model, lora])
def test_gradients_are_the_same_bits(make, layout, checkpointing):
    plain, nothing = gradients(make(), layout, False, checkpointing)
    offloaded, moved = gradients(make(), layout, True, checkpointing)
    assert nothing.tensors == 0
    assert moved.tensors > 0
    assert plain.keys() == offloaded.keys()
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)


def test_weights_and_small_tensors_are_not_moved():
    """y = relu(x W^T + b) v: saved are x (moved), W (a weight), the relu's output (moved), and v (too small)."""
    layer = nn.Linear(256, 64)
    x, v = torch.randn(32, 256, requires_grad=True), torch.randn(32, 1, requires_grad=True)
    with offloading(layer, from_host=True) as moved:
        (layer(x).relu() * v).sum().backward()
    kept = (32 * 256 + 2 * 32 * 64) * 4  # x; the relu's output, once for the relu and once for the product
    assert (moved.tensors, moved.nbytes) == (3, kept)


def test_most_of_what_a_step_saves_is_not_weights():
    """By hand: the sum of all saved bytes, less those whose memory is a parameter's, is what is moved."""
    model = tiny_model()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {"all": 0, "weights": 0, "small": 0}

    def count(tensor):
        part = "weights" if tensor.untyped_storage().data_ptr() in weights else "all"
        seen["small" if part == "all" and tensor.nbytes < 1024 else part] += tensor.nbytes
        return tensor

    model.train()
    with scoring(model, "tree"), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        token_scores(model, TREE, layout="tree").logps.sum().backward()
    _, moved = gradients(tiny_model(), "tree", True)
    assert seen["weights"] > 0
    assert moved.nbytes == seen["all"]


def test_on_the_host_nothing_is_copied():
    model = tiny_model().train()
    with scoring(model, "tree"), offloading(model) as moved:
        token_scores(model, TREE, layout="tree").logps.sum().backward()
    assert moved.tensors == 0
