"""`forked_random_states`: whatever draws random numbers inside leaves the global random states as they were.

Python's, NumPy's and torch's, and those of accelerators that are in use.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def forked_random_states(seed: int | None = None) -> Iterator[None]:
    """Restores all global random states however the block ends.

    Args:
        seed: Seeds the forked states, so that the block draws the same numbers each time. None goes on from the states
            outside, without moving them.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerators = [m for m in (torch.cuda, torch.xpu) if m.is_available() and m.is_initialized()]
    devices = [(module, module.get_rng_state_all()) for module in accelerators]
    try:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for module, states in devices:
            module.set_rng_state_all(states)
