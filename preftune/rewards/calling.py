"""How a reward function is called: its name, what its signature takes, in a thread with a limit, on an event loop.

A thread cannot be killed: one that is past its limit is left behind, and its result is thrown away.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from preftune.errors import ConfigError
from preftune.models.load import model_name

# What the runner itself hands over, so that no dataset column can have such a name.
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# How long a blocked event loop is waited for beyond the limit of its functions.
_GRACE = 1.0


def name_of(function: Any) -> str:
    """The name in metrics: last part of a model's name, `__name__` of a function or partial, class name of an object.

    One fact to check: `name_of(functools.partial(len))` is "len".
    """
    while isinstance(function, functools.partial):
        function = function.func
    called: Any = function
    if isinstance(function, str):
        return function.rstrip("/").rpartition("/")[2]
    if isinstance(function, nn.Module) and "config" in vars(function):
        return model_name(function).rstrip("/").rpartition("/")[2]  # pyright: ignore
    try:
        return called.__name__
    except AttributeError:
        return type(function).__name__


def unique_names(names: Sequence[str]) -> list[str]:
    """`names`, with _2, _3, ... after those that stood there before.

    One fact to check: `["f", "f", "f_2"]` becomes `["f", "f_3", "f_2"]`: no name that was given is taken away.
    """
    unique: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in unique or (number > 1 and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def is_async(function: Any) -> bool:
    """True for coroutine functions, objects whose `__call__` is one, and partials of either."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass(frozen=True)
class Signature:
    """What a function takes of all that is offered.

    Attributes:
        leading: Names of positional-only parameters, in order.
        names: Parameters that can be given by name; None takes everything (`**kwargs`).
        required: Those without a default.
        bound: Keywords that a partial has fixed; they are not given again.
    """

    leading: tuple[str, ...]
    names: frozenset[str] | None
    required: tuple[str, ...]
    bound: frozenset[str]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        bound = frozenset[str]()
        inner: Any = function
        while isinstance(inner, functools.partial):
            bound |= set(inner.keywords)
            inner = inner.func
        try:
            parameters = inspect.signature(function).parameters.values()
        except (ValueError, TypeError):  # some functions written in C have none
            return cls((), None, (), bound)
        single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return cls(
            leading=tuple(p.name for p in single if p.kind is p.POSITIONAL_ONLY),
            names=None if everything else frozenset(p.name for p in single if p.kind is not p.POSITIONAL_ONLY),
            required=tuple(p.name for p in single if p.default is p.empty),
            bound=bound,
        )

    def check(self, name: str, offered: Iterable[str]) -> None:
        """Refuses a function that needs an argument that is not offered.

        Raises:
            ConfigError: with its name, the argument, and the columns there are.
        """
        offered = sorted(set(offered) - set(ARGUMENTS))
        lacking = [argument for argument in self.required if argument not in (*offered, *ARGUMENTS)]
        if lacking:
            raise ConfigError(
                f"reward {name!r} needs {', '.join(map(repr, lacking))}, and there is no such column. Columns: "
                f"{', '.join(map(repr, offered)) or 'none beside the prompt'}; always given: {', '.join(ARGUMENTS)}. "
                "Rename the column or the argument, or give the argument a default."
            )

    def pick(self, offered: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, out of what is offered."""
        leading = [offered[name] for name in self.leading if name in offered]
        wanted = offered if self.names is None else self.names
        taken = self.bound | set(self.leading)
        return leading, {name: offered[name] for name in offered if name in wanted and name not in taken}


def call_in_thread(call: Callable[[], Any], timeout: float, name: str) -> Any:
    """The result of `call()`, made in a thread of its own without gradients.

    Raises:
        Overdue: it takes longer than `timeout` seconds; the thread is left behind, in the error.
    """
    thread, future = started_in_thread(call, f"preftune-reward-{name}")
    concurrent.futures.wait([future], timeout)
    if not future.done():
        raise Overdue(thread)
    return future.result()


def started_in_thread(call: Callable[[], Any], name: str) -> tuple[threading.Thread, concurrent.futures.Future]:
    """A daemon thread called `name` in which `call()` runs without gradients, and the future of its result."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from now on nobody can cancel it under the thread's hands
    context = contextvars.copy_context()

    def work() -> None:
        try:
            with torch.no_grad():
                value = context.run(call)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(value)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread, future


class Overdue(Exception):
    """A call is past its limit; `thread` is where it goes on, None where it was cancelled."""

    def __init__(self, thread: threading.Thread | None = None) -> None:
        super().__init__("past its time limit")
        self.thread = thread


class EventLoop:
    """An asyncio loop in a daemon thread, so that it does not matter whether the caller has a loop of its own.

    It is one loop for all calls: clients that a function keeps between calls stay usable.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, make: Callable[[], Awaitable[Any]], timeout: float | None) -> concurrent.futures.Future:
        """Begins `await make()`; the future holds (value, seconds), or raises Overdue past `timeout`."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=[self._loop], name="preftune-rewards", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(_timed(make, timeout), self._loop)

    def result(self, future: concurrent.futures.Future, timeout: float | None) -> tuple[Any, float]:
        """What a future of `start` holds, also where a function blocks the loop: the next call then gets a new one.

        Raises:
            Overdue: `timeout` seconds and a grace are over, and the loop does not answer.
        """
        concurrent.futures.wait([future], None if timeout is None else timeout + _GRACE)
        if not future.done():
            thread, self._loop, self._thread = self._thread, None, None
            raise Overdue(thread)
        return future.result()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = self._thread = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    with torch.no_grad():
        loop.run_forever()
    loop.close()


async def _timed(make: Callable[[], Awaitable[Any]], timeout: float | None) -> tuple[Any, float]:
    start = time.perf_counter()
    task = asyncio.ensure_future(_awaited(make))
    done, _ = await asyncio.wait([task], timeout=timeout)
    if not done:
        task.cancel()
        raise Overdue
    return task.result(), time.perf_counter() - start


async def _awaited(make: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await make()
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop, and nobody would hear from it again
        raise RuntimeError(f"it tried to end the process ({error!r})") from error
