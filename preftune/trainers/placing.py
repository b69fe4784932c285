"""Puts a policy that no training has prepared yet where it can be scored, also where its weights are to be sharded.

transformers prepares it in `train`; its `evaluate` alone fails under FSDP2 and ZeRO-2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.utils.fsdp_utils import fsdp2_prepare_model

from preftune.models.distributed import is_sharded_by_zero3

if TYPE_CHECKING:
    from preftune.trainers.base import BaseTrainer


@contextmanager
def placed(trainer: BaseTrainer) -> Iterator[None]:
    """Holds the policy ready for forwards without gradients. FSDP2 shards it for good; `train` goes on from there."""
    prepared: list[Any] = trainer.accelerator._models  # transformers prepares for itself where this is empty
    if prepared or not trainer.is_sharded:
        yield
    elif trainer.is_fsdp_enabled:
        if trainer.accelerator.is_fsdp2:
            sharded: Any = fsdp2_prepare_model(trainer.accelerator, trainer.model)  # the same object
            trainer.model = trainer.model_wrapped = sharded
            prepared.append(trainer.model)
        yield
    else:
        if not is_sharded_by_zero3(trainer.model):
            trainer.model.to(trainer.args.device)
        prepared.append(trainer.model)
        trainer.deepspeed = trainer.model
        try:
            yield
        finally:
            prepared.clear()
            trainer.deepspeed = None
