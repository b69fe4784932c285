"""Attention over trees against dense float64 attention, and the switch that turns it on and off.

The dense oracle builds who sees whom token by token from the meaning of a tree.
"""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from preftune.models import attention, cpu_kernel, kernels
from preftune.models.attention import is_active, scoring, tree_attention
from preftune.models.cpu_kernel import cpu_attention
from preftune.models.kernels import TreeTable
from preftune.models.logprobs import token_scores
from tests.unit.models.scoring_helpers import LENGTHS, gradients, random_tree, weights_for, worst

LAYOUTS = [
    pytest.param(tuple(LENGTHS), id="mixed"),
    pytest.param(((4, (3,)),), id="one-branch"),
    pytest.param(((5, (1, 2, 3, 4)),), id="group"),
    pytest.param(((0, (4, 3)), (0, (5,))), id="no-prompt"),
    pytest.param(((4, (0, 3)), (3, (2, 0, 1)), (2, (0,)), (3, ())), id="empty-branches"),
]


def visible(layout, window):
    """`[N, N]` who sees whom: a token sees its prompt and its own branch, not later, not beyond the window."""
    owners, positions = [], []
    for p, (n, branches) in enumerate(layout):
        owners += [(p, None)] * n
        positions += range(n)
        for b, m in enumerate(branches):
            owners += [(p, b)] * m
            positions += range(n, n + m)
    size = len(owners)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for i in range(size):
        for j in range(size):
            (p, b), (q, c) = owners[i], owners[j]
            back = positions[i] - positions[j]
            seen[i, j] = p == q and (c is None or b == c) and 0 <= back < (window or size)
    return seen


