"""Two-pass gradients equal the gradient of the loss on the whole step, also for losses that rank its rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.preference import PAIR_LOSSES
from preftune.trainers.coupled import coupled_pair_gradients
from preftune.types import PairScores

HYPER = {
    "beta": 0.3, "label_smoothing": 0.1, "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5,
    "discopop_tau": 0.05,
}  # fmt: skip


def scores(chosen: torch.Tensor, rejected: torch.Tensor) -> PairScores:
    ones = torch.ones_like(chosen)
    return PairScores(chosen, rejected, 3 * ones, 2 * ones, -chosen, torch.tensor(3.0))


@pytest.mark.parametrize("name", ["aot", "aot_unpaired", "sigmoid", "sft"])
@given(seed=st.integers(0, 1000), cut=st.integers(1, 4))
def test_equal_to_one_backward_over_all_rows(name, seed, cut):
    generator = torch.Generator().manual_seed(seed)
    leaf = torch.randn(4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    policy, ref = scores(leaf[0], leaf[1]), scores(leaf[2].detach(), leaf[3].detach())

    def loss(policy, ref):
        return PAIR_LOSSES[name](policy, ref, **HYPER)

    direct = loss(policy, ref).loss
    (expected,) = torch.autograd.grad(direct.sum(), leaf, retain_graph=True)
    parts = [slice(0, cut), slice(cut, 5)]

    def of(part, grad):
        rows = leaf if grad else leaf.detach()
        return scores(rows[0, part], rows[1, part]), scores(leaf[2, part].detach(), leaf[3, part].detach())

    gradients = coupled_pair_gradients([of(p, grad=False) for p in parts], loss)
    values = []
    for step, part in enumerate(parts):
        batch = {"row": torch.arange(part.stop - part.start), "micro_batch": step}
        values.append(gradients.surrogate(of(part, grad=True)[0], batch))
    (actual,) = torch.autograd.grad(torch.cat(values).sum(), leaf)
    assert torch.allclose(actual[:2], expected[:2])
    assert torch.allclose(torch.cat(values), direct)
