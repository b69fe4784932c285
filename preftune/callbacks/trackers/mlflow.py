"""Tables to the MLflow run that is open; transformers' own integration keeps the curves.

Each log is an artifact `{name}/{name}_{step}.csv` with the new rows; the run lists those of all steps.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from preftune.callbacks.trackers.base import Row, Tracker
from preftune.callbacks.trackers.cells import csv_text


class MlflowTracker(Tracker):
    """Raises `ImportError` without mlflow, and `RuntimeError` at a log while no run is open.

    A second table of that name at the same step is a file of its own, `..._2.csv`.
    """

    name = "mlflow"

    def __init__(self) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._run_id: str | None = None
        self._written: dict[tuple[str | None, str], int] = {}

    @staticmethod
    def run_is_open() -> bool:
        library: Any = sys.modules.get("mlflow")
        return library is not None and library.active_run() is not None

    def attach(self) -> None:
        # MLflow's active run is that of a thread; its plain functions would open a second one where there is none
        run = self._mlflow.active_run()
        self._run_id = self._run_id if run is None else run.info.run_id

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Nothing: `report_to` does that, and twice would be twice."""

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        if self._run_id is None:
            raise RuntimeError(
                'no MLflow run is open: use report_to="mlflow" or call mlflow.start_run() before training'
            )
        if not rows:
            return
        place = f"{name}/{name}_{step:05d}"
        count = self._written[self._run_id, place] = self._written.get((self._run_id, place), 0) + 1
        artifact = f"{place}.csv" if count == 1 else f"{place}_{count}.csv"
        self._mlflow.MlflowClient().log_text(self._run_id, csv_text(rows), artifact)

    def close(self) -> None:
        """The run belongs to who opened it."""
