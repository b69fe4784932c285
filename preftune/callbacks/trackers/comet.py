"""Tables to the Comet experiment that is running; transformers' own integration keeps the curves.

Each log is an asset `{name}.csv` of its step with the new rows; together they are the whole table.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from preftune.callbacks.trackers.base import Row, Tracker
from preftune.callbacks.trackers.cells import csv_text


class CometTracker(Tracker):
    """Raises `ImportError` without comet_ml, and `RuntimeError` at a log while no experiment is running."""

    name = "comet"

    def __init__(self) -> None:
        self._comet: Any = importlib.import_module("comet_ml")

    @staticmethod
    def run_is_open() -> bool:
        library: Any = sys.modules.get("comet_ml")
        experiment = None if library is None else library.get_running_experiment()
        return experiment is not None and not experiment.ended

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Nothing: `report_to` does that, and twice would be twice."""

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        experiment = self._comet.get_running_experiment()
        if experiment is None or experiment.ended:
            raise RuntimeError('no Comet experiment is running: use report_to="comet_ml" or call comet_ml.start()')
        if rows:
            experiment.log_asset(io.StringIO(csv_text(rows)), file_name=f"{name}.csv", step=step)

    def close(self) -> None:
        """The experiment belongs to who started it."""
