"""What papers prove of losses on pairs, on bandits small enough to know the answer: IPO, robust DPO, cDPO, f-DPO."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.names import DIVERGENCES
from preftune.losses.preference import PAIR_LOSSES
from tests.unit.papers.bandit import descend, minimise, pairs, uniform

sigmoid, ipo, robust = (PAIR_LOSSES[name] for name in ("sigmoid", "ipo", "robust"))


def logit(p: float) -> float:
    return math.log(p / (1 - p))


# ---- IPO: A General Theoretical Paradigm to Understand Learning from Human Preferences, arXiv:2310.12036 -------------

ORDER = ([0, 1, 0], [1, 2, 2])  # action 0 beats 1, 1 beats 2, 0 beats 2: always


def ordered(loss, beta):
    ref = pairs(uniform(3), *ORDER)
    return lambda logits: loss(pairs(logits.log_softmax(0), *ORDER), ref, beta=beta).loss.mean()


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_ipo_stays_with_the_reference_on_deterministic_preferences(beta):
    """Section 5: three pairs want the gaps a = b = a + b = 1 / (2 beta); least squares gives a = b = 1 / (3 beta)."""
    logps = minimise(ordered(ipo, beta), torch.zeros(3, dtype=torch.float64)).log_softmax(0)
    assert (logps[0] - logps[1]).item() == pytest.approx(1 / (3 * beta), rel=1e-6)
    assert (logps[1] - logps[2]).item() == pytest.approx(1 / (3 * beta), rel=1e-6)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_dpo_collapses_on_deterministic_preferences(beta):
    """For every beta the loss falls towards 0 while the gap x of 0 and 2 grows without bound.

    By symmetry the inner gaps are x / 2, and dx/dt = (2 / 3) lr beta (s(-beta x / 2) + s(-beta x)). Soon
    exp(beta x / 2) grows linearly with the steps, so that 8 times as many add 2 log(8) / beta to the gap.
    """
    value, lr, start = ordered(sigmoid, beta), 4 / beta**2, torch.zeros(3, dtype=torch.float64)
    early = descend(value, start, steps=100, lr=lr)
    late = descend(value, early, steps=700, lr=lr)
    gaps = [(logits[0] - logits[2]).item() for logits in (early, late)]
    assert gaps[1] - gaps[0] == pytest.approx(2 * math.log(8) / beta, rel=0.05)
    assert value(late) < value(early) < 0.1
    assert gaps[1] > 5 * 2 / (3 * beta)  # IPO stops at 2 / (3 beta)


# ---- Robust DPO: Provably Robust DPO with Noisy Feedback, arXiv:2403.00409 -------------------------------------------


@given(eps=st.floats(0.0, 0.45), beta=st.floats(0.05, 3), seed=st.integers(0, 10**6))
def test_robust_dpo_is_unbiased(eps, beta, seed):
    """Lemma 3.1: over all 2^4 ways to flip four labels, the mean loss and its gradient are those of clean labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    winners, losers, ref_logps = [0, 1, 3, 4], [1, 2, 0, 2], uniform(5)

    def value(loss, flips, **hyper):
        w = [b if flip else a for a, b, flip in zip(winners, losers, flips, strict=True)]
        v = [a if flip else b for a, b, flip in zip(winners, losers, flips, strict=True)]
        return loss(pairs(logits.log_softmax(0), w, v), pairs(ref_logps, w, v), beta=beta, **hyper).loss.mean()

    clean = value(sigmoid, [False] * 4)
    expected = sum(
        eps ** sum(flips) * (1 - eps) ** (4 - sum(flips)) * value(robust, flips, label_smoothing=eps)
        for flips in itertools.product([False, True], repeat=4)
    )
    assert expected.item() == pytest.approx(clean.item(), rel=1e-9)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (clean, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("loss", "hyper"), [(sigmoid, {}), (robust, {"label_smoothing": 0.2})], ids=["dpo", "robust"])
def test_robust_dpo_finds_the_clean_optimum_on_noisy_data(loss, hyper):
    """Preferences of 0.9 seen through flips of 0.2 look like 0.9 * 0.8 + 0.1 * 0.2 = 0.74.

    DPO fits the gap logit(0.74) / beta, robust DPO the true logit(0.9) / beta.
    """
    beta, seen = 0.5, torch.tensor([0.74, 0.26], dtype=torch.float64)
    ref = pairs(uniform(2), [0, 1], [1, 0])

    def value(logits):
        return (seen * loss(pairs(logits.log_softmax(0), [0, 1], [1, 0]), ref, beta=beta, **hyper).loss).sum()

    logits = minimise(value, torch.zeros(2, dtype=torch.float64))
    expected = logit(0.9 if hyper else 0.74) / beta
    assert (logits[0] - logits[1]).item() == pytest.approx(expected, rel=1e-5)


# ---- Conservative DPO (Mitchell 2023): label smoothing ---------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.02, 0.1, 0.3])
def test_conservative_dpo_stops_at_its_log_odds(eps):
    """The gradient vanishes where s(beta gap) = 1 - eps, so at beta gap = log((1 - eps) / eps)."""
    beta, ref = 0.5, pairs(uniform(3), [0], [1])

    def value(logits):
        return sigmoid(pairs(logits.log_softmax(0), [0], [1]), ref, beta=beta, label_smoothing=eps).loss.sum()

    logits = minimise(value, torch.zeros(3, dtype=torch.float64))
    assert beta * (logits[0] - logits[1]).item() == pytest.approx(math.log((1 - eps) / eps), rel=1e-5)


# ---- f-DPO: Beyond Reverse KL, arXiv:2309.16240 ----------------------------------------------------------------------

_FUNCTIONS = {
    "reverse_kl": lambda u: u * u.log(),
    "forward_kl": lambda u: -u.log(),
    "js_divergence": lambda u: u * u.log() - (u + 1) * ((u + 1) / 2).log(),
    "alpha_divergence": lambda u: (u**0.5 - 0.5 * u - 0.5) / -0.25,
}


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_f_dpo_finds_the_policy_that_its_divergence_regularises(divergence):
    """Theorem 1: with the preferences of a reward r (Bradley-Terry), the minimum of the loss is the policy that
    maximises E[r] - beta D_f(policy || ref). That policy is sought here from f itself, without any pair."""
    beta = 1.0
    reward = torch.tensor([0.8, 0.0, -0.5], dtype=torch.float64)
    ref_logps = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    f = _FUNCTIONS[divergence]

    def regularised(logits):
        policy = logits.softmax(0)
        return beta * (ref_logps.exp() * f(policy / ref_logps.exp())).sum() - (policy * reward).sum()

    winners, losers = [0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]
    share = (reward[winners] - reward[losers]).sigmoid()
    ref = pairs(ref_logps, winners, losers)

    def value(logits):
        policy = pairs(logits.log_softmax(0), winners, losers)
        return (share * sigmoid(policy, ref, beta=beta, f_divergence_type=divergence).loss).sum()

    sought, found = (minimise(function, ref_logps).softmax(0) for function in (regularised, value))
    assert (sought - ref_logps.exp()).abs().max() > 0.05
    torch.testing.assert_close(found, sought, rtol=0, atol=1e-5)
