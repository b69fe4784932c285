"""Every online loss against a float64 loop over tokens, its gradient, what padding does to it, and extreme inputs.

The loops are in `policy_loops`; hand values are derived in the docstrings.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.errors import ConfigError
from preftune.losses.names import IMPORTANCE_LEVELS, POLICY_LOSS_NAMES
from preftune.losses.policy_gradient import CISPO_CAP, POLICY_LOSSES, policy_loss, rloo
from tests.unit.losses.policy_loops import Case, finite_differences, loop_losses, padded, phi, random_case, token_ratios

CLIPPING = [name for name in POLICY_LOSS_NAMES if name not in ("cispo", "sapo", "vespo")]
PAIRS = [
    (name, level) for name in POLICY_LOSS_NAMES for level in IMPORTANCE_LEVELS if (name, level) != ("vespo", "sequence")
]


def test_every_name_has_a_loss():
    assert tuple(POLICY_LOSSES) == POLICY_LOSS_NAMES


def rows_of(values: torch.Tensor, case: Case) -> list[list[float]]:
    return [row[: len(logps)].tolist() for row, logps in zip(values, case.logps, strict=True)]


def close(got: list[list[float]], expected: list[list[float]], tolerance: float = 1e-9) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name, level", PAIRS)
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"epsilon": 0.1, "epsilon_high": 0.28},
        {"epsilon_high": 1.1, "delta": 1.3},
        {"beta": 0.3},
        {"beta": 0.3, "correct_kl": False},
    ],
    ids=str,
)
def test_equals_the_loop(name, level, hyper):
    for seed in range(4):
        case = random_case(seed)
        logps, old, ref, advantages, mask = case.tensors()
        options = {key: value for key, value in hyper.items() if key != "correct_kl"}
        got = policy_loss(
            logps, old, ref, advantages, mask, loss_type=name, importance_sampling_level=level,
            use_bias_correction_kl=hyper.get("correct_kl", True), **options,
        )  # fmt: skip
        close(rows_of(got.loss, case), loop_losses(name, case, level=level, **hyper))


@pytest.mark.parametrize("name", POLICY_LOSS_NAMES)
def test_masks_and_sampler_correction_equal_the_loop(name):
    """They act on the surrogate alone, not on the KL; VESPO takes the correction into its own ratio."""
    case = random_case(11)
    draw = torch.Generator().manual_seed(3)
    shape = padded(case.scored, 6, 0.0).shape
    keep, sampler = (
        torch.rand(shape, generator=draw) < 0.6,
        0.5 + torch.rand(shape, generator=draw, dtype=torch.float64),
    )
    logps, old, ref, advantages, mask = case.tensors()
    got = policy_loss(
        logps, old, ref, advantages, mask, loss_type=name, beta=0.2, keep=keep, sampler_ratio=sampler
    )  # fmt: skip
    close(
        rows_of(got.loss, case),
        loop_losses(name, case, beta=0.2, keep=keep.double().tolist(), sampler=sampler.tolist()),
    )


@pytest.mark.parametrize("name, level", [pair for pair in PAIRS if pair[0] not in ("cispo", "vespo")])
def test_gradient_equals_finite_differences(name, level):
    case = random_case(5)
    logps, old, ref, advantages, mask = case.tensors()
    options = {"epsilon": 0.15, "delta": 1.4, "beta": 0.1}
    policy_loss(
        logps, old, ref, advantages, mask, loss_type=name, importance_sampling_level=level, **options
    ).loss.sum().backward()
    expected = finite_differences(case, lambda c: sum(map(sum, loop_losses(name, c, level=level, **options))))
    close(rows_of(logps.grad, case), expected, 1e-6)


@pytest.mark.parametrize("name", ["cispo", "vespo"])
def test_gradient_with_a_stopped_weight(name):
    """The weight is a constant: the gradient of a token is minus weight times advantage."""
    case = random_case(6, spread=1.5)
    logps, old, _, advantages, mask = case.tensors()
    policy_loss(logps, old, None, advantages, mask, loss_type=name, epsilon_high=1.2).loss.sum().backward()
    ratios = token_ratios(case, "token")
    expected = [
        [
            -m * case.advantages[b] * (min(w, 1.2) if name == "cispo" else phi(case, b, {}))
            for w, m in zip(ratios[b], case.scored[b], strict=True)
        ]
        for b in range(len(ratios))
    ]
    close(rows_of(logps.grad, case), expected)


@pytest.mark.parametrize("given_old", [True, False])
@pytest.mark.parametrize("name, level", PAIRS)
def test_on_policy_gradient(name, level, given_old):
    """old = policy: the gradient of the summed loss is -A at each scored token, for every loss and level."""
    case = random_case(7)
    logps, _, _, advantages, mask = case.tensors()
    old = logps.detach().clone() if given_old else None
    output = policy_loss(logps, old, None, advantages, mask, loss_type=name, importance_sampling_level=level)
    output.loss.sum().backward()
    expected = [[-a * m for m in row] for a, row in zip(case.advantages, case.scored, strict=True)]
    close(rows_of(logps.grad, case), expected)
    if name in CLIPPING:
        close(rows_of(output.loss, case), expected)
        assert all(values.max() == 0 for values in output.metrics.values())


@pytest.mark.parametrize("name, level", PAIRS)
@pytest.mark.parametrize("fill", [0.0, -1e9, math.inf, math.nan])
def test_padding_changes_nothing(name, level, fill):
    """trl#6654: whatever stands in the padding, and however wide it is."""
    case = random_case(8)
    results = []
    for width, value in ((6, 0.0), (20, fill)):
        logps, old, ref, advantages, mask = case.tensors(width, value)
        output = policy_loss(
            logps, old, ref, advantages, mask, loss_type=name, importance_sampling_level=level, beta=0.1
        )
        output.loss.sum().backward()
        assert output.loss[:, 6:].abs().sum() == 0 and logps.grad[:, 6:].abs().sum() == 0
        results.append((rows_of(output.loss, case), rows_of(logps.grad, case)))
    assert results[0] == results[1]


