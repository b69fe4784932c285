"""The averages against slow loops in float64, closed forms and numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.models.averaging import bema, bias_weight, ema, ema_weight

shares = st.floats(0.0, 1.0)
numbers = st.floats(-100.0, 100.0)


@given(numbers, numbers, shares)
def test_ema_is_the_weighted_mean(old, new, weight):
    got = ema(torch.tensor([old], dtype=torch.float64), torch.tensor([new], dtype=torch.float64), weight).item()
    assert got == pytest.approx((1 - weight) * old + weight * new, rel=1e-12, abs=1e-11)


@given(numbers, numbers)
def test_ema_is_exact_at_both_ends(old, new):
    old_N, new_N = torch.tensor([old]), torch.tensor([new])
    assert torch.equal(ema(old_N, new_N, 0.0), old_N)
    assert torch.equal(ema(old_N, new_N, 1.0), new_N)


def test_schedule_by_hand():
    # 10 + 6 = 16 = 4^2 and 10 + 1 * 22 = 32 = 2^5; with gamma 0.5, 10 + 0.5 * 44 = 32 too
    assert ema_weight(6, power=0.5, lag=10, multiplier=1.0) == 0.25
    assert ema_weight(12, power=0.5, lag=10, multiplier=0.5) == 0.25
    assert bias_weight(22, power=0.2, lag=10, multiplier=1.0) == pytest.approx(0.5, rel=1e-15)
    assert bias_weight(44, power=0.2, lag=10, multiplier=0.5) == pytest.approx(0.5, rel=1e-15)
    assert ema_weight(6, power=0.5, lag=10, multiplier=1.0, minimum=0.3) == 0.3


@given(st.integers(1, 10_000))
def test_powers_at_their_ends(step):
    assert ema_weight(step, power=0.0, lag=10, multiplier=1.0) == 1.0
    assert bias_weight(step, power=0.0, lag=10, multiplier=1.0) == 1.0
    assert bias_weight(step, power=8.0, lag=10, multiplier=1.0) < 1e-8
    assert bias_weight(step, power=-1.0, lag=10, multiplier=1.0) == 0.0


def test_ema_and_bema_equal_their_closed_form():
    """With a constant weight b, EMA_n = (1-b)^n theta_0 + sum_k b (1-b)^(n-k) theta_k."""
    draw, b, a, n = np.random.default_rng(0), 0.3, 0.7, 12
    thetas = draw.normal(size=(n + 1, 5))
    expected = (1 - b) ** n * thetas[0] + sum(b * (1 - b) ** (n - k) * thetas[k] for k in range(1, n + 1))
    average = torch.from_numpy(thetas[0])
    for theta in thetas[1:]:
        average = ema(average, torch.from_numpy(theta), b)
    np.testing.assert_allclose(average.numpy(), expected, rtol=1e-12)
    corrected = bema(average, torch.from_numpy(thetas[-1]), torch.from_numpy(thetas[0]), a)
    np.testing.assert_allclose(corrected.numpy(), expected + a * (thetas[-1] - thetas[0]), rtol=1e-12)


def test_bema_without_lag_is_the_newest_value_and_without_correction_the_ema():
    theta, start = torch.tensor([3.0]), torch.tensor([1.0])
    assert bema(start, theta, start, 1.0).item() == 3.0
    assert bema(torch.tensor([2.0]), theta, start, 0.0).item() == 2.0


def test_bema_removes_the_bias_of_the_average_on_a_noisy_quadratic():
    """The paper's setting: theta <- theta - r (theta + s xi), from theta_0 = 10 to the minimum 0.

    With r = 0.02, s = 5, T = 200 and q = 1 - r the mean of theta_t is 10 q^t, so the uniform average
    (beta_t = 1 / (1 + t)) of theta_0 .. theta_T has the mean 10 (1 - q^(T+1)) / (r (T+1)) = 2.45. alpha = 1 / (r T)
    makes BEMA the maximum likelihood estimate of the minimum: its mean is 0 up to 10 / T = 0.05, and its deviation
    s / sqrt(T) = 0.35.
    """
    draw, rate, last = np.random.default_rng(0), 0.02, 200
    theta = np.full(4000, 10.0)
    start, average = torch.from_numpy(theta), torch.from_numpy(theta)
    for step in range(1, last + 1):
        theta = theta - rate * (theta + 5.0 * draw.normal(size=theta.shape))
        average = ema(average, torch.from_numpy(theta), ema_weight(step, power=1.0, lag=1, multiplier=1.0))
    alpha = bias_weight(last, power=1.0, lag=0, multiplier=rate)
    corrected = bema(average, torch.from_numpy(theta), start, alpha)
    assert average.mean().item() == pytest.approx(10 * (1 - 0.98**201) / (0.02 * 201), abs=0.02)
    assert corrected.mean().item() == pytest.approx(0.0, abs=0.08)
    assert corrected.std().item() == pytest.approx(5 / math.sqrt(last), rel=0.05)
    assert corrected.square().mean() < 0.05 * average.square().mean()
