"""Policy gradients by enumeration: every completion of two tokens, every group of them, nothing sampled.

What is compared with is autograd of the expected reward J = sum_y p(y) R(y), which knows nothing of the losses.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from preftune.losses.advantages import group_advantages, leave_one_out
from preftune.losses.aggregate import REDUCTION_OF
from preftune.losses.names import POLICY_LOSS_NAMES
from preftune.losses.policy_gradient import policy_loss, rloo

REWARDS = {2: [3.0, 4.0, 6.0, 3.5], 3: [0.0, 1.0, -2.0, 0.5, 3.0, 1.0, 1.0, -1.0, 2.0]}


class TinyPolicy:
    """All completions of two tokens: a first token from logits `[V]`, a second from logits `[V, V]` of the first."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        size = vocabulary + vocabulary**2
        self.theta = torch.randn(size, generator=draw, dtype=torch.float64).requires_grad_(True)
        self.vocabulary = vocabulary
        self.completions = list(itertools.product(range(vocabulary), repeat=2))
        self.rewards = torch.tensor(REWARDS[vocabulary], dtype=torch.float64)

    @property
    def logps(self) -> Tensor:
        """`[V * V, 2]` token log-probabilities of every completion."""
        first = self.theta[: self.vocabulary].log_softmax(0)
        second = self.theta[self.vocabulary :].reshape(self.vocabulary, -1).log_softmax(1)
        return torch.stack([torch.stack([first[a], second[a, b]]) for a, b in self.completions])

    @property
    def probs(self) -> Tensor:
        return self.logps.sum(-1).exp()

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.theta)[0]

    @property
    def true_gradient(self) -> Tensor:
        return self.gradient((self.probs * self.rewards).sum())


def mask_of(logps: Tensor) -> Tensor:
    return torch.ones_like(logps)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", POLICY_LOSS_NAMES)
@pytest.mark.parametrize("baseline", [0.0, 1.7])
def test_expected_gradient_of_every_loss_is_that_of_the_expected_reward(name, level, baseline):
    """sum_y p(y) grad loss(y) = -c grad J with A = R - baseline, for whatever baseline.

    c is what the reduction makes of a completion of two tokens: a sum (luspo) 1, a mean 1/2, a constant 1/8.
    """
    policy = TinyPolicy(3)
    total = torch.zeros_like(policy.theta)
    for index, prob in enumerate(policy.probs.detach()):
        logps = policy.logps[[index]]
        output = policy_loss(
            logps, None, None, policy.rewards[[index]] - baseline, mask_of(logps), loss_type=name,
            importance_sampling_level=level,
        )  # fmt: skip
        loss = REDUCTION_OF[name](output.loss, mask_of(logps), rows=1, tokens=2, max_completion_length=8)
        total += prob * policy.gradient(loss)
    factor = {"luspo": 1.0, "dr_grpo": 1 / 8}.get(name, 1 / 2)
    torch.testing.assert_close(total, -factor * policy.true_gradient, rtol=1e-9, atol=1e-12)


def group_gradients(policy: TinyPolicy, size: int, advantages, loss) -> list[tuple[float, Tensor]]:
    """For every ordered group of completions: its probability, and minus the gradient of its mean loss."""
    probs = policy.probs.detach()
    result = []
    for group in itertools.product(range(len(policy.completions)), repeat=size):
        logps = policy.logps[list(group)]
        output = loss(logps, None, advantages(policy.rewards[list(group)][None])[0], mask_of(logps))
        per_row = output.loss if output.loss.ndim == 1 else output.loss.sum(-1)
        result.append((probs[list(group)].prod().item(), -policy.gradient(per_row.mean())))
    return result


def mean_and_variance(weighted: list[tuple[float, Tensor]]) -> tuple[Tensor, float]:
    mean = sum((p * g for p, g in weighted), torch.zeros_like(weighted[0][1]))
    return mean, sum(p * (g - mean).square().sum().item() for p, g in weighted)


def grpo_rows(logps, old, advantages, mask):
    return policy_loss(logps, old, None, advantages, mask, loss_type="luspo", importance_sampling_level="sequence")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_rloo_is_unbiased_and_quieter_than_reinforce(size, seed):
    """Two tokens of vocabulary, all groups. REINFORCE: the rewards themselves as advantages."""
    policy = TinyPolicy(2, seed)
    mean, variance = mean_and_variance(group_gradients(policy, size, leave_one_out, rloo))
    torch.testing.assert_close(mean, policy.true_gradient, rtol=1e-9, atol=1e-12)
    plain_mean, plain_variance = mean_and_variance(group_gradients(policy, size, lambda r: r, rloo))
    torch.testing.assert_close(plain_mean, policy.true_gradient, rtol=1e-9, atol=1e-12)
    assert variance < 0.5 * plain_variance


@pytest.mark.parametrize("size", [2, 3])
def test_grpo_without_scaling_is_rloo_times_g_minus_1_over_g(size):
    """Group by group, and so in the mean: grad J (G - 1) / G. The baseline's own sample makes the difference."""
    policy = TinyPolicy(2)
    grpo = group_gradients(policy, size, lambda r: group_advantages(r, scale="none"), grpo_rows)
    for (_, one), (_, other) in zip(grpo, group_gradients(policy, size, leave_one_out, rloo), strict=True):
        torch.testing.assert_close(one, other * (size - 1) / size, rtol=1e-9, atol=1e-12)
    mean, _ = mean_and_variance(grpo)
    torch.testing.assert_close(mean, policy.true_gradient * (size - 1) / size, rtol=1e-9, atol=1e-12)


def test_rloo_off_policy_is_unbiased_without_the_clip():
    """Completions of another policy, weighted by their ratio: E_old[grad W A] = grad J."""
    policy, old = TinyPolicy(3, seed=0), TinyPolicy(3, seed=1)
    total = torch.zeros_like(policy.theta)
    for index, prob in enumerate(old.probs.detach()):
        logps = policy.logps[[index]]
        output = rloo(logps, old.logps[[index]].detach(), policy.rewards[[index]], mask_of(logps), epsilon=1e6)
        total += prob * policy.gradient(output.loss.sum())
    torch.testing.assert_close(total, -policy.true_gradient, rtol=1e-9, atol=1e-12)


def test_the_clip_stops_what_has_moved_enough():
    """Off-policy, a token beyond its bound has no gradient; the others keep theirs (epsilon 0.2)."""
    policy = TinyPolicy(3)
    logps = policy.logps.detach().requires_grad_(True)
    shift = torch.tensor([[0.5, -0.1]] * 9, dtype=torch.float64)  # ratios 1.65 and 0.90
    output = policy_loss(logps, logps.detach() - shift, None, torch.ones(9), mask_of(logps), loss_type="dr_grpo")
    output.loss.sum().backward()
    assert logps.grad is not None
    assert logps.grad[:, 0].abs().max() == 0
    torch.testing.assert_close(logps.grad[:, 1], -shift[:, 1].exp())
