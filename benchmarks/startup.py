"""What importing and asking for help cost: CPU seconds and wall seconds of fresh processes, in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environments import worker_environment
from benchmarks.setup import Setup

PACKAGES = {"ours": "preftune", "trl": "trl"}


def commands(side: str, python: Path) -> dict[str, list[str]]:
    """What is timed, by a name that both sides share; a console script that is not installed is left out."""
    package = PACKAGES[side]
    script = python.parent / package
    timed = {
        "python alone": [str(python), "-c", "pass"],
        "import the package": [str(python), "-c", f"import {package}"],
        "import DPOTrainer": [str(python), "-c", f"from {package} import DPOTrainer"],
    }
    if script.exists():
        timed |= {"--help": [str(script), "--help"], "dpo --help": [str(script), "dpo", "--help"]}
    return timed


def cost(command: list[str], environment: dict[str, str], folder: Path) -> tuple[float, float]:
    """(CPU, wall) seconds of a command and everything it waited for.

    Raises:
        RuntimeError: the command failed; its output is in the message.
    """
    start, before = time.perf_counter(), os.times()
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, wall


def measure(setup: Setup, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` of every command of every side; the first, untimed round fills the page cache."""
    print("bench: start-up times", file=sys.stderr, flush=True)
    environment = worker_environment(setup.threads, setup.cache)
    timed = {(side, name): c for side, python in setup.pythons.items() for name, c in commands(side, python).items()}
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in timed}
    for i in range(repeats + 1):
        for key, command in timed.items():
            spent = cost(command, environment, setup.cache)
            if i > 0:
                taken[key].append(spent)
    result: dict[str, Any] = {side: {} for side in setup.pythons}
    for (side, name), spent in taken.items():
        result[side][name] = {"cpu": median(c for c, _ in spent), "wall": median(w for _, w in spent)}
    return {"sides": result, "repeats": repeats}
