"""A worker process as the driver sees it: commands go in, one JSON line comes back for each.

What the worker prints goes to a log file; only protocol lines travel over the pipe.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT

LOG_TAIL = 3000


class WorkerError(RuntimeError):
    """A worker died or fell silent; the message ends with the tail of its log."""


class Worker:
    """One side of a comparison, in its own environment and process group."""

    def __init__(self, side: str, python: Path, environment: dict[str, str], log: Path) -> None:
        self.side = side
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.worker", side],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def ask(self, do: str, timeout: float = 3600, **fields: Any) -> dict[str, Any]:
        """Sends one command and waits for its answer.

        Raises:
            WorkerError: the worker died (its traceback is in the log) or said nothing for `timeout` seconds.
        """
        try:
            self._in.write((json.dumps({"do": do, **fields}) + "\n").encode())
            self._in.flush()
        except BrokenPipeError:
            raise self._error(f"died before {do!r}") from None
        ready, _, _ = select.select([self._out], [], [], timeout)
        line = self._out.readline() if ready else b""
        if not line:
            raise self._error(f"gave no answer to {do!r} ({'ended' if ready else f'{timeout:.0f} s'})")
        return json.loads(line)

    def _error(self, what: str) -> WorkerError:
        tail = self._log.read_bytes()[-LOG_TAIL:].decode(errors="replace")
        return WorkerError(f"worker {self.side}: {what}\n--- end of its log ---\n{tail}")

    def hold(self) -> None:
        """Stops all its threads where they are, so that none of them works while another side is timed."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def release(self) -> None:
        """Lets it go on after `hold`."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends the worker and whatever it started."""
        if self._process.poll() is None:
            self.release()
        self._in.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._out.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
