"""JsonlLogCallback: every log of a trainer, as one line of `{output_dir}/logs/metrics.jsonl`.

Rank zero writes. A resumed run goes on in the same file; what it supersedes is set aside, see `trackers/jsonl.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from preftune.callbacks.trackers.jsonl import jsonl_tracker

FLUSH_TIMEOUT = 5.0


def logs_directory(args: TrainingArguments) -> Path:
    return Path(args.output_dir or ".") / "logs"


class JsonlLogCallback(TrainerCallback):
    """Logs of training and evaluation as they come, and the metrics of `predict`; `logs` itself is left alone."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            jsonl_tracker(logs_directory(args)).begin(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs:
            jsonl_tracker(logs_directory(args)).log_scalars(logs, state.global_step)

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and metrics:
            jsonl_tracker(logs_directory(args)).log_scalars(metrics, state.global_step)
            self._flush(args)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._flush(args)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._flush(args)

    def _flush(self, args: TrainingArguments) -> None:
        """So that who reads the file after `train`, `evaluate` or `predict` finds everything."""
        jsonl_tracker(logs_directory(args)).flush(FLUSH_TIMEOUT)
