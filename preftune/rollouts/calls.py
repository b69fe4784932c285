"""Calls of tools: all of a turn together, each with its time limit; whatever a tool does, its call has an outcome.

Async tools share one event loop, plain ones run in daemon threads, so that one that hangs keeps no process alive.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from preftune.errors import RolloutError
from preftune.models.random_state import forked_random_states
from preftune.rewards.calling import EventLoop, Overdue, is_async, started_in_thread

# Plain calls that run at the same time.
_MOST_THREADS = 64
# Threads of calls that are past their limit and still run; with more, something is wrong for good.
_MOST_LEFT_BEHIND = 64


@dataclass(frozen=True)
class Call:
    """`function(**arguments)`; of those with the same `chain`, not None, each begins when the one before has ended."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    chain: Any = None


@dataclass(frozen=True)
class Outcome:
    """What a call returned, or why it failed."""

    value: Any = None
    error: str | None = None


class _Ended(Exception):
    """A tool tried to end the process."""


class CallRunner:
    """Makes calls. Global random states are left as found.

    Args:
        timeout: Seconds that one call may take; past it an async one is cancelled, and the thread of a plain one left
            behind. None: no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._loop = EventLoop()
        self._left_behind: list[threading.Thread] = []

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """One outcome per call, in order.

        Raises:
            RolloutError: too many calls of earlier turns are past their limit and still run.
        """
        if not calls:
            return []
        self._check_left_behind()
        outcomes: dict[int, Outcome] = {}
        chains: dict[Any, list[int]] = {}
        for place, call in enumerate(calls):
            chains.setdefault(("own", place) if call.chain is None else ("shared", call.chain), []).append(place)

        async def all_together() -> None:
            room = asyncio.Semaphore(_MOST_THREADS)
            await asyncio.gather(*(self._chain(calls, places, room, outcomes) for places in chains.values()))

        with forked_random_states():
            future = self._loop.start(all_together, None)
            try:
                self._loop.result(future, self._patience(chains.values()))
            except Overdue as overdue:  # an async tool does not let go of the loop: what is not there by now is late
                self._left_behind += [overdue.thread] if overdue.thread is not None else []
        known = dict(outcomes)
        return [known.get(place) or self._late(call) for place, call in enumerate(calls)]

    def close(self) -> None:
        """Ends the event loop; the next `run` starts another."""
        self._loop.close()

    def _patience(self, chains: Any) -> float | None:
        """Seconds within which all calls are over where every tool lets go of the loop."""
        if self._timeout is None:
            return None
        waves = math.ceil(sum(map(len, chains)) / _MOST_THREADS)
        return self._timeout * (max(map(len, chains)) + waves)

    async def _chain(
        self, calls: Sequence[Call], places: Sequence[int], room: asyncio.Semaphore, outcomes: dict[int, Outcome]
    ) -> None:
        for place in places:
            call = calls[place]
            if is_async(call.function):
                outcomes[place] = await self._outcome(call, _awaited(call))
            else:
                async with room:
                    thread, future = started_in_thread(partial(_called, call), f"preftune-tool-{call.name}")
                    outcomes[place] = await self._outcome(call, asyncio.wrap_future(future))
                if thread.is_alive() and not future.done():
                    self._left_behind.append(thread)

    async def _outcome(self, call: Call, running: Any) -> Outcome:
        task = asyncio.ensure_future(running)
        done, _ = await asyncio.wait([task], timeout=self._timeout)
        if not done:
            task.cancel()
            return self._late(call)
        try:
            value = task.result()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever a tool raises is an outcome
            return Outcome(error=f"{type(error).__name__}: {error}")
        if inspect.isawaitable(value):  # a decorator or a partial around an async function
            return await self._outcome(call, _guarded(value))
        return Outcome(value)

    def _late(self, call: Call) -> Outcome:
        return Outcome(error=f"{call.name} took longer than {self._timeout:g} seconds and was given up")

    def _check_left_behind(self) -> None:
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) >= _MOST_LEFT_BEHIND:
            raise RolloutError(
                f"{len(self._left_behind)} calls of tools are past tool_timeout={self._timeout:g} and still run. A "
                "thread cannot be killed: give the tool a limit of its own (requests: timeout=), or make it async."
            )


async def _awaited(call: Call) -> Any:
    return await _guarded(call.function(**call.arguments))


async def _guarded(awaitable: Any) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop
        raise _Ended(repr(error)) from error


def _called(call: Call) -> Any:
    try:
        return call.function(**call.arguments)
    except Exception:
        raise
    except BaseException as error:  # as above
        raise _Ended(repr(error)) from error
