"""A run with all observers on, beside the same run alone, for one process and for several.

Its rows are those of every process; which of them wrote is said by each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from preftune.callbacks.completions import LogCompletionsCallback
from preftune.callbacks.health import HealthCallback
from preftune.callbacks.progress import RichProgressCallback
from preftune.callbacks.trackers.base import Tracker
from preftune.callbacks.trackers.jsonl import read_table
from tests.distributed.scenarios import SGD, SYNC, dpo, text_rows, trained
from tests.support.runs import digest


class Kept(Tracker):
    """What a tracker of this process was given."""

    name = "kept"

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_scalars(self, scalars: Any, step: int) -> None:
        raise AssertionError("curves are not for trackers")

    def log_table(self, name: str, rows: Any, step: int) -> None:
        self.rows += rows

    def close(self) -> None:
        """Nothing is pending."""


def watched(folder: Path, processes: int) -> dict[str, Any]:
    """All observers on: weights are those of the run alone, completions those of one process, and rank 0 writes."""
    sets = {"a": Dataset.from_list(text_rows(3)), "b": Dataset.from_list(text_rows(2))}
    common = {"eval_dataset": sets, "per_device_eval_batch_size": 2, "save_strategy": "no", **SYNC, **SGD}
    alone = dpo(folder / "alone", processes, **common)
    alone.train()
    trainer = dpo(folder, processes, **common)
    table = Kept()
    trainer.add_callback(RichProgressCallback())
    trainer.add_callback(HealthCallback())
    trainer.add_callback(LogCompletionsCallback(trainer, freq=2, max_new_tokens=4, do_sample=False, trackers=[table]))
    trainer.add_callback(LogCompletionsCallback(trainer, num_prompts=1, freq=3, max_new_tokens=3, num_beams=2))
    result = trained(trainer, folder)
    rows = [table.rows]
    if processes > 1:
        torch.distributed.broadcast_object_list(rows, src=0)
    first = trainer.args.process_index == 0
    return result | {
        "unchanged": digest(trainer) == digest(alone),
        "written by the first alone": bool(table.rows) == first,
        "rows": rows[0],
        "written to the file": read_table(folder / "logs", "completions"),
    }
