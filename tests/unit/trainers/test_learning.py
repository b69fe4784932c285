"""Log-probabilities of a round: the sampler's serve as the old ones exactly where they are the policy's own."""

from __future__ import annotations

import numpy as np
import pytest

from preftune.trainers.learning import AGREEMENT, with_logps
from tests.unit.trainers.test_groups import group


def drawn(error: float):
    """Two groups of two completions whose sampler was off by `error`, and a scorer that keeps what it was asked."""
    groups = [group([7], [[1, 2], [3]]), group([8], [[4], [5, 6, 7]], start=2)]
    truth = {n: values + 0.5 for g in groups for n, values in zip(g.numbers, g.logps["old"], strict=True)}
    given = [{"sampler": [truth[n] + error for n in g.numbers]} for g in groups]
    asked = []

    def score(some, reference):
        asked.append((len(some), reference))
        return {n: truth[n] - (reference is not None) for g in some for n in g.numbers}

    bare = [type(g)(**{**vars(g), "logps": logps}) for g, logps in zip(groups, given, strict=True)]
    return bare, truth, score, asked


@pytest.mark.parametrize(
    ("error", "trusts", "passes"), [(0.0, True, [1]), (2 * AGREEMENT, True, [1, 2]), (0.0, False, [2])]
)
def test_the_samplers_log_probs_serve_where_they_agree(error, trusts, passes):
    """One group is looked at; only where it does not agree, or cannot, is the whole round scored."""
    groups, truth, score, asked = drawn(error)
    found = with_logps(groups, score, old=True, reference=None, trusts_sampler=trusts)
    assert [count for count, _ in asked] == passes
    for g in found:
        for n, values in zip(g.numbers, g.logps["old"], strict=True):
            assert values == pytest.approx(truth[n], abs=AGREEMENT)


def test_ranks_decide_together():
    """This rank's sampler agrees; another's does not, and then all score, or a sharded forward would wait for ever."""
    groups, _, score, asked = drawn(0.0)
    said = []

    def everywhere(mine):
        said.append(mine)
        return mine and len(said) == 1

    with_logps(groups, score, old=True, reference=None, trusts_sampler=True, everywhere=everywhere)
    assert said == [True, True] and [count for count, _ in asked] == [1, 2]


def test_what_is_not_asked_for_is_not_scored():
    groups, truth, score, asked = drawn(0.0)
    same = with_logps(groups, score, old=False, reference=None, trusts_sampler=True)
    assert asked == [] and all("old" not in g.logps for g in same)
    reference = object()
    referred = with_logps(groups, score, old=False, reference=reference, trusts_sampler=True)
    assert asked == [(2, reference)]
    assert all(np.allclose(g.logps["ref"][0], truth[g.numbers[0]] - 1) for g in referred)
