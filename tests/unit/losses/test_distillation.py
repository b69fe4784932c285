"""Divergences between student and teacher: a slow float64 loop, limits by hand, enumeration of a tiny vocabulary.

The loop knows the definitions alone, with probabilities as plain numbers.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.distillation import (
    alpha_divergence,
    importance_weight,
    on_support,
    sampled_token,
    topk_divergence,
)

V = 4
logits = st.lists(st.floats(-4, 4), min_size=V, max_size=V)
alphas = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])


def softmax(values: list[float]) -> list[float]:
    total = sum(map(math.exp, values))
    return [math.exp(v) / total for v in values]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def slow_divergence(s: list[float], t: list[float], alpha: float) -> float:
    if alpha == 0:
        return kl(t, s)
    if alpha == 1:
        return kl(s, t)
    m = [(1 - alpha) * a + alpha * b for a, b in zip(s, t, strict=True)]
    return (1 - alpha) * kl(s, m) + alpha * kl(t, m)


def log_probs(values: list[float], dtype=torch.float64) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype).log_softmax(-1)


@given(logits, logits, alphas)
def test_the_definition(student, teacher, alpha):
    got = alpha_divergence(log_probs(student), log_probs(teacher), alpha=alpha)
    assert got.shape == (1,)
    assert got.item() == pytest.approx(slow_divergence(softmax(student), softmax(teacher), alpha), abs=1e-12)
    assert got.item() >= -1e-12


@given(logits, alphas)
def test_no_distance_and_no_gradient_where_both_agree(values, alpha):
    student = log_probs(values).requires_grad_()
    value = alpha_divergence(student.log_softmax(-1), student.detach(), alpha=alpha)
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert gradient.abs().max() < 1e-9


def test_ends_by_hand():
    """S = (3/4, 1/4), T = (1/2, 1/2): KL(T || S) = log(4/3) / 2, KL(S || T) = 3/4 log 3/2 + 1/4 log 1/2."""
    student, teacher = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert alpha_divergence(student, teacher, alpha=0).item() == pytest.approx(math.log(4 / 3) / 2)
    reverse = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert alpha_divergence(student, teacher, alpha=1).item() == pytest.approx(reverse)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_impossible_tokens_are_no_nan(alpha):
    """Nothing in common: Jensen-Shannon is log 2, the others are large and finite; so are gradients."""
    student = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    value = alpha_divergence(student, torch.tensor([[-math.inf, 0.0]]), alpha=alpha)
    value.backward()
    assert value.isfinite().all() and student.grad is not None and student.grad.isfinite().all()
    if alpha == 0.5:
        assert value.item() == pytest.approx(math.log(2))


def test_a_share_outside_is_refused():
    with pytest.raises(ValueError, match=r"alpha is 1.5; wanted a number in \[0, 1\]"):
        alpha_divergence(log_probs([0, 1]), log_probs([0, 1]), alpha=1.5)


def test_half_precision_is_computed_in_float32():
    values = torch.tensor([[0.1, 0.2]], dtype=torch.bfloat16).log_softmax(-1)
    assert alpha_divergence(values, values, alpha=0.5).dtype == torch.float32


@given(logits, logits, alphas, st.integers(1, V), st.booleans())
def test_top_k_by_a_slow_loop(student, teacher, alpha, k, add_tail):
    s, t = softmax(student), softmax(teacher)
    kept = sorted(range(V), key=lambda i: -s[i])[:k]
    ids = torch.tensor([kept])
    s_k, t_k = [s[i] for i in kept], [t[i] for i in kept]
    if add_tail:
        s_k, t_k = s_k + [max(1 - sum(s_k), 1e-7)], t_k + [max(1 - sum(t_k), 1e-7)]
    else:
        s_k, t_k = [a / sum(s_k) for a in s_k], [a / sum(t_k) for a in t_k]
    got = topk_divergence(
        log_probs(student).gather(1, ids), log_probs(teacher).gather(1, ids), alpha=alpha, add_tail=add_tail
    )
    assert got.item() == pytest.approx(slow_divergence(s_k, t_k, alpha), abs=1e-6)


@given(logits, logits, alphas, st.booleans())
def test_the_whole_vocabulary_as_support_is_full_logits(student, teacher, alpha, add_tail):
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))[None]
    some = topk_divergence(
        log_probs(student).gather(1, order), log_probs(teacher).gather(1, order), alpha=alpha, add_tail=add_tail
    )
    whole = alpha_divergence(log_probs(student), log_probs(teacher), alpha=alpha)
    assert some.item() == pytest.approx(whole.item(), abs=2e-6)


def test_support_by_hand():
    logps = torch.tensor([[0.3, 0.2]]).log()
    assert on_support(logps, add_tail=False).exp()[0].tolist() == pytest.approx([0.6, 0.4])
    assert on_support(logps, add_tail=True).exp()[0].tolist() == pytest.approx([0.3, 0.2, 0.5])


@given(logits, logits)
def test_a_sampled_token_is_the_reverse_kl_in_the_mean(student, teacher):
    """Value and gradient, by enumeration: sum over v of S(v) times those at v."""
    theta = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    s, t = theta.log_softmax(0), torch.tensor(teacher, dtype=torch.float64).log_softmax(0)
    divergence = (s.exp() * (s - t)).sum()
    (expected,) = torch.autograd.grad(divergence, theta, retain_graph=True)
    values = sampled_token(s, t)
    rows = [torch.autograd.grad(value, theta, retain_graph=True)[0] for value in values]
    mean = sum((p * row for p, row in zip(s.detach().exp(), rows, strict=True)), torch.zeros(V, dtype=torch.float64))
    torch.testing.assert_close(mean, expected, rtol=1e-9, atol=1e-12)
    assert (s.exp() * values).sum().item() == pytest.approx(divergence.item(), abs=1e-12)


@given(logits)
def test_a_sampled_token_has_no_gradient_where_both_agree(values):
    """Not only in the mean: the log-ratio is a constant."""
    theta = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    value = sampled_token(theta.log_softmax(0), theta.detach().log_softmax(0))
    (gradient,) = torch.autograd.grad(value[0], theta)
    assert value.tolist() == [0.0] * V and gradient.tolist() == [0.0] * V


def test_importance_weights():
    """Twice as probable as when drawn: 2; eight times: cut to 3; half: 1/2; outside the mask 1."""
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    old = torch.tensor([[-3.0, -3.0, -3.0, 0.0]])
    now = (old + torch.tensor([[2.0, 8.0, 0.5, 99.0]]).log()).requires_grad_()
    weight = importance_weight(now, old, mask, clip=3.0)
    assert weight.tolist() == [pytest.approx([2, 3, 0.5, 1])]
    assert not weight.requires_grad
    assert importance_weight(now, None, mask, clip=3.0).tolist() == [[1, 1, 1, 1]]
    assert importance_weight(now, old, mask, clip=None).tolist() == [[1, 1, 1, 1]]
