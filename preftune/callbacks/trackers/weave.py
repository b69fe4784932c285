"""Traces and evaluations in Weave, out of rows of prompts, completions and scores.

It writes with the client that is open; where there is none it opens one, for the project of the W&B run or argument.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from preftune.callbacks.trackers.base import Row, Tracker

logger = logging.getLogger(__name__)


class WeaveTracker(Tracker):
    """Each table is an evaluation with the scores of its rows, or, without scorers, one trace a row.

    A row has `prompt`, `completion` (None where generation failed) and one number or None for each scorer.

    Args:
        project_name: Where no client and no W&B run is open.
        model_name: What gave the completions.
        scorers: Names of the columns that are scores; empty: traces.
        settings: How completions were generated, recorded with each trace or evaluation.

    Raises:
        ImportError: weave is not installed.
    """

    name = "weave"

    def __init__(
        self, project_name: str | None, model_name: str, scorers: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        try:
            self._weave: Any = importlib.import_module("weave")
        except ImportError as error:
            raise ImportError(
                f"WeaveCallback needs weave, which cannot be imported ({error}): pip install 'preftune[weave]'"
            ) from error
        self._project_name = project_name
        self._model_name = model_name
        self._scorers = list(scorers)
        self._settings = dict(settings)
        self._warned = False

    def log_scalars(self, scalars: Mapping[str, Any], step: int) -> None:
        """Nothing: curves belong to W&B."""

    def log_table(self, name: str, rows: Sequence[Row], step: int) -> None:
        client = self._client()
        if self._scorers:
            self._evaluation(name, rows, step)
        else:
            self._traces(client, name, rows, step)
        client.flush()

    def close(self) -> None:
        """The client belongs to the process, which may trace more than this run."""

    def _client(self) -> Any:
        client = self._weave.get_client()
        if client is not None:
            return client
        project = project_of_run() or self._project_name
        if project is None:
            raise RuntimeError(
                "no project to write to: call weave.init() or wandb.init() before training, or give "
                "WeaveCallback(project_name=...)"
            )
        # a line with a link for every trace would fill the log of training
        os.environ.setdefault("WEAVE_PRINT_CALL_LINK", "false")
        return self._weave.init(project)

    def _evaluation(self, name: str, rows: Sequence[Row], step: int) -> None:
        evaluation = self._weave.EvaluationLogger(
            name=f"{name}_step_{step}",
            model={"name": as_name(self._model_name), "training_step": step, **self._settings},
            dataset=[{"prompt": row["prompt"]} for row in rows],
            scorers=self._scorers,
            eval_attributes={"model_name": self._model_name, "training_step": step, "dataset_name": name}
            | self._settings,
        )
        successful = 0
        for row in rows:
            try:
                if row["completion"] is None:
                    continue
                prediction = evaluation.log_prediction(inputs={"prompt": row["prompt"]}, output=row["completion"])
                for scorer in self._scorers:
                    if row[scorer] is not None:
                        prediction.log_score(scorer, row[scorer])
                prediction.finish()
                successful += 1
            except Exception as error:  # noqa: BLE001  (one prediction must not cost the others)
                self._warn_once(error)
        evaluation.log_summary(
            {"total_predictions": len(rows), "successful_predictions": successful, **averages(rows, self._scorers)}
        )

    def _traces(self, client: Any, name: str, rows: Sequence[Row], step: int) -> None:
        attributes = {"model_name": self._model_name, "training_step": step, "dataset_name": name, **self._settings}
        for row in rows:
            try:
                if row["completion"] is not None:
                    call = client.create_call(
                        "completion", {"prompt": row["prompt"]}, attributes=attributes, use_stack=False
                    )
                    client.finish_call(call, output=row["completion"])
            except Exception as error:  # noqa: BLE001  (as above)
                self._warn_once(error)

    def _warn_once(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "Weave did not take a prediction: %s: %s. Training goes on; further ones are not reported.",
                type(error).__name__,
                error,
            )


def averages(rows: Sequence[Row], scorers: Sequence[str]) -> dict[str, float]:
    """`avg_{scorer}` over the rows that have a score; left out where none has."""
    found = {}
    for scorer in scorers:
        scores = [row[scorer] for row in rows if row[scorer] is not None]
        if scores:
            found[f"avg_{scorer}"] = sum(scores) / len(scores)
    return found


def project_of_run() -> str | None:
    """`entity/project` of the W&B run that is open."""
    library: Any = sys.modules.get("wandb")
    run = library.run if library is not None else None
    if run is None:
        return None
    return f"{run.entity}/{run.project}" if run.entity else run.project


def as_name(text: str) -> str:
    """Weave's names hold letters, digits, `-`, `_` and `.`."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text).strip("-") or "model"
