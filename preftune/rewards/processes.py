"""Worker processes: functions called in another Python, under a time limit that holds, since a process can be killed.

A function is sent by its import path. Workers import no `__main__`: scripts need no guard, and what a script itself
defines cannot be sent.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from preftune.errors import ConfigError

# Starting Python and importing the function's module is not the function's own time, but must end too.
_LOAD_LIMIT = 300.0
# A worker whose parent was killed ends by itself this long after its limit, whatever it computes.
_ORPHAN_SECONDS = 5.0


@dataclass(frozen=True)
class Call:
    """What to call: `function(*args, **kwargs)`, all of it picklable."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of a call: a value or an error, wall-clock seconds, and whether it was killed at its limit."""

    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0
    killed: bool = False


def check_sendable(function: Any, name: str) -> None:
    """Refuses a function that a worker could not get.

    Raises:
        ConfigError: it cannot be pickled (a lambda, a local function), or it is defined in the script that runs.
    """
    try:
        sent = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"reward {name!r} cannot be sent to a process ({error}). Define it at the top level of a module, or "
            "set reward_processes=0."
        ) from error
    if b"__main__" in sent:
        raise ConfigError(
            f"reward {name!r} is defined in the script that runs, which worker processes do not import. Move it to a "
            "module of its own, or set reward_processes=0."
        )


class Worker:
    """One process, started at its first call and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._owner = 0
        self._end: weakref.finalize | None = None
        self._timeout: float | None = None
        self._since = 0.0
        self._running = False
        self.connection: Connection

    def send(self, call: Call, timeout: float | None) -> None:
        """Hands a call over; the limit counts from when the worker has loaded it.

        Raises:
            Whatever pickle raises for an argument that cannot be sent.
        """
        message = pickle.dumps((timeout, call))
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._launch()
        self._timeout, self._since, self._running = timeout, time.perf_counter(), False
        self.connection.send_bytes(message)

    @property
    def overdue_in(self) -> float | None:
        """Seconds until the limit is over, None without one."""
        limit = self._timeout if self._running else _LOAD_LIMIT
        return None if limit is None else self._since + limit - time.perf_counter()

    def receive(self) -> Outcome | None:
        """Reads a message: None means that the call has begun."""
        try:
            message = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            seconds = self.elapsed
            self.kill()
            return Outcome(error=RuntimeError("the worker process ended (killed, or out of memory)"), seconds=seconds)
        if message is None:
            self._since, self._running = time.perf_counter(), True
        return message

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._since

    def kill(self) -> None:
        """Ends the process, if there is one of ours, whatever it does."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _launch(self) -> None:
        self.kill()
        self.connection, theirs = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from preftune.rewards.processes import serve; "
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code + f"serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, self.connection, self._owner)


def _end(process: subprocess.Popen, connection: Connection, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must leave its parent's worker alone
        process.kill()
        process.wait()
        connection.close()


def call_all(workers: Sequence[Worker], calls: Sequence[Call], timeout: float | None) -> list[Outcome]:
    """Makes all calls, as many at a time as there are workers; one past its limit of seconds is killed.

    The outcomes are in the order of the calls.
    """
    outcomes: list[Outcome] = [Outcome()] * len(calls)
    waiting, idle = deque(enumerate(calls)), list(workers)
    busy: dict[Connection, tuple[Worker, int]] = {}
    try:
        while waiting or busy:
            while waiting and idle:
                place, call = waiting.popleft()
                try:
                    idle[-1].send(call, timeout)
                except (pickle.PicklingError, AttributeError, TypeError, OSError) as error:
                    idle[-1].kill()
                    outcomes[place] = Outcome(error=error)
                    continue
                worker = idle.pop()
                busy[worker.connection] = (worker, place)
            for worker, place, outcome in _next_messages(busy):
                outcomes[place] = outcome
                idle.append(worker)
    finally:
        for worker, _ in busy.values():  # interrupted: what still runs would answer the next caller
            worker.kill()
    return outcomes


def _next_messages(busy: dict[Connection, tuple[Worker, int]]) -> list[tuple[Worker, int, Outcome]]:
    """Waits for something to happen; calls that have ended are taken out of `busy`."""
    if not busy:
        return []
    left = [seconds for worker, _ in busy.values() if (seconds := worker.overdue_in) is not None]
    ready = set(wait(list(busy), max(0.0, min(left)) if left else None))
    ended = []
    for connection, (worker, place) in list(busy.items()):
        outcome = None
        if connection in ready:
            outcome = worker.receive()
        elif (seconds := worker.overdue_in) is not None and seconds <= 0:
            outcome = Outcome(seconds=worker.elapsed, killed=True)
            worker.kill()
        if outcome is not None:
            del busy[connection]
            ended.append((worker, place, outcome))
    return ended


def serve(handle: int) -> None:
    """The life of a worker: takes calls and answers them until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    connection = Connection(handle)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(message, connection))


def _answer(message: bytes, connection: Connection) -> bytes:
    start = time.perf_counter()
    try:
        timeout, call = pickle.loads(message)
        connection.send_bytes(pickle.dumps(None))
        start = time.perf_counter()
        if timeout is not None:
            signal.setitimer(signal.ITIMER_REAL, timeout + _ORPHAN_SECONDS)
        try:
            value = call.function(*call.args, **call.kwargs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return pickle.dumps(Outcome(value, seconds=time.perf_counter() - start))
    except Exception as error:  # noqa: BLE001 - whatever a user's function raises goes to the parent
        error.add_note("In a worker process:\n" + "".join(traceback.format_exception(error)))
        return _packed_error(error, time.perf_counter() - start)


def _packed_error(error: Exception, seconds: float) -> bytes:
    """The outcome as bytes that can be read back: some exceptions can be pickled, but not made again."""
    try:
        packed = pickle.dumps(Outcome(error=error, seconds=seconds))
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 - as above
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(error.__notes__[-1])
        packed = pickle.dumps(Outcome(error=plain, seconds=seconds))
    return packed
