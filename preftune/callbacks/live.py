"""Who owns the terminal while a panel is alive, and how it is given back.

No event tells a callback that an exception (Ctrl-C too) left the training loop. So every redraw, and every write to the
standard streams, first looks whether the code that started the display still runs, and closes the display if not.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live

_active: weakref.WeakSet[LiveDisplay] = weakref.WeakSet()
# The last proxies taken down. `print` borrows sys.stdout without owning it, so they outlive the write that ends them.
_retired: list[_Above] = []


def can_animate(console: Console, *, given: bool) -> bool:
    """True where redrawing in place works: a terminal, or a notebook with ipywidgets.

    A console that the caller made (`given`) is trusted; for our own, `FORCE_COLOR` in a log file is not a terminal.
    """
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_interactive and not console.is_dumb_terminal and (given or console.file.isatty())


class LiveDisplay:
    """Redraws `render()` at the bottom of the terminal until `close`, from a thread of its own.

    Prints, logging handlers and tracebacks appear above the panel. `close` may be called from anywhere, repeatedly.
    """

    def __init__(self, console: Console, render: Callable[[], RenderableType], *, refresh_per_second: float):
        self._live = Live(
            console=console, get_renderable=render, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._interval = 1 / refresh_per_second
        self._done = threading.Event()
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._keep_fresh, name="preftune-progress", daemon=True)
        self._pid = os.getpid()
        self._owner_thread = threading.get_ident()
        self._owner_code: CodeType | None = None
        self._streams: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
        self._proxies: list[_Above] = []
        self._handlers: list[tuple[logging.StreamHandler, TextIO]] = []

    def start(self) -> None:
        self._owner_code = _code_that_fired_the_event()
        self._live.start(refresh=True)
        self._redirect_streams()
        _active.add(self)
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """Draws a last time, shows the cursor and gives the streams back."""
        with self._closing:
            if self._done.is_set() or os.getpid() != self._pid:
                return
            self._done.set()
        _active.discard(self)
        try:
            for proxy in self._proxies:
                proxy.flush()  # the start of a line that nobody has ended yet
            if self._live.console.is_jupyter:
                self._live.refresh()  # rich does not draw a last time there, and the end of the run would be missing
            self._live.stop()
        finally:
            self._restore_streams()
            atexit.unregister(self.close)

    def is_alive(self) -> bool:
        """False once the loop that started the display is left, which closes the display."""
        if not self._done.is_set() and not _on_stack(self._owner_thread, self._owner_code):
            self.close()
        return not self._done.is_set()

    def join(self, timeout: float) -> bool:
        """Waits for the refresh thread to end; True if it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _keep_fresh(self) -> None:
        while not self._done.wait(self._interval):
            if self.is_alive():
                self._live.refresh()

    def _redirect_streams(self) -> None:
        """Logging handlers made before the display hold the bare streams, and would write into the panel."""
        console = self._live.console
        self._proxies = [_Above(console, stream, self) for stream in self._streams]
        sys.stdout, sys.stderr = (cast("TextIO", proxy) for proxy in self._proxies)
        for handler in _stream_handlers():
            for original, proxy in zip(self._streams, self._proxies, strict=True):
                if handler.stream is original:
                    handler.setStream(proxy)
                    self._handlers.append((handler, original))
                    break

    def _restore_streams(self) -> None:
        """Only what still is as we set it: who replaced a stream meanwhile keeps theirs."""
        _retired[:] = self._proxies
        for name, original, proxy in zip(("stdout", "stderr"), self._streams, self._proxies, strict=True):
            if vars(sys)[name] is proxy:
                setattr(sys, name, original)
        for handler, original in self._handlers:
            handler.setStream(original)
        self._handlers = []

    def _forget_after_fork(self) -> None:
        """A forked worker has no refresh thread and may hold dead locks: it writes to the bare streams."""
        sys.stdout, sys.stderr = self._streams
        for handler, original in self._handlers:
            handler.stream = original


class _Above(FileProxy):
    """A standard stream while a panel is shown: whole lines appear above it, and directly once it is closed."""

    def __init__(self, console: Console, stream: TextIO, display: LiveDisplay):
        super().__init__(console, stream)
        self._display = display
        self._stream = stream

    def write(self, text: str) -> int:
        return super().write(text) if self._display.is_alive() else self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        super().flush()
        self._stream.flush()


def _forget_all_after_fork() -> None:
    for display in list(_active):
        display._forget_after_fork()


if sys.platform != "win32":  # no fork there
    os.register_at_fork(after_in_child=_forget_all_after_fork)


def _stream_handlers() -> Iterator[logging.StreamHandler]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):  # the dict also holds placeholders
            yield from (h for h in logger.handlers if isinstance(h, logging.StreamHandler))


def _code_that_fired_the_event() -> CodeType | None:
    """The outermost method of the Trainer on the stack: `train`, `evaluate` or `predict`; without one, our caller."""
    frame = sys._getframe(1)
    outermost = caller = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "transformers.trainer":
            outermost = frame.f_code
        elif caller is None and not module.startswith("preftune.callbacks."):
            caller = frame.f_code
        frame = frame.f_back
    return outermost or caller


def _on_stack(thread_id: int, code: CodeType | None) -> bool:
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