@pytest.mark.parametrize("gap", [-1e6, -100.0, -21.0, 21.0, 100.0, 1e6])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name, level", [*PAIRS, ("rloo", "sequence")])
def test_extreme_ratios_stay_finite(name, level, sign, gap):
    logps = torch.full((1, 3), -0.5, requires_grad=True)
    inputs = (torch.tensor([sign]), torch.ones(1, 3))
    if name == "rloo":
        output = rloo(logps, logps.detach() - gap, *inputs)
    else:
        output = policy_loss(
            logps, logps.detach() - gap, logps.detach() + gap, *inputs, loss_type=name,
            importance_sampling_level=level, beta=0.1,
        )  # fmt: skip
    output.loss.sum().backward()
    assert output.loss.isfinite().all() and logps.grad.isfinite().all()


def test_one_token_makes_both_levels_one():
    """GSPO with one token a completion is GRPO."""
    case = random_case(9, lengths=(1, 1, 1, 1, 1))
    token, sequence = (
        policy_loss(
            *case.tensors()[:3], *case.tensors()[3:], loss_type="grpo", importance_sampling_level=level, beta=0.1
        )
        for level in IMPORTANCE_LEVELS
    )
    assert torch.equal(token.loss, sequence.loss)
    assert {k: v.flatten().tolist() for k, v in token.metrics.items()} == {
        k: v.flatten().tolist() for k, v in sequence.metrics.items()
    }


def test_two_sided_clip_by_hand():
    """Ratios e^1, A = -1: one-sided the loss is e = 2.718, with delta 1.5 it is 1.5 and has no gradient."""
    for delta, value, slope in ((None, math.e, math.e), (1.5, 1.5, 0.0)):
        logps = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
        output = policy_loss(logps, logps.detach() - 1, None, torch.tensor([-1.0]), torch.ones(1, 1), delta=delta)
        output.loss.sum().backward()
        assert output.loss.item() == pytest.approx(value) and logps.grad.item() == pytest.approx(slope)


def test_cispo_does_not_shrink_updates_by_default():
    """The cap is on the ratio: at ratio 1 the full gradient, at ratio 10 five times it."""
    for gap, weight in ((0.0, 1.0), (math.log(10), CISPO_CAP), (math.log(0.5), 0.5)):
        logps = torch.tensor([[-1.0]], requires_grad=True)
        policy_loss(
            logps, logps.detach() - gap, None, torch.tensor([2.0]), torch.ones(1, 1), loss_type="cispo"
        ).loss.sum().backward()
        assert logps.grad.item() == pytest.approx(-2 * weight, rel=1e-6)


