"""How busy the rest of the machine was while something was timed. A noisy run is reported as one, not averaged away."""

from __future__ import annotations

import os
from pathlib import Path


def busy_seconds() -> float:
    """CPU seconds all processors spent at work so far (not idle, not waiting for a disk), stolen time included."""
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


class Noise:
    """Share of the machine's CPU time that others used between two points."""

    def __init__(self) -> None:
        self._start = busy_seconds()

    def share(self, own_cpu: float, wall: float) -> float:
        """Others' CPU time as a share of all there was (1.0: every core, all the time)."""
        others = busy_seconds() - self._start - own_cpu
        return max(0.0, others / (wall * (os.cpu_count() or 1)))
