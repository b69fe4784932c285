"""Tables to the Comet experiment that is running; transformers' own integration keeps the curves.

Each log is an asset `{name}.csv` of its step with the new rows; together they are the whole table.
"""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from preftune.callbacks.trackers.base import Row, Tracker


class CometTracker(Tracker):
    """Raises `ImportError` without comet_ml, and `RuntimeError` at a log while no experiment is running."""

    name = "comet"

    def __init__(self) -> None:
        self._comet: Any = importlib.import_module("comet_ml")

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Nothing: `report_to` does that, and twice would be twice."""

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        experiment = self._comet.get_running_experiment()
        if experiment is None or experiment.ended:
            raise RuntimeError('no Comet experiment is running: use report_to="comet_ml" or call comet_ml.start()')
        if rows:
            text = io.StringIO()
            writer = csv.DictWriter(text, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
            text.seek(0)
            experiment.log_asset(text, file_name=f"{name}.csv", step=step)

    def close(self) -> None:
        """The experiment belongs to who started it."""
