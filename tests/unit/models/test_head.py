"""The chunked head against float64 log_softmax and autograd: values, every output, all gradients.

What must not matter does not: chunk and block size, kept or recomputed residuals, which gradients are asked for.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.models.head import (
    OUTPUTS,
    HeadOptions,
    HeadSizes,
    LogitTransform,
    generic_scores,
    linear_scores,
    sizes_for,
)

T, H, V = 37, 8, 51
TRANSFORMS = [
    pytest.param(LogitTransform(), id="plain"),
    pytest.param(LogitTransform(temperature=0.7), id="temperature"),
    pytest.param(LogitTransform(scale=0.25, temperature=1.3), id="scale"),
    pytest.param(LogitTransform(softcap=2.0), id="softcap"),
    pytest.param(LogitTransform(scale=0.5, softcap=4.0, temperature=0.5), id="all"),
]
KEPT = HeadSizes(chunk_bytes=2**20, block_bytes=2**20, keep_bytes=2**30)
RECOMPUTED = HeadSizes(chunk_bytes=2**20, block_bytes=2**20, keep_bytes=0)


def case(dtype=torch.float32, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g).to(dtype).requires_grad_()
    b = torch.randn(V, generator=g).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(V, (T,), generator=g)
    above = torch.randn(T, generator=g)
    return hidden, weight, b, targets, above


def slow(hidden, weight, bias, targets, transform):
    """Values of all outputs in float64, each from its definition."""
    z = hidden.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    z = z * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    z = z / transform.temperature
    p = torch.softmax(z, -1)
    logps = torch.log_softmax(z, -1)
    rows = torch.arange(len(targets))
    return {
        "logps": logps[rows, targets],
        "entropy": -(p * p.log()).sum(-1),
        "mean_logits": z.mean(-1),
        "is_top1": torch.stack([(z[t].argmax() == targets[t]).double() for t in range(len(targets))]),
        "log_sum_sq_probs": (p**2).sum(-1).log(),
    }


def grads(loss, *tensors):
    return torch.autograd.grad(loss, [t for t in tensors if t is not None])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("sizes", [KEPT, RECOMPUTED])
def test_values_and_gradients(transform, bias, sizes):
    hidden, weight, b, targets, above = case(bias=bias)
    packed = linear_scores(hidden, weight, b, targets, HeadOptions(OUTPUTS, transform, sizes))
    wanted = slow(hidden, weight, b, targets, transform)
    for i, name in enumerate(("logps", *OUTPUTS)):
        assert torch.allclose(packed[:, i].double(), wanted[name], atol=1e-5), name
    got = grads((packed[:, 0] * above).sum(), hidden, weight, b)
    for g, w in zip(got, grads((wanted["logps"] * above).sum(), hidden, weight, b), strict=True):
        assert g.dtype == torch.float32
        assert torch.allclose(g, w, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_any_head(transform):
    """The generic path, which only knows a function from hidden states to logits."""
    hidden, weight, b, targets, above = case()
    options = HeadOptions(OUTPUTS, transform, HeadSizes(chunk_bytes=1, block_bytes=1))
    packed = generic_scores(lambda h: h @ weight.T + b, hidden, targets, V, options)
    wanted = slow(hidden, weight, b, targets, transform)
    for i, name in enumerate(("logps", *OUTPUTS)):
        assert torch.allclose(packed[:, i].double(), wanted[name], atol=1e-5), name
    got = grads((packed[:, 0] * above).sum(), hidden, weight, b)
    for g, w in zip(got, grads((wanted["logps"] * above).sum(), hidden, weight, b), strict=True):
        assert torch.allclose(g, w, atol=1e-5, rtol=1e-4)


@given(chunk=st.integers(1, 200), block=st.integers(1, 200), keep=st.booleans())
def test_sizes_do_not_matter(chunk, block, keep):
    """Bit for bit in the values; in the weight's gradient up to the order of sums."""

    class Sizes(HeadSizes):
        def chunk(self, vocabulary, dtype):
            return chunk

        def block(self, vocabulary):
            return block

    def run(sizes):
        hidden, weight, b, targets, above = case(torch.float64)
        packed = linear_scores(hidden, weight, b, targets, HeadOptions(OUTPUTS, LogitTransform(softcap=5.0), sizes))
        return packed, *grads((packed[:, 0] * above).sum(), hidden, weight, b)

    for got, wanted in zip(run(Sizes(keep_bytes=2**30 if keep else 0)), run(KEPT), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sizes", [KEPT, RECOMPUTED])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "weight and bias"])
def test_frozen_parts_get_no_gradient(frozen, sizes):
    """A LoRA model trains hidden states under a frozen head; a head can be trained over a frozen body."""
    tensors = dict(zip(("hidden", "weight", "bias"), case()[:3]))
    targets, above = case()[3:]
    wanted_loss = (slow(*tensors.values(), targets, LogitTransform())["logps"] * above).sum()
    wanted = dict(zip(tensors, grads(wanted_loss, *tensors.values())))
    for name in tensors:
        tensors[name] = tensors[name].detach().requires_grad_(name not in frozen)
    packed = linear_scores(*tensors.values(), targets, HeadOptions(sizes=sizes))
    (packed[:, 0] * above).sum().backward()
    for name, tensor in tensors.items():
        if name in frozen:
            assert tensor.grad is None
        else:
            assert torch.allclose(tensor.grad, wanted[name], atol=1e-5, rtol=1e-4), name


def test_no_graph_without_grad_mode():
    hidden, weight, b, targets, _ = case()
    with torch.no_grad():
        packed = linear_scores(hidden, weight, b, targets, HeadOptions())
    assert not packed.requires_grad
    assert torch.allclose(packed[:, 0].double(), slow(hidden, weight, b, targets, LogitTransform())["logps"], atol=1e-5)


def test_no_scored_tokens():
    """Zero rows give zero gradients, not none: a distributed step needs every parameter to take part."""
    hidden, weight, b, targets, _ = case()
    for sizes in (KEPT, RECOMPUTED):
        packed = linear_scores(hidden[:0], weight, b, targets[:0], HeadOptions(sizes=sizes))
        assert packed.shape == (0, 1)
        for g in grads(packed.sum(), hidden, weight, b):
            assert g.abs().sum() == 0


@pytest.mark.parametrize("sizes", [KEPT, RECOMPUTED])
def test_autocast(sizes):
    """bfloat16 products with float32 softmax: within bfloat16's rounding of float64, gradients in float32."""
    hidden, weight, b, targets, above = case()
    with torch.autocast("cpu", torch.bfloat16):
        packed = linear_scores(hidden, weight, b, targets, HeadOptions(OUTPUTS, sizes=sizes))
    wanted = slow(hidden, weight, b, targets, LogitTransform())
    assert packed.dtype == torch.float32
    error = (packed[:, 0].double() - wanted["logps"]).abs().max()
    assert 1e-4 < error < 0.1
    got = grads((packed[:, 0] * above).sum(), hidden, weight, b)
    for g, w in zip(got, grads((wanted["logps"] * above).sum(), hidden, weight, b), strict=True):
        assert g.dtype == torch.float32
        assert (g - w).norm() < 0.02 * w.norm()


def test_a_confident_token_keeps_its_gradient():
    """With p = 1 - 1e-4 the gradient is tiny but must not vanish in bfloat16, where 1 - 1e-4 rounds to 1.

    One hidden unit, logits h and 0, target 0: d logp / d h = 1 - p = 1 / (1 + e^h).
    """
    h = math.log(1e4)
    hidden = torch.tensor([[h]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]])
    with torch.autocast("cpu", torch.bfloat16):
        packed = linear_scores(hidden, weight, None, torch.tensor([0]), HeadOptions())
    packed.sum().backward()
    assert hidden.grad.item() == pytest.approx(1 / (1 + math.exp(torch.tensor(h).bfloat16().item())), rel=0.01)


