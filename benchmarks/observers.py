"""All observers on a trainer of ours, and what each of them costs: the time of every hook, and the CPU time of threads.

The generation that is asked for (and the scoring of what came) is timed apart: a user chooses how much of it there is.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from preftune.callbacks.completions import LogCompletionsCallback
from preftune.callbacks.health import HealthCallback
from preftune.callbacks.jsonl_log import JsonlLogCallback
from preftune.callbacks.progress import RichProgressCallback
from preftune.callbacks.trackers.base import Tracker, TrackerQueue
from preftune.callbacks.trackers.choose import default_trackers
from preftune.trainers.manifest import RunManifest

PROMPTS, ANSWER_TOKENS, EVERY = 4, 32, 5
"""Completions: so many prompts, of so many tokens, after every so many steps."""
TABLE_SECONDS = 0.2
COLUMNS = 120  # of the terminal
OUR_THREADS = "preftune-"
_HOOKS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class SlowTracker(Tracker):
    """Stands in for a service where none is installed: each table takes `TABLE_SECONDS`."""

    name = "stand-in"

    def log_scalars(self, scalars: Any, step: int) -> None:
        """Nothing, as all trackers but `jsonl`."""

    def log_table(self, name: str, rows: Any, step: int) -> None:
        time.sleep(TABLE_SECONDS)

    def close(self) -> None:
        """Nothing is pending."""


class HookClock:
    """Seconds in the hooks of callbacks, by class, since they were last taken; generation apart.

    Args:
        callbacks: Those whose hooks are timed from now on.
        asked_for: Of one of them, the part that is not counted as its cost: `(object, name of the method)`.
    """

    def __init__(self, callbacks: Iterable[Any], asked_for: tuple[Any, str] | None = None) -> None:
        self._hooks: dict[str, float] = {}
        self._apart = 0.0
        self._cpu = thread_seconds()
        for callback in callbacks:
            self._hooks.setdefault(type(callback).__name__, 0.0)
            for name in _HOOKS:
                vars(callback)[name] = self._timed(type(callback).__name__, getattr(callback, name))
        if asked_for is not None:
            owner, name = asked_for
            setattr(owner, name, self._aside(getattr(owner, name)))

    def take(self) -> dict[str, Any]:
        """`hooks` by callback, `generation`, and `threads`: CPU seconds of our background threads."""
        cpu = thread_seconds()
        taken = {"hooks": dict(self._hooks), "generation": self._apart, "threads": max(0.0, cpu - self._cpu)}
        self._hooks, self._apart, self._cpu = dict.fromkeys(self._hooks, 0.0), 0.0, cpu
        return taken

    def _timed(self, owner: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, apart = time.perf_counter(), self._apart
            try:
                return hook(*args, **kwargs)
            finally:
                self._hooks[owner] += time.perf_counter() - start - (self._apart - apart)

        return timed

    def _aside(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._apart += time.perf_counter() - start

        return timed


def thread_seconds() -> float:
    """CPU seconds of this process's threads that draw and write for observers."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(OUR_THREADS)]
    return sum(_cpu_seconds(thread.native_id) for thread in ours)


def _cpu_seconds(thread: int | None) -> float:
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):  # it has just ended, or the kernel does not count
        return 0.0


def unwatch(trainer: Any) -> None:
    """Takes off all that only looks on, also what is on by itself."""
    for kind in (JsonlLogCallback, RunManifest, PrinterCallback):
        trainer.remove_callback(kind)


def watch(trainer: Any, rows: Any, output: Path) -> tuple[HookClock, list[str]]:
    """Puts every observer on: a live panel, logs as JSON lines, manifest, health, completions to a tracker.

    Args:
        rows: Has the prompts of the completions.
        output: Where a tracker may write.

    Returns:
        Their clock, and the names of the trackers.
    """
    trackers = _trackers(trainer, output)
    terminal = Console(file=open(os.devnull, "w"), force_terminal=True, width=COLUMNS)  # noqa: SIM115  (lives on)
    completions = LogCompletionsCallback(
        trainer, num_prompts=PROMPTS, freq=EVERY, dataset=rows, max_new_tokens=ANSWER_TOKENS, trackers=trackers
    )
    observers = [
        JsonlLogCallback(),
        RichProgressCallback(terminal),
        HealthCallback(),
        completions,
        RunManifest(trainer),
    ]
    clock = HookClock(observers, (completions.answers, "mine"))
    for observer in observers:
        trainer.add_callback(observer)
    return clock, [tracker.name for tracker in trackers]


def _trackers(trainer: Any, output: Path) -> list[TrackerQueue]:
    """The local files, and W&B, offline, where it is installed, else the stand-in."""
    if importlib.util.find_spec("wandb") is None:
        return [*default_trackers(trainer), TrackerQueue(SlowTracker())]
    import wandb

    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    output.mkdir(parents=True, exist_ok=True)
    wandb.init(project="bench", dir=output)
    return default_trackers(trainer)
