"""Which trackers get the tables of a run: the local files always, a service where the run reports to it.

Rank zero alone has trackers. One of each is made for a run, however many callbacks log tables.
"""

from __future__ import annotations

import importlib
from weakref import WeakKeyDictionary

from transformers import Trainer

from preftune.callbacks.jsonl_log import logs_directory
from preftune.callbacks.trackers.base import TrackerQueue
from preftune.callbacks.trackers.jsonl import jsonl_tracker
from preftune.callbacks.trackers.tensorboard import TensorBoardTracker

SERVICES = {  # by the name in report_to
    "wandb": ("wandb", "WandbTracker"),
    "comet_ml": ("comet", "CometTracker"),
    "trackio": ("trackio", "TrackioTracker"),
    "mlflow": ("mlflow", "MlflowTracker"),
}
_made: WeakKeyDictionary[Trainer, dict[str, TrackerQueue]] = WeakKeyDictionary()


def default_trackers(trainer: Trainer) -> list[TrackerQueue]:
    """JSONL always; W&B, Comet, trackio and MLflow where `report_to` names them or a run of theirs is open;
    TensorBoard where `report_to` names it."""
    made = _made.setdefault(trainer, {})
    reported = trainer.args.report_to if isinstance(trainer.args.report_to, list) else [trainer.args.report_to]
    for name, (module, cls) in SERVICES.items():
        tracker_class = getattr(importlib.import_module(f"preftune.callbacks.trackers.{module}"), cls)
        if name not in made and (name in reported or tracker_class.run_is_open()):
            made[name] = TrackerQueue(tracker_class())
    if "tensorboard" not in made:
        found = TensorBoardTracker.find(trainer.callback_handler.callbacks)
        made |= {} if found is None else {"tensorboard": TrackerQueue(found)}
    return [jsonl_tracker(logs_directory(trainer.args)), *made.values()]
