"""Tables to TensorBoard as text, through the writer that transformers' own integration keeps its curves with.

Each log is a Markdown table of the new rows at its step; the text tab has a slider over steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from preftune.callbacks.trackers.base import Row, Tracker
from preftune.callbacks.trackers.cells import markdown_table


class TensorBoardTracker(Tracker):
    """Writes with `callback`'s writer: two writers would be two files, of which TensorBoard follows one.

    Raises `RuntimeError` at a log before that writer is there.
    """

    name = "tensorboard"

    def __init__(self, callback: TensorBoardCallback):
        self._callback = callback
        self._writer: Any = None

    @classmethod
    def find(cls, callbacks: Sequence[TrainerCallback]) -> TensorBoardTracker | None:
        """A tracker beside transformers' TensorBoard callback, if that is among `callbacks`."""
        return next((cls(callback) for callback in callbacks if isinstance(callback, TensorBoardCallback)), None)

    def attach(self) -> None:
        self._writer = self._callback.tb_writer or self._writer

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Nothing: `report_to` does that, and twice would be twice."""

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        if self._writer is None:
            raise RuntimeError("transformers' TensorBoard callback has no writer yet; log after training has begun")
        if rows:
            self._writer.add_text(name, markdown_table(rows), step)
            self._writer.flush()  # transformers closes the writer before the last table is written

    def close(self) -> None:
        """The writer belongs to transformers' callback."""