def dense(q, k, v, layout, *, scale, window=None, softcap=None, sinks=None):
    """Float64 attention with the whole matrix; q `[1, H, N, D]` -> `[1, N, H, D]`."""
    shared = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(shared, 1), v.double().repeat_interleave(shared, 1)
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(layout, window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


def tensors(layout, heads=6, kv_heads=2, width=8, value_width=8, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    size = sum(n + sum(b) for n, b in layout)
    make = lambda h, d: torch.randn(1, size, h, d, generator=g).to(dtype).transpose(1, 2).requires_grad_()  # noqa: E731
    return make(heads, width), make(kv_heads, width), make(kv_heads, value_width)


def compare(layout, got_of, *, tolerance=1e-5, dtype=torch.float32, value_width=8, **features):
    q, k, v = tensors(layout, dtype=dtype, value_width=value_width)
    out = got_of(q, k, v)
    expected = dense(q, k, v, layout, scale=0.3, **features)
    assert out.shape == expected.shape
    assert (out - expected).abs().max() < tolerance
    above = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad((out.double() * above).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * above).sum(), (q, k, v))
    for g, w in zip(got, wanted, strict=True):
        assert (g - w).norm() <= tolerance * (10 * w.norm() + 1)


@pytest.mark.parametrize("small", [0, 7 * 7 * 48, 2**21], ids=["long", "mixed", "short"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cpu_kernel(monkeypatch, layout, small):
    """Segments one by one, all in batches, and both in one tree."""
    monkeypatch.setattr(cpu_kernel, "_SMALL", small)
    cpu_kernel._plan.cache_clear()
    compare(layout, lambda q, k, v: cpu_attention(q, k, v, TreeTable(layout), 0.3))
    cpu_kernel._plan.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sdpa(layout, window):
    def run(q, k, v):
        return kernels.sdpa_attention(q, k, v, TreeTable(layout), 0.3, window=window, dropout=0.0)

    compare(layout, run, window=window)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "features",
    [{}, {"softcap": 0.7}, {"sinks": torch.linspace(-1, 2, 6)}, {"softcap": 0.7, "sinks": torch.ones(6), "window": 3}],
)
def test_eager(layout, features):
    def run(q, k, v):
        arguments = {"window": None, "softcap": None, "sinks": None, **features}
        return kernels.eager_attention(q, k, v, TreeTable(layout), 0.3, dropout=0.0, **arguments)

    compare(layout, run, **features)


def test_sinks_get_their_gradient():
    layout = ((3, (2, 4)),)
    q, k, v = tensors(layout)
    sinks = torch.linspace(-1, 1, 6, requires_grad=True)
    run = kernels.eager_attention(q, k, v, TreeTable(layout), 0.3, window=None, dropout=0.0, softcap=None, sinks=sinks)
    (got,) = torch.autograd.grad(run.square().sum(), sinks)
    (wanted,) = torch.autograd.grad(dense(q, k, v, layout, scale=0.3, sinks=sinks).square().sum(), sinks)
    assert torch.allclose(got, wanted, atol=1e-4)


def test_cpu_kernel_in_other_dtypes():
    layout = tuple(LENGTHS)
    run = lambda q, k, v: cpu_attention(q, k, v, TreeTable(layout), 0.3)  # noqa: E731
    compare(layout, run, dtype=torch.float64, tolerance=1e-10)
    q, k, v = tensors(layout, dtype=torch.bfloat16)
    assert run(q, k, v).dtype == torch.bfloat16
    compare(layout, run, dtype=torch.bfloat16, tolerance=2e-2)


# --- which way is taken -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "way"),
    [
        ({}, "cpu_attention"),
        ({"sliding_window": 1000}, "cpu_attention"),
        ({"sliding_window": 4}, "sdpa_attention"),
        ({"dropout": 0.1}, "sdpa_attention"),
        ({"value_width": 4}, "sdpa_attention"),
        ({"softcap": 3.0}, "eager_attention"),
        ({"s_aux": torch.ones(6)}, "eager_attention"),
    ],
)
def test_route(monkeypatch, arguments, way):
    taken = []
    for name in ("cpu_attention", "sdpa_attention", "eager_attention"):
        monkeypatch.setattr(attention, name, lambda *a, name=name, **k: taken.append(name))
    layout = tuple(LENGTHS)
    q, k, v = tensors(layout, value_width=arguments.pop("value_width", 8))
    tree_attention(SimpleNamespace(), q, k, v, None, preftune_tree=TreeTable(layout), **arguments)
    assert taken == [way]


def test_dropout_is_applied_and_unbiased():
    """Values of one: each output is a weighted mean of (kept or not) / (1 - p), so the mean over all is one."""
    layout = ((40, (30, 30)),)
    q, k, _ = tensors(layout)
    ones = torch.ones(1, 2, 100, 8)
    torch.manual_seed(0)
    out, _ = tree_attention(SimpleNamespace(), q, k, ones, None, dropout=0.4, preftune_tree=TreeTable(layout))
    assert (out - 1).abs().max() > 0.1
    assert out.mean().item() == pytest.approx(1.0, abs=0.05)


def test_without_a_tree_it_refuses():
    with pytest.raises(RuntimeError, match="without a prompt tree"):
        tree_attention(SimpleNamespace(), *tensors(((2, (1,)),)), None)


# --- the switch -------------------------------------------------------------------------------------------------------


def implementation(model):
    return model.config._attn_implementation


def test_scoring_restores(tiny_model):
    model = tiny_model("llama", attn_implementation="eager")

    def fail():
        with scoring(model, "tree"):
            assert implementation(model) == "preftune_tree"
            assert is_active(model, "tree")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert implementation(model) == "eager"
    assert type(implementation(model)) is str


def test_scoring_nests(tiny_model):
    model = tiny_model("llama", attn_implementation="eager")
    tree = random_tree(model.config.vocab_size)
    with torch.no_grad(), scoring(model, "tree"):
        inside = token_scores(model, tree, layout="tree").logps
        with scoring(model, "padded"):
            assert implementation(model) == "eager"
        padded = token_scores(model, tree, layout="padded").logps
        with scoring(model, "tree"):
            assert is_active(model, "tree")
        assert is_active(model, "tree")
    assert implementation(model) == "eager"
    assert torch.allclose(inside, padded, atol=1e-4)


def test_own_calls_are_untouched(tiny_model):
    """generate and plain forwards before and after scoring are bit for bit the same."""
    model = tiny_model("mistral")
    ids = torch.arange(3, 15)[None]

    def own():
        with torch.no_grad():
            generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
            return generated, model(ids).logits

    before = own()
    tree = random_tree(model.config.vocab_size)
    token_scores(model, tree, layout="tree").logps.sum().backward()
    with scoring(model, "tree"):
        pass
    for a, b in zip(before, own(), strict=True):
        assert torch.equal(a, b)
    assert "forward" not in model.lm_head.__dict__


def test_copies_made_inside_are_ordinary(tiny_model):
    model = tiny_model("llama", attn_implementation="eager")
    tree = random_tree(model.config.vocab_size)
    with scoring(model, "tree"):
        twin = copy.deepcopy(model)
        config = pickle.loads(pickle.dumps(model.config))
        assert is_active(model, "tree")
    assert implementation(twin) == config._attn_implementation == "eager"
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        assert token_scores(model, tree, layout="tree").logps.std() > 0.1
        assert token_scores(twin, tree, layout="tree").logps.std() < 1e-6
        assert twin(tree.input_ids[None]).logits.abs().max() == 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_gradient_checkpointing_changes_nothing(tiny_model, family):
    """The recomputation in backward must use the tree too: same gradients with and without it."""
    model = tiny_model(family).train()
    tree = random_tree(model.config.vocab_size)
    weights = weights_for(tree).float()

    def run():
        with scoring(model, "tree"):
            return gradients(model, (token_scores(model, tree, layout="tree").logps * weights).sum())

    wanted = run()
    model.gradient_checkpointing_enable()
    calls = []
    layer = model.model.layers[0].self_attn
    layer.register_forward_hook(lambda *_: calls.append(1))
    got = run()
    assert len(calls) == 2
    assert worst(got, wanted) < 1e-6


def test_gradient_checkpointing_wants_the_block_held(tiny_model):
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable()
    tree = random_tree(model.config.vocab_size)
    with pytest.raises(RuntimeError, match="hold `scoring"):
        token_scores(model, tree, layout="tree")
    with torch.no_grad():
        token_scores(model, tree, layout="tree")
    assert implementation(model) == "sdpa"
