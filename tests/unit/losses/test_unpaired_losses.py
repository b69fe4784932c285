"""KTO and APO-zero on single rows: values and gradients by hand, class weights, what the baseline does.

With r = l - l_ref, the baseline z and the logistic function s, a loss is 1 - s(beta (r - z)) or 1 - s(beta (z - r)).
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.names import NEEDS_BASELINE, UNPAIRED_LOSS_NAMES
from preftune.losses.unpaired import UNPAIRED_LOSSES, class_weights, imbalance, kl_baseline

finite = st.floats(-30, 30)
betas = st.floats(0.01, 1.0)


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def losses(name, log_ratios, desirable, kl, beta):
    logps = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    ref = torch.full_like(logps, -3.0)
    baseline = torch.tensor(kl, dtype=torch.float64)
    return UNPAIRED_LOSSES[name](logps - 3.0, ref, torch.tensor(desirable), baseline, beta=beta).loss, logps


def test_values_by_hand():
    """r = 2 and -1, z = 0.5, beta = 0.4: 1 - s(0.6), 1 - s(0.4 * 1.5) = 1 - s(0.6) again for the undesirable one."""
    (good, bad), _ = losses("kto", [2.0, -1.0], [True, False], 0.5, 0.4)
    assert good.item() == pytest.approx(1 - s(0.6)) and bad.item() == pytest.approx(1 - s(0.6))
    (good, bad), _ = losses("apo_zero_unpaired", [2.0, -1.0], [True, False], 0.5, 0.4)
    assert good.item() == pytest.approx(1 - s(0.8)) and bad.item() == pytest.approx(s(-0.4))


def test_names():
    assert tuple(UNPAIRED_LOSSES) == UNPAIRED_LOSS_NAMES
    assert NEEDS_BASELINE.issubset(UNPAIRED_LOSS_NAMES)


@given(finite, st.floats(0, 30), betas)
def test_half_at_the_baseline_and_the_classes_mirror_each_other(r, kl, beta):
    at, _ = losses("kto", [kl, kl], [True, False], kl, beta)
    assert at.tolist() == pytest.approx([0.5, 0.5])
    (good, bad), _ = losses("kto", [r, r], [True, False], kl, beta)
    assert (good + bad).item() == pytest.approx(1.0)
    zero, _ = losses("kto", [r, -r], [True, False], 0.0, beta)
    apo, _ = losses("apo_zero_unpaired", [r, -r], [True, False], kl, beta)
    assert apo.tolist() == pytest.approx(zero.tolist())


@given(finite, st.floats(0, 30), betas, st.booleans(), st.floats(0.1, 5))
def test_gradient_sign_and_size(r, kl, beta, desirable, weight):
    """d loss / d l = -+ weight beta s (1 - s): desirable rows go up, others down, most where r is near z."""
    (loss,), logps = losses("kto", [r], [desirable], kl, beta)
    (loss * class_weights(torch.tensor([desirable]), desirable_weight=weight, undesirable_weight=weight)[0]).backward()
    assert logps.grad is not None
    at = s(beta * (r - kl))
    wanted = (-1 if desirable else 1) * weight * beta * at * (1 - at)
    assert logps.grad.item() == pytest.approx(wanted, rel=1e-5, abs=1e-12)


def net_push(desirable: int, undesirable: int, **weights: float) -> tuple[float, float]:
    """Pull up and push down, summed over rows that stand at the baseline."""
    labels = [True] * desirable + [False] * undesirable
    row_losses, logps = losses("kto", [0.0] * len(labels), labels, 0.0, 0.1)
    (row_losses * class_weights(torch.tensor(labels), **weights)).sum().backward()
    assert logps.grad is not None
    return -logps.grad[:desirable].sum().item(), logps.grad[desirable:].sum().item()


@pytest.mark.parametrize(("desirable", "undesirable"), [(8, 2), (2, 8), (5, 5), (90, 1)])
def test_weights_in_the_recommended_range_balance_the_classes(desirable, undesirable):
    """arXiv:2402.01306: with n_D to n_U rows, weights keep the pull up at 1 to 4/3 of the push down.

    Without weights the larger class wins by n_D / n_U.
    """
    up, down = net_push(desirable, undesirable, desirable_weight=1.0, undesirable_weight=1.0)
    assert up / down == pytest.approx(desirable / undesirable)
    for ratio in (1.0, 1.2, 4 / 3):
        weight = desirable / undesirable / ratio
        up, down = net_push(desirable, undesirable, desirable_weight=1.0, undesirable_weight=weight)
        assert up / down == pytest.approx(ratio, rel=1e-6)
        assert imbalance(desirable, undesirable, undesirable_weight=weight) is None


def test_imbalance_says_what_to_set():
    text = imbalance(8, 2)
    assert text is not None and "8 desirable and 2 undesirable rows" in text
    assert "undesirable_weight in [3.00, 4.00]" in text and "desirable_weight in [0.25, 0.33]" in text
    assert "1 to 4/3" in text
    assert "desirable_weight in [8.00, 10.67]" in str(imbalance(2, 8, undesirable_weight=2.0))
    assert imbalance(1000, 1001) is None
    assert "without undesirable (label false) rows" in str(imbalance(8, 0))
    assert "without desirable (label true) rows" in str(imbalance(0, 8))
    assert "undesirable_weight=0" in str(imbalance(8, 2, undesirable_weight=0.0))


def test_class_weights():
    weights = class_weights(torch.tensor([True, False, True]), desirable_weight=2.0, undesirable_weight=0.5)
    assert weights.tolist() == [2.0, 0.5, 2.0]


def test_baseline():
    x = torch.tensor([3.0, -1.0], requires_grad=True)
    kl = kl_baseline(x.sum(), 2)
    assert kl.item() == 1.0 and not kl.requires_grad
    assert kl_baseline(torch.tensor(-4.0), 2).item() == 0.0
    assert math.isnan(kl_baseline(torch.tensor(float("nan")), 2).item())
