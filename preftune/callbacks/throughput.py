"""Tokens per second from a running count, by the clock of training alone.

Time spent evaluating is not training time; a resumed run starts from the count it resumed with.
"""

from __future__ import annotations


class Throughput:
    """`update(now, count)` gives the speed since the last update; pauses between them do not count.

    Args:
        now: Seconds of any monotonic clock.
        count: The count at that moment, or None if not known: the first update then only sets it.
    """

    def __init__(self, now: float = 0.0, count: float | None = None):
        self._since = now
        self._count = count
        self._paused_at: float | None = None
        self._paused_seconds = 0.0
        self._rate: float | None = None

    def pause(self, now: float) -> None:
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        if self._paused_at is not None:
            self._paused_seconds += now - self._paused_at
            self._paused_at = None

    def update(self, now: float, count: float) -> float | None:
        """Tokens per second since the last update with another count; None before there is one to compare with."""
        if self._count == count:  # a second log of the same step says nothing new
            return self._rate
        if self._paused_at is not None:
            self.resume(now)
            self.pause(now)
        seconds = now - self._since - self._paused_seconds
        if self._count is not None and seconds > 0 and count > self._count:
            self._rate = (count - self._count) / seconds
        self._since, self._count, self._paused_seconds = now, count, 0.0
        return self._rate
