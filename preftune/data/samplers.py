"""The order of rows in an epoch, as a function of (seed, epoch) alone: a resumed run reads what it would have read.

Samplers here keep no generator: `set_epoch`, which accelerate calls, is all the state there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


def epoch_order(length: int, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """The rows 0..length-1 in the order of one epoch.

    Equal arguments give the equal order, whatever was drawn before; `shuffle=False` is 0, 1, 2, ...
    """
    if not shuffle:
        return list(range(length))
    # one number from two: epoch e of seed s must not be epoch e-1 of seed s+1
    generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + epoch * 0x85EBCA77) % 2**63)
    return torch.randperm(length, generator=generator).tolist()


class EpochSampler(Sampler):
    """Every row once an epoch, in `epoch_order`."""

    def __init__(self, data_source: Sized, seed: int, shuffle: bool = True) -> None:
        self.data_source = data_source
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return epoch_order(len(self.data_source), self.seed, self.epoch, self.shuffle)

    def __iter__(self) -> Iterator:
        return iter(self.order())

    def __len__(self) -> int:
        return len(self.data_source)
