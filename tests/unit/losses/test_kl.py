"""KL estimators by enumeration of a three-token vocabulary: their means and the means of their gradients are exact.

The divergence itself is a sum over the vocabulary; autograd of that sum is what the gradients are compared with.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.kl import MAX_LOG_RATIO, k1, k2, k3
from preftune.losses.policy_gradient import kl_penalty

logits = st.lists(st.floats(-4, 4), min_size=3, max_size=3)


def log_softmax(values: list[float], *, requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    theta = torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)
    return theta, theta.log_softmax(0)


def divergence(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    return (logps.exp() * (logps - ref_logps)).sum()


@given(logits, logits)
def test_means_of_k1_and_k3_are_the_divergence(policy, ref):
    (_, logps), (_, ref_logps) = log_softmax(policy), log_softmax(ref)
    expected = divergence(logps, ref_logps).item()
    for estimator in (k1, k3):
        mean = (logps.exp() * estimator(logps, ref_logps)).sum().item()
        assert mean == pytest.approx(expected, rel=1e-9, abs=1e-12)


def mean_gradient(theta, logps, values, probs) -> torch.Tensor:
    """Sum over the vocabulary of probability times the gradient of the estimator at that token."""
    rows = [torch.autograd.grad(value, theta, retain_graph=True)[0] for value in values]
    return sum((p * row for p, row in zip(probs.detach(), rows, strict=True)), torch.zeros(3, dtype=torch.float64))


@given(logits, logits)
def test_gradients_in_the_mean(policy, ref):
    """k2's is that of the divergence, k1's is zero, and k3's is another one (that of KL(ref || policy))."""
    theta, logps = log_softmax(policy, requires_grad=True)
    _, ref_logps = log_softmax(ref)
    (expected,) = torch.autograd.grad(divergence(logps, ref_logps), theta, retain_graph=True)
    (forward,) = torch.autograd.grad(divergence(ref_logps, logps), theta, retain_graph=True)
    for estimator, wanted in ((k2, expected), (k1, torch.zeros(3, dtype=torch.float64)), (k3, forward)):
        got = mean_gradient(theta, logps, estimator(logps, ref_logps), logps.exp())
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@given(logits, logits, logits)
def test_bias_correction_makes_the_gradient_that_of_the_divergence(policy, old, ref):
    """E_old[grad (w k3)] = grad KL(p || p_ref), whether old is the policy or not."""
    theta, logps = log_softmax(policy, requires_grad=True)
    (_, old_logps), (_, ref_logps) = log_softmax(old), log_softmax(ref)
    (expected,) = torch.autograd.grad(divergence(logps, ref_logps), theta, retain_graph=True)
    mask = torch.ones(3, 1)
    for sampled_by in (logps.detach(), old_logps):
        ratio = (logps - sampled_by).exp()[:, None]
        values = kl_penalty(logps[:, None], ref_logps[:, None], mask, ratio)[:, 0]
        got = mean_gradient(theta, logps, values, sampled_by.exp())
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_k3_in_float32_near_agreement():
    """log-ratio d: k3 = d^2 / 2 + O(d^3). exp(d) - d - 1 in float32 would give 0 or 1.2e-7 here."""
    got = k3(torch.tensor([-1.0 + 1e-4]), torch.tensor([-1.0])).item()
    assert got == pytest.approx(5e-9, rel=0.05)


@pytest.mark.parametrize("gap", [30.0, 1e4, 1e30])
def test_k3_never_overflows(gap):
    logps = torch.tensor([-gap], requires_grad=True)
    value = k3(logps, torch.zeros(1))
    value.sum().backward()
    assert value.isfinite().all() and logps.grad is not None and logps.grad.isfinite().all()
    assert value.item() == pytest.approx(torch.tensor(MAX_LOG_RATIO).exp().item() - MAX_LOG_RATIO - 1, rel=1e-5)


def test_half_precision_is_computed_in_float32():
    assert k3(torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-2.0])).dtype == torch.float32
