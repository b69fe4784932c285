"""Tables to the W&B run that is open; transformers' own integration keeps the curves.

Incremental tables: each log uploads the new rows only, the run shows all of them under one key.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from preftune.callbacks.trackers.base import Row, Tracker
from preftune.callbacks.trackers.cells import cells, columns_of


class WandbTracker(Tracker):
    """Raises `ImportError` without wandb, and `RuntimeError` at a log while no run is open.

    The columns of a table are those of its first rows. Rows with others go on in a table `{name}_2`, and so on.
    """

    name = "wandb"

    def __init__(self) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._tables: dict[tuple[str, str], Any] = {}

    @staticmethod
    def run_is_open() -> bool:
        library: Any = sys.modules.get("wandb")
        return library is not None and library.run is not None

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Nothing: `report_to` does that, and twice would be twice."""

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        run = self._wandb.run
        if run is None:
            raise RuntimeError('no W&B run is open: use report_to="wandb" or call wandb.init() before training')
        if not rows:
            return
        key, table = self._table(run.id, name, columns_of(rows))
        for row in cells(rows, table.columns):
            table.add_data(*row)
        run.log({key: table, "train/global_step": step})

    def close(self) -> None:
        """The run belongs to who opened it."""

    def _table(self, run_id: str, name: str, columns: list[str]) -> tuple[str, Any]:
        key, number = name, 1
        while (table := self._tables.get((run_id, key))) is not None:
            if set(columns) <= set(table.columns):
                return key, table
            number += 1
            key = f"{name}_{number}"
        table = self._wandb.Table(columns=columns, log_mode="INCREMENTAL", allow_mixed_types=True)
        self._tables[run_id, key] = table
        return key, table
