"""Tracker, the protocol of everything that stores what a run logs, and TrackerQueue, which makes any of them harmless.

A tracker that is slow, down or raises costs one warning: what does not fit in its queue is dropped and counted.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from preftune.callbacks.formatting import is_image, plain

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


class Tracker(ABC):
    """Stores scalars and tables of one run. An adapter imports its library in its constructor.

    It joins the run that is open and never opens one. A row of a table is logged once: adapters add new rows to the
    table of that name.
    """

    name: str = "tracker"
    is_local: bool = False  # its files lie in the output folder
    takes_images: bool = False  # images of PIL, or lists of them, may be values of a row; others get "[image 12x8]"

    def attach(self) -> None:  # noqa: B027  (optional on purpose)
        """Finds the run that is open; called before each log in the thread of training, so it must not wait.

        Some libraries know the open run only in the thread that opened it.
        """

    def begin(self, step: int) -> None:  # noqa: B027  (optional on purpose)
        """Training starts (0) or resumes at `step`: what was logged for later steps before is superseded."""

    @abstractmethod
    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Stores one log. Only `jsonl` does: transformers' integrations keep the curves elsewhere."""

    @abstractmethod
    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Adds `rows`, of equal keys, to the table `name`."""

    @abstractmethod
    def close(self) -> None:
        """Writes out what is pending. Nothing is logged afterwards."""


def is_images(value: Any) -> bool:
    """Whether the value of a row is an image, or a list of nothing else."""
    return is_image(value) or (isinstance(value, list | tuple) and len(value) > 0 and all(map(is_image, value)))


class TrackerQueue(Tracker):
    """A tracker behind a bounded queue and a thread of its own; no method raises, and none waits but `flush`, `close`.

    Values are copied to plain numbers and strings when they are logged.

    Attributes:
        dropped: Calls that found the queue full.
        failed: Calls in which the tracker raised.
        closed: Whether `close` was called.
    """

    def __init__(self, tracker: Tracker, *, max_pending: int = 256, close_timeout: float = 10.0):
        self.name = tracker.name
        self.is_local = tracker.is_local
        self.takes_images = tracker.takes_images
        self.tracker = tracker
        self.dropped = 0
        self.failed = 0
        self._close_timeout = close_timeout
        self._warned = False
        self._is_late = False
        self.closed = False
        self._pending: queue.Queue[Callable[[], None]] = queue.Queue(max_pending)
        self._thread: threading.Thread | None = None
        atexit.register(self.close)

    def begin(self, step: int) -> None:
        self._submit(lambda: self.tracker.begin(step))

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        copied = {str(key): plain(value) for key, value in scalars.items()}
        if self._is_attached():
            self._submit(lambda: self.tracker.log_scalars(copied, step))

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        copied = [{str(key): self._copied(value) for key, value in row.items()} for row in rows]
        if self._is_attached():
            self._submit(lambda: self.tracker.log_table(name, copied, step))

    def flush(self, timeout: float) -> bool:
        """Waits until all is written; False, with a warning, if that takes longer than `timeout` seconds.

        A tracker that was too slow once is not waited for again until it has caught up.
        """
        deadline = time.monotonic() + (0 if self._is_late else timeout)
        with self._pending.all_tasks_done:
            while self._pending.unfinished_tasks and self._is_working():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._pending.all_tasks_done.wait(left)
            done = not self._pending.unfinished_tasks
        self._is_late = not done
        if not done:
            self._warn_once(f"{self._pending.unfinished_tasks} entries were not written within {timeout:g} s")
        return done

    def close(self) -> None:
        """Flushes, closes the tracker, and gives up after `close_timeout` seconds; safe to call twice."""
        if self.closed:
            return
        if self._thread is not None and self._is_working():
            self._submit(self.tracker.close)
            self.flush(self._close_timeout)
        self.closed = True
        atexit.unregister(self.close)

    def _copied(self, value: Any) -> Any:
        return value if self.takes_images and is_images(value) else plain(value)

    def _is_attached(self) -> bool:
        try:
            self.tracker.attach()
        except Exception as error:  # noqa: BLE001  (as in `_work`)
            self.failed += 1
            self._warn_once(f"{type(error).__name__}: {error}")
            return False
        return True

    def _submit(self, write: Callable[[], None]) -> None:
        if self.closed:
            self._warn_once("something was logged after it was closed")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"preftune-{self.name}", daemon=True)
            self._thread.start()
        try:
            self._pending.put_nowait(write)
        except queue.Full:
            self.dropped += 1
            self._warn_once(f"it is too slow: {self._pending.maxsize} entries are waiting, new ones are dropped")

    def _work(self) -> None:
        while True:
            write = self._pending.get()
            try:
                write()
            except Exception as error:  # noqa: BLE001  (whatever a tracker raises, training goes on)
                self.failed += 1
                self._warn_once(f"{type(error).__name__}: {error}")
            finally:
                self._pending.task_done()

    def _is_working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _warn_once(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "Tracker %r: %s. Training goes on; some of this run is missing there. Further problems of this tracker "
                "are counted (`dropped`, `failed`) but not reported.",
                self.name,
                problem,
            )
