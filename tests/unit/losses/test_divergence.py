"""Scores of log-ratios: values by hand, limits, and the definition g(r) = f'(e^r) - f'(1) by finite differences.

The f of each divergence is written here from its definition; the package only knows the derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.errors import ConfigError
from preftune.losses.divergence import MAX_EXPONENT, f_score
from preftune.losses.names import DIVERGENCES


def g(r: float, divergence: str, alpha: float = 0.5, dtype=torch.float64) -> float:
    score = f_score(torch.tensor([r], dtype=dtype), f_divergence_type=divergence, f_alpha_divergence_coef=alpha)
    return score.item()


def generator(divergence: str, alpha: float) -> Callable[[float], float]:
    """f(u) of D_f(policy || ref) = E_ref f(policy / ref)."""
    if divergence == "reverse_kl":
        return lambda u: u * math.log(u)
    if divergence == "forward_kl":
        return lambda u: -math.log(u)
    if divergence == "js_divergence":
        return lambda u: u * math.log(u) - (u + 1) * math.log((u + 1) / 2)
    a = 1 - alpha  # the paper's alpha
    return lambda u: (u ** (1 - a) - (1 - a) * u - a) / (a * (a - 1))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(r=st.floats(-3, 3), alpha=st.sampled_from([0.2, 0.5, 0.8, -0.5, 1.7]))
def test_is_the_derivative_of_f(divergence, r, alpha):
    f = generator(divergence, alpha)

    def derivative(u: float) -> float:
        h = 1e-5 * u
        return (f(u + h) - f(u - h)) / (2 * h)

    assert g(r, divergence, alpha) == pytest.approx(derivative(math.exp(r)) - derivative(1.0), rel=1e-5, abs=1e-5)


def test_values_at_log_4():
    """r = log 4: 1 - 1/4; log(2 * 4 / 5); alpha 1/2: (4^(-1/2) - 1) / (-1/2) = 1; alpha 3/2: (2 - 1) / (1/2) = 2."""
    r = math.log(4)
    assert g(r, "reverse_kl") == pytest.approx(r)
    assert g(r, "forward_kl") == pytest.approx(0.75)
    assert g(r, "js_divergence") == pytest.approx(math.log(1.6))
    assert g(r, "alpha_divergence", 0.5) == pytest.approx(1.0)
    assert g(r, "alpha_divergence", 1.5) == pytest.approx(2.0)


@given(r=st.floats(-20, 20))
def test_limits_in_alpha(r):
    """alpha = 0 is forward KL; alpha -> 1 reverse KL: exactly at 1, and r + (alpha - 1) r^2 / 2 near it."""
    assert g(r, "alpha_divergence", 0.0) == pytest.approx(g(r, "forward_kl"), rel=1e-12)
    for alpha in (1.0, 1 - 1e-7, 1 + 1e-7):
        assert g(r, "alpha_divergence", alpha) == r
    for shift in (1e-4, -1e-4):
        assert g(r, "alpha_divergence", 1 + shift) == pytest.approx(r + shift * r * r / 2, rel=1e-5, abs=1e-9)


def test_near_one_no_digit_is_lost_in_float32():
    """alpha = 1 + 2e-6 at r = 0.01: e^(2e-8) - 1 is 0 in float32, which would make the score 0."""
    assert g(0.01, "alpha_divergence", 1 + 2e-6, torch.float32) == pytest.approx(0.01, rel=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rises_from_zero_at_zero(divergence):
    grid = torch.linspace(-15, 15, 301, dtype=torch.float64)
    score = f_score(grid, f_divergence_type=divergence)
    assert (score.diff() > 0).all()
    assert g(0.0, divergence) == pytest.approx(0.0, abs=1e-12)


def test_the_exponent_is_bounded():
    """Beyond 80 the score stays at 1 - e^80 and its gradient is 0; below it nothing is touched."""
    r = torch.tensor([-79.0, -80.0, -81.0, -1e4], requires_grad=True)
    score = f_score(r, f_divergence_type="forward_kl")
    score.sum().backward()
    assert score.tolist() == pytest.approx([-math.exp(79), -math.exp(80), -math.exp(80), -math.exp(80)], rel=1e-5)
    assert r.grad is not None
    assert r.grad.tolist() == pytest.approx([math.exp(79), math.exp(80), 0.0, 0.0], rel=1e-5)
    assert math.exp(MAX_EXPONENT) < torch.finfo(torch.float32).max


def test_half_precision_becomes_float32():
    """e^20 does not fit float16 (65504)."""
    score = f_score(torch.tensor([-20.0], dtype=torch.float16), f_divergence_type="forward_kl")
    assert score.dtype == torch.float32
    assert score.item() == pytest.approx(1 - math.exp(20), rel=1e-6)


def test_unknown_name_has_a_hint():
    with pytest.raises(ConfigError, match="Did you mean 'forward_kl'"):
        g(0.0, "forwardkl")
