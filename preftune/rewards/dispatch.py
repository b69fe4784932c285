"""Makes the calls of one round: async functions together, plain ones in order, here, in threads or in processes.

A call ends in a `Result` whatever happens; what follows an error is decided by the runner.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from preftune.errors import RewardError
from preftune.rewards.calling import EventLoop, Overdue, Signature, call_in_thread
from preftune.rewards.processes import Call, Worker, call_all, check_sendable
from preftune.rewards.records import Records, call_recorded

# Calls of one function that are past their limit and still run; with more, something is wrong for good.
_MOST_LEFT_BEHIND = 8


@dataclass
class Reward:
    """A function and how it is called; `left_behind` are threads of calls that passed their limit."""

    name: str
    function: Any
    signature: Signature
    kind: Literal["sync", "async", "model"]
    left_behind: list[threading.Thread] = field(default_factory=list)


@dataclass
class Result:
    """What one call gave: what was returned or an error, wall-clock seconds, and what it reported."""

    records: Records
    returned: Any = None
    error: RewardError | None = None
    seconds: float = 0.0


@dataclass
class _Visit:
    """A call on its way: `call()` makes it."""

    reward: Reward
    result: Result
    args: list[Any]
    kwargs: dict[str, Any]
    started: float = 0.0
    future: Future | None = None

    def call(self) -> Any:
        return self.reward.function(*self.args, **self.kwargs)

    def fail(self, error: Exception, timeout: float | None) -> None:
        """Makes an error of the user's function one that names it."""
        self.result.seconds = time.perf_counter() - self.started
        self.result.error = _named(error, self.reward.name, self.result.records.rows, timeout)
        if isinstance(error, Overdue) and error.thread is not None:
            self.reward.left_behind.append(error.thread)


class Dispatcher:
    """Calls rewards, with `timeout` seconds for each call, plain functions in `processes` workers where that is not 0.

    Raises:
        ConfigError: a function that cannot be sent to a process.
    """

    def __init__(self, rewards: Sequence[Reward], timeout: float | None, processes: int) -> None:
        self._rewards = rewards
        self._timeout = timeout
        self._loop = EventLoop()
        self._workers = [Worker() for _ in range(processes)]
        for reward in rewards:
            if processes and reward.kind == "sync":
                check_sendable(reward.function, reward.name)

    def call_all(
        self, given: Mapping[str, Sequence[Any]], rows: int, trainer_state: Any, meanwhile: Callable[[], object]
    ) -> list[Result]:
        """One result per reward, in order; never raises what a function raises. Async ones go on during `meanwhile`."""
        visits = [self._visit(reward, given, rows, trainer_state) for reward in self._rewards]
        for visit in visits:
            if visit.reward.kind == "async":
                self._start(visit)
        meanwhile()
        plain = [visit for visit in visits if visit.reward.kind == "sync"]
        if self._workers:
            self._in_processes(plain)
        for visit in visits:
            if visit.reward.kind == "model" or (visit.reward.kind == "sync" and not self._workers):
                self._here(visit)
        for visit in visits:
            if visit.future is not None:
                self._finish(visit, visit.future)
        return [visit.result for visit in visits]

    def close(self) -> None:
        """Ends the event loop and the workers; the next call starts them again."""
        self._loop.close()
        for worker in self._workers:
            worker.kill()

    def _visit(self, reward: Reward, given: Mapping[str, Sequence[Any]], rows: int, trainer_state: Any) -> _Visit:
        records = Records(reward.name, rows)
        offered: dict[str, Any] = {name: _own_copy(list(values)) for name, values in given.items()}
        offered["trainer_state"] = trainer_state
        offered["log_extra"], offered["log_metric"] = records.log_extra, records.log_metric
        return _Visit(reward, Result(records), *reward.signature.pick(offered))

    def _start(self, visit: _Visit) -> None:
        visit.started = time.perf_counter()
        try:
            _check_left_behind(visit.reward)
            visit.future = self._loop.start(visit.call, self._timeout)
        except RewardError as error:
            visit.fail(error, self._timeout)

    def _finish(self, visit: _Visit, future: Future) -> None:
        try:
            visit.result.returned, visit.result.seconds = self._loop.result(future, self._timeout)
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises is a result
            visit.fail(error, self._timeout)

    def _here(self, visit: _Visit) -> None:
        visit.started = time.perf_counter()
        try:
            if self._timeout is None or visit.reward.kind == "model":
                returned = visit.call()
            else:
                _check_left_behind(visit.reward)
                returned = call_in_thread(visit.call, self._timeout, visit.reward.name)
        except Exception as error:  # noqa: BLE001 - as above
            visit.fail(error, self._timeout)
            return
        if inspect.isawaitable(returned):  # a lambda or a decorator around an async function
            visit.future = self._loop.start(lambda: returned, self._timeout)
        visit.result.returned, visit.result.seconds = returned, time.perf_counter() - visit.started

    def _in_processes(self, visits: Sequence[_Visit]) -> None:
        calls = [
            Call(call_recorded, (visit.reward.function, visit.args, visit.kwargs, visit.result.records))
            for visit in visits
        ]
        for visit, outcome in zip(visits, call_all(self._workers, calls, self._timeout)):
            if outcome.killed:
                visit.fail(Overdue(), self._timeout)
            elif outcome.error is not None:
                visit.fail(outcome.error, self._timeout)
            else:
                visit.result.returned, visit.result.records = outcome.value
            visit.result.seconds = outcome.seconds


def _own_copy(value: Any) -> Any:
    """Lists and dicts anew, their contents too: a function that sorts, empties or rewrites them harms nobody else."""
    if isinstance(value, dict):
        return {key: _own_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_own_copy(item) if isinstance(item, list | dict) else item for item in value]
    return value


def _check_left_behind(reward: Reward) -> None:
    reward.left_behind = [thread for thread in reward.left_behind if thread.is_alive()]
    if len(reward.left_behind) >= _MOST_LEFT_BEHIND:
        raise RewardError(
            f"reward {reward.name!r} is not called again: {len(reward.left_behind)} earlier calls are past their limit "
            "and still run. Give its own requests a limit, or run it in processes, which are killed."
        )


def _named(error: Exception, name: str, rows: int, timeout: float | None) -> RewardError:
    if isinstance(error, RewardError):
        return error
    if isinstance(error, Overdue):
        end = "It was stopped" if error.thread is None else f"Its thread {error.thread.name!r} is left behind"
        message = f"reward {name!r} took longer than reward_timeout={timeout} s for {rows} rows. {end}. Raise the limit"
    else:
        message = f"reward {name!r} raised {type(error).__name__} on {rows} rows: {error}. Mend it"
    named = RewardError(f"{message}, or set on_reward_error='none' to go on without its values.")
    named.__cause__ = error
    return named
