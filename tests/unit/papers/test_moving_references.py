"""What papers prove of averages and of references that move, through the callbacks that users attach."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from preftune.callbacks.bema import BEMACallback
from preftune.callbacks.sync_ref import SyncRefModelCallback
from preftune.losses.preference import PAIR_LOSSES
from tests.unit.papers.bandit import pairs


class Weights(nn.Module):
    """A model that is one tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)


# ---- BEMA: EMA Without the Lag, arXiv:2508.00180 ---------------------------------------------------------------------


def weights_of_iterates(steps: int, *, kappa: float, eta: float | None, lag: float) -> np.ndarray:
    """BEMA at `steps` as a weighted sum of theta_0 .. theta_steps, its recursion unrolled; eta None is the plain EMA.

    theta_k enters the EMA with beta_k and is then shrunk by every later 1 - beta_j.
    """
    beta = (lag + np.arange(1, steps + 1)) ** -kappa
    survives = np.append(np.cumprod((1 - beta)[::-1])[::-1], 1.0)
    weights = np.append(survives[0], beta * survives[1:])
    if eta is not None:
        alpha = (lag + steps) ** -eta
        weights[-1] += alpha
        weights[0] -= alpha
    return weights


def expected_square(weights: np.ndarray, *, rate: float, noise: float, start: float) -> float:
    """E[(sum_k w_k theta_k)^2] where theta <- (1 - rate) theta - rate noise xi, from `start`, minimum at 0."""
    decay = (1 - rate) ** np.arange(len(weights))
    bias = (weights * decay).sum() * start
    of_noise = [(weights[i:] * decay[: len(weights) - i]).sum() for i in range(1, len(weights))]
    return bias**2 + (rate * noise) ** 2 * np.square(of_noise).sum()


# uniform average, and the correction 1 / (rate T) at T = 200 of the maximum likelihood estimate (section 3);
# the defaults, where the way is still long
SETTINGS = {
    "likelihood": {"rate": 0.02, "noise": 5.0, "kappa": 1.0, "eta": math.log(4) / math.log(201), "lag": 1},
    "defaults": {"rate": 0.001, "noise": 20.0, "kappa": 0.5, "eta": 0.2, "lag": 10},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_bema_beats_the_plain_average_on_the_noisy_quadratic(setting):
    """4,000 runs at once (a row each). BEMA and EMA equal their unrolled sums, and their mean squared distances from
    the minimum those of the closed form, by which BEMA is nearer at the last step."""
    given, steps, start = dict(SETTINGS[setting]), 200, 10.0
    rate, noise = given.pop("rate"), given.pop("noise")
    shared = {"update_freq": 1, "ema_power": given["kappa"], "lag": given["lag"]}
    callbacks = {"bema": BEMACallback(bias_power=given["eta"], **shared), "ema": BEMACallback(bias_power=-1, **shared)}
    policy, draw = Weights(torch.full((4000,), start, dtype=torch.float64)), np.random.default_rng(0)
    thetas = [policy.values.detach().clone()]
    for callback in callbacks.values():
        callback.on_train_begin(None, SimpleNamespace(global_step=0), None, model=policy)
    for step in range(1, steps + 1):
        with torch.no_grad():
            policy.values -= rate * (policy.values + noise * torch.from_numpy(draw.normal(size=4000)))
        thetas.append(policy.values.detach().clone())
        for callback in callbacks.values():
            callback.on_step_end(None, SimpleNamespace(global_step=step), None, model=policy)
    expected = {}
    for name, callback in callbacks.items():
        weights = weights_of_iterates(steps, **given | ({} if name == "bema" else {"eta": None}))
        unrolled = torch.einsum("k,kn->n", torch.from_numpy(weights), torch.stack(thetas))
        torch.testing.assert_close(callback.average["values"], unrolled, rtol=0, atol=1e-10)
        expected[name] = expected_square(weights, rate=rate, noise=noise, start=start)
        assert callback.average["values"].square().mean().item() == pytest.approx(expected[name], rel=0.06)
    assert expected["bema"] < 0.9 * expected["ema"]


# ---- TR-DPO: Learn Your Reference Model, arXiv:2404.09656 ------------------------------------------------------------


def unseen_mass(alpha: float, *, steps: int = 60, lr: float = 1.0, beta: float = 0.5) -> float:
    """Probability of the eight actions that are in no pair, after DPO on the pair (0, 1) from a uniform policy."""
    policy = Weights(torch.zeros(10, dtype=torch.float64))
    reference = copy.deepcopy(policy)
    callback = SyncRefModelCallback(reference, mixup_alpha=alpha, sync_steps=1)
    for step in range(1, steps + 1):
        scores = (pairs(model.values.log_softmax(0), [0], [1]) for model in (policy, reference))
        loss = PAIR_LOSSES["sigmoid"](*scores, beta=beta).loss.sum()
        (gradient,) = torch.autograd.grad(loss, policy.values)
        with torch.no_grad():
            policy.values -= lr * gradient
        callback.on_step_end(None, SimpleNamespace(global_step=step), None, model=policy)
    return policy.values.softmax(0)[2:].sum().item()


def mass_at(gap: float) -> float:
    """The same from the gap of the two logits, one up and one down by half of it: 8 / (8 + e^(gap/2) + e^(-gap/2))."""
    return 8 / (8 + 2 * math.cosh(gap / 2))


def test_tr_dpo_leaves_less_mass_on_unseen_actions():
    """A reference that stays holds the policy back: the gap obeys x <- x + 2 lr beta s(-beta x). One that is always the
    policy never does: each step adds 2 lr beta / 2. The more it follows, the less is left for what no pair has shown.
    """
    gap = 0.0
    for _ in range(60):
        gap += 2 * 0.5 / (1 + math.exp(0.5 * gap))
    masses = {alpha: unseen_mass(alpha) for alpha in (0.0, 0.05, 0.6, 1.0)}
    assert masses[0.0] == pytest.approx(mass_at(gap), rel=1e-9)
    assert masses[1.0] == pytest.approx(mass_at(60 * 0.5), rel=1e-9)
    assert masses[0.0] > masses[0.05] > masses[0.6] > masses[1.0]
    assert masses[0.6] < 0.01 < 0.1 < masses[0.0]
