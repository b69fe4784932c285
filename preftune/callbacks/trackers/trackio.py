"""Tables to the trackio run that is open; transformers' own integration keeps the curves.

Each log is a table of the new rows at its step; the run keeps those of all steps.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from preftune.callbacks.trackers.base import Row, Tracker
from preftune.callbacks.trackers.cells import cells, columns_of


class TrackioTracker(Tracker):
    """Raises `ImportError` without trackio, and `RuntimeError` at a log while no run is open."""

    name = "trackio"

    def __init__(self) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._run: Any = None

    @staticmethod
    def run_is_open() -> bool:
        library: Any = sys.modules.get("trackio")
        return library is not None and library.context_vars.current_run.get() is not None

    def attach(self) -> None:
        # trackio keeps the open run in a context variable, which the thread that writes does not see
        self._run = self._trackio.context_vars.current_run.get() or self._run

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Nothing: `report_to` does that, and twice would be twice."""

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        if self._run is None:
            raise RuntimeError('no trackio run is open: use report_to="trackio" or call trackio.init() before training')
        if rows:
            columns = columns_of(rows)
            data = [dict(zip(columns, row)) for row in cells(rows, columns)]
            self._run.log({name: self._trackio.Table(data=data)}, step=step)

    def close(self) -> None:
        """The run belongs to who opened it."""
