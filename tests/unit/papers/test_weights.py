"""What papers prove of weights on tokens and pairs: WPO and LD-DPO, from token log-probabilities written by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.losses.preference import PAIR_LOSSES
from preftune.losses.reduce import pair_scores, wpo_weights
from preftune.types import TokenScores


def scores_of(logits_TV: torch.Tensor, tokens: list[int], branches: list[int]) -> TokenScores:
    logps_TV = logits_TV.log_softmax(-1)
    return TokenScores(
        logps_TV.gather(1, torch.tensor(tokens)[:, None]).squeeze(1),
        torch.tensor(branches),
        max(branches) + 1,
        log_sum_sq_probs=(2 * logps_TV).logsumexp(-1),
    )


@given(seed=st.integers(0, 10**6))
def test_wpo_weighs_what_the_policy_would_say_by_one(seed):
    """Sampled alignment (arXiv:2406.11827, section 3): p(y) / sum_v p(v)^2 has the mean 1 over y drawn from p.

    A weight of two tokens is the geometric mean of theirs.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 7, dtype=torch.float64, generator=generator)
    probs = logits.softmax(-1).squeeze(0)
    weights = torch.stack([wpo_weights(scores_of(logits, [v], [0])) for v in range(7)]).squeeze(1)
    torch.testing.assert_close((probs * weights).sum(), torch.ones((), dtype=torch.float64))
    both = wpo_weights(scores_of(logits.repeat(2, 1), [2, 5], [0, 0]))
    torch.testing.assert_close(both.squeeze(0), (weights[2] * weights[5]).sqrt())


@given(seed=st.integers(0, 10**6), lengths=st.tuples(st.integers(1, 6), st.integers(1, 6)), beta=st.floats(0.05, 2))
def test_ld_dpo_is_dpo_at_one_and_blind_to_the_tail_at_zero(seed, lengths, beta):
    """arXiv:2409.06411, section 4: alpha = 1 is DPO; alpha = 0 compares the tokens up to the shorter length alone."""
    generator = torch.Generator().manual_seed(seed)
    count, common = sum(lengths), min(lengths)
    branches = [0] * lengths[0] + [1] * lengths[1]
    policy, ref, other = (-torch.rand(3, count, dtype=torch.float64, generator=generator)).unbind()

    def loss(logps, ld_alpha):
        scored = [pair_scores(TokenScores(x, torch.tensor(branches), 2), ld_alpha=ld_alpha) for x in (logps, ref)]
        return PAIR_LOSSES["sigmoid"](*scored, beta=beta).loss

    torch.testing.assert_close(loss(policy, 1.0), loss(policy, None))
    place = torch.cat([torch.arange(n) for n in lengths])
    torch.testing.assert_close(loss(torch.where(place < common, policy, other), 0.0), loss(policy, 0.0))
