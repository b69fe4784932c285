"""The import path that TRL users know for BEMA of the reference; everything here is stable and lives elsewhere.

`DPOTrainer` is the ordinary one: it passes the reference to its callbacks by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from preftune.callbacks.bema import BEMACallback
from preftune.callbacks.handler import CallbackHandlerWithRefModel

if TYPE_CHECKING:
    from preftune.trainers.dpo import DPOTrainer

__all__ = ["BEMACallback", "CallbackHandlerWithRefModel", "DPOTrainer"]


def __getattr__(name: str) -> Any:
    if name == "DPOTrainer":
        from preftune.trainers.dpo import DPOTrainer

        return DPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
