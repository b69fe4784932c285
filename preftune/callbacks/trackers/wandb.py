"""Tables to the W&B run that is open; transformers' own integration keeps the curves.

Incremental tables: each log uploads the new rows only, the run shows all of them under one key.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from preftune.callbacks.trackers.base import Row, Tracker


class WandbTracker(Tracker):
    """Raises `ImportError` without wandb, and `RuntimeError` at a log while no run is open."""

    name = "wandb"

    def __init__(self) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._tables: dict[tuple[str, str], Any] = {}

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Nothing: `report_to` does that, and twice would be twice."""

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        run = self._wandb.run
        if run is None:
            raise RuntimeError('no W&B run is open: use report_to="wandb" or call wandb.init() before training')
        if not rows:
            return
        table = self._tables.get((run.id, name))
        if table is None:
            table = self._wandb.Table(columns=list(rows[0]), log_mode="INCREMENTAL")
            self._tables[run.id, name] = table
        for row in rows:
            table.add_data(*(row[column] for column in table.columns))
        run.log({name: table, "train/global_step": step})

    def close(self) -> None:
        """The run belongs to who opened it."""