def test_clip_metrics_by_hand():
    """Epsilon 0.2. Row 0, A = 1: ratios 1, 1.5, 0.5: one of three high. Row 1, A = -1: 0.5, 1: one of two low."""
    ratios = torch.tensor([[1.0, 1.5, 0.5], [0.5, 1.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    logps = torch.zeros(2, 3, dtype=torch.float64)
    metrics = policy_loss(logps, -ratios.log(), None, torch.tensor([1.0, -1.0]), mask).metrics
    assert metrics["clip_ratio/high_mean"].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert metrics["clip_ratio/low_mean"].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert metrics["clip_ratio/region_mean"].tolist() == [[0, 1, 0], [1, 0, 0]]
    assert metrics["clip_ratio/high_max"].tolist() == pytest.approx([1 / 3, 0])
    assert metrics["clip_ratio/low_min"].tolist() == pytest.approx([0, 1 / 2])


def test_metrics_have_a_value_a_token_or_a_row():
    case = random_case(2)
    inputs = case.tensors()
    for name, level in PAIRS:
        output = policy_loss(*inputs, loss_type=name, importance_sampling_level=level, beta=0.1)
        for key, values in output.metrics.items():
            assert values.shape in (inputs[0].shape, inputs[3].shape), (name, level, key)
            assert not values.requires_grad and values.isfinite().all()
        assert "kl" in output.metrics


def test_advantages_may_differ_by_token_and_carry_no_gradient():
    case = random_case(3)
    logps, old, _, advantages, mask = case.tensors()
    advantages.requires_grad_(True)
    rowwise = policy_loss(logps, old, None, advantages, mask)
    tokenwise = policy_loss(logps, old, None, advantages[:, None].expand_as(logps), mask)
    assert torch.equal(rowwise.loss, tokenwise.loss)
    rowwise.loss.sum().backward()
    assert advantages.grad is None


def test_half_precision_is_computed_in_float32():
    logps = torch.full((1, 2), -1.0, dtype=torch.bfloat16)
    for name in POLICY_LOSS_NAMES:
        assert (
            policy_loss(logps, None, logps, torch.ones(1), torch.ones(1, 2), loss_type=name, beta=1.0).loss.dtype
            == torch.float32
        )


def test_refusals():
    inputs = random_case(1).tensors()
    with pytest.raises(ConfigError, match="Did you mean 'dapo'"):
        policy_loss(*inputs, loss_type="dap0")
    with pytest.raises(ConfigError, match="Did you mean 'token'"):
        policy_loss(*inputs, importance_sampling_level="tokens")
    with pytest.raises(ValueError, match="ref_logps_BT is None"):
        policy_loss(inputs[0], inputs[1], None, *inputs[3:], beta=0.1)


@given(st.integers(0, 2**32))
def test_rloo_equals_the_loop(seed):
    """-min(W A, clip(W) A) with W = exp of the summed log-ratio of the scored tokens."""
    case = random_case(seed, spread=0.2)
    logps, old, _, advantages, mask = case.tensors()
    output = rloo(logps, old, advantages, mask, epsilon=0.1, epsilon_high=0.3)
    output.loss.sum().backward()
    for b, advantage in enumerate(case.advantages):
        W = math.exp(sum((n - o) * m for n, o, m in zip(case.logps[b], case.old[b], case.scored[b], strict=True)))
        clipped = max(0.9, min(1.3, W))
        assert output.loss[b].item() == pytest.approx(-min(W * advantage, clipped * advantage))
        slope = -W * advantage if W * advantage <= clipped * advantage else 0.0
        assert logps.grad[b, : len(case.logps[b])].tolist() == pytest.approx([slope * m for m in case.scored[b]])
        assert output.metrics["clip_ratio/high_mean"][b] == float(W > 1.3 and advantage > 0)


def test_rloo_on_policy():
    case = random_case(4)
    logps, _, _, advantages, mask = case.tensors()
    rloo(logps, None, advantages, mask).loss.sum().backward()
    close(rows_of(logps.grad, case), [[-a * m for m in r] for a, r in zip(case.advantages, case.scored, strict=True)])