def test_first_argmax_wins():
    """Three tokens with equal logits 1 1 0: token 0 is top, its equal token 1 is not."""
    hidden, weight = torch.ones(3, 1), torch.tensor([[1.0], [1.0], [0.0]])
    packed = linear_scores(hidden, weight, None, torch.arange(3), HeadOptions(("is_top1",)))
    assert packed[:, 1].tolist() == [1.0, 0.0, 0.0]
    assert packed[0, 0].item() == pytest.approx(1 - math.log(2 * math.e + 1))


def test_outputs_of_the_uniform_distribution():
    """Equal logits over V tokens: entropy log V, sum of squares 1 / V."""
    packed = linear_scores(
        torch.zeros(1, 4), torch.ones(V, 4), None, torch.tensor([3]), HeadOptions(("entropy", "log_sum_sq_probs"))
    )
    assert packed[0].tolist() == pytest.approx([-math.log(V), math.log(V), -math.log(V)], rel=1e-6)


def test_no_square_tensor_is_made(monkeypatch):
    """In chunks of one token, the largest fresh tensor of a pass without gradients is one row of logits."""
    hidden, weight, _, targets, _ = case(bias=False)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == V and out.shape[0] != H:
                seen.append(out.shape[0])
            return out

    monkeypatch.setattr(HeadSizes, "chunk", lambda self, vocabulary, dtype: 1)
    with torch.no_grad(), Watch():
        linear_scores(hidden, weight, None, targets, HeadOptions(OUTPUTS, sizes=RECOMPUTED))
    assert set(seen) == {1}


def test_sizes_come_from_device_and_shape_alone():
    """SmolLM2's vocabulary in bfloat16 on CPU: 640 tokens a product, eight through softmax at once."""
    cpu = sizes_for("cpu")
    assert cpu.chunk(49152, torch.bfloat16) == 640
    assert cpu.block(49152) == 8
    assert sizes_for("cuda").chunk(151936, torch.bfloat16) == 3520
