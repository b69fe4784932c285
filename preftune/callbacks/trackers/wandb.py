"""Tables to the W&B run that is open; transformers' own integration keeps the curves.

Incremental tables: each log uploads the new rows only, the run shows all of them under one key.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from preftune.callbacks.formatting import is_image
from preftune.callbacks.trackers.base import Row, Tracker, is_images
from preftune.callbacks.trackers.cells import as_cell, columns_of


class WandbTracker(Tracker):
    """Raises `ImportError` without wandb, and `RuntimeError` at a log while no run is open.

    The columns of a table are those of its first rows. Rows with others go on in a table `{name}_2`, and so on. Images
    are uploaded as such.
    """

    name = "wandb"
    takes_images = True

    def __init__(self) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._tables: dict[tuple[str, str], tuple[Any, dict[str, bool]]] = {}

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
        wanted = {column: any(is_images(row.get(column)) for row in rows) for column in columns_of(rows)}
        key, table, columns = self._table(run.id, name, wanted)
        for row in rows:
            table.add_data(*(self._cell(row.get(column), of_images) for column, of_images in columns.items()))
        run.log({key: table, "train/global_step": step})

    def close(self) -> None:
        """The run belongs to who opened it."""

    def _cell(self, value: Any, of_images: bool) -> Any:
        """A list of images, None for no image; else a plain cell."""
        if not of_images:
            return as_cell(value)
        images = [value] if is_image(value) else value if is_images(value) else []
        return [self._wandb.Image(image) for image in images] or None

    def _table(self, run_id: str, name: str, wanted: dict[str, bool]) -> tuple[str, Any, dict[str, bool]]:
        """The first table that can take the columns `wanted` (those of images are True): key, table, its columns."""
        key, number = name, 1
        while (run_id, key) in self._tables:
            table, columns = self._tables[run_id, key]
            if all(column in columns and columns[column] >= of_images for column, of_images in wanted.items()):
                return key, table, columns
            number += 1
            key = f"{name}_{number}"
        # W&B shows images only in a column of that type, and takes them for objects where types may be mixed
        types = [[self._wandb.Image] if of_images else [str, int, float, bool] for of_images in wanted.values()]
        table = self._wandb.Table(columns=list(wanted), dtype=types, log_mode="INCREMENTAL")
        self._tables[run_id, key] = table, wanted
        return key, table, wanted
