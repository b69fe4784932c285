"""Sampler corrections and the off-policy mask against hand values; missing log-probabilities change nothing.

NaN is what an engine gives for a token that it did not draw.
"""

from __future__ import annotations

import math

import pytest
import torch

from preftune.errors import ConfigError
from preftune.losses.importance import off_policy_keep, ratio, sampler_gap, sampler_ratio
from preftune.losses.names import SAMPLER_CORRECTIONS

NAN = math.nan
LOG2 = math.log(2)


def gaps() -> torch.Tensor:
    """Gaps ln 2, ln 4 | -ln 2, masked; the product of a row is 8 and 1/2."""
    old = torch.tensor([[-1.0, -1.0], [-3.0, -1.0]], dtype=torch.float64)
    sampler = torch.tensor([[-1.0 - LOG2, -1.0 - 2 * LOG2], [-3.0 + LOG2, -9.0]], dtype=torch.float64)
    return sampler_gap(old, sampler, torch.tensor([[1, 1], [1, 0]]))


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("token_truncate", None, 3.0, [[2, 3], [0.5, 1]]),
        ("token_truncate", 0.7, 3.0, [[2, 3], [0.7, 1]]),
        ("token_mask", None, 3.0, [[2, 0], [0.5, 1]]),
        ("token_mask", 0.7, None, [[2, 4], [0, 1]]),
        ("sequence_truncate", None, 3.0, [[3], [0.5]]),
        ("sequence_mask", None, 3.0, [[0], [0.5]]),
        ("sequence_mask", 0.7, 9.0, [[8], [0]]),
        ("sequence_mask", None, None, [[8], [0.5]]),
    ],
)
def test_corrections_by_hand(mode, low, high, expected):
    got = sampler_ratio(gaps(), mode=mode, clip_min=low, clip_max=high)
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("mode", SAMPLER_CORRECTIONS)
def test_agreement_or_nothing_known_gives_one(mode):
    old = torch.tensor([[-1.0, -2.0, 5.0]])
    for sampler in (old, torch.full_like(old, NAN)):
        got = sampler_ratio(sampler_gap(old, sampler, torch.tensor([[1, 1, 0]])), mode=mode, clip_max=3.0)
        assert torch.equal(got, torch.ones_like(got))


def test_unknown_mode_and_level():
    with pytest.raises(ConfigError, match="Did you mean 'sequence_mask'"):
        sampler_ratio(gaps(), mode="sequence_masks")
    with pytest.raises(ConfigError, match="Did you mean 'sequence'"):
        ratio(gaps(), torch.ones(2, 2), "sequences")


def test_off_policy_rows_by_hand():
    """Mean distance log p_sampler - log p over scored tokens: 1, 1, 0.25, NaN counts as 0 (mean 0.5 of 1 and NaN)."""
    logps = torch.tensor([[-2.0, -3.0], [-2.0, -3.0], [-1.0, -9.0], [-2.0, -2.0]])
    sampler = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-0.75, -1.0], [-1.0, NAN]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    got = off_policy_keep(logps, sampler, advantages, mask, threshold=0.6)
    assert got.tolist() == [[False], [True], [True], [True]]
    assert off_policy_keep(logps, sampler, advantages, mask, threshold=0.4).tolist() == [
        [False],
        [True],
        [True],
        [False],
    ]
