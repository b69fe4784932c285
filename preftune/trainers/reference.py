"""Gives a trainer its reference model: the form that its options ask for, and the callbacks that move it.

Called once, when the policy is built and nothing has been trained yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datasets import IterableDataset
from torch import nn
from transformers import TrainerCallback

from preftune.callbacks.attach import moves_reference, reference_callbacks
from preftune.callbacks.handler import RefModelCallbackHandler
from preftune.errors import ConfigError
from preftune.models.adapters import peft_model
from preftune.models.dropout import disable_dropout
from preftune.models.load import load_model
from preftune.models.reference import make_reference, saved_adapter_reference
from preftune.models.saved_adapters import is_saved_adapter

if TYPE_CHECKING:
    from preftune.trainers.base import BaseTrainer


def attach_reference(
    trainer: BaseTrainer, ref_model: nn.Module | str | None, *, peft_is_fresh: bool, callbacks: list[TrainerCallback]
) -> None:
    """Sets `trainer.reference`, passes it to all callbacks, and adds those that move it.

    Args:
        ref_model: A model, its name, or the name of a saved adapter; None: the policy as it is now.
        peft_is_fresh: The trainer has just put the adapter on.
        callbacks: The user's.

    Raises:
        ConfigError: options that contradict each other.
        ReferenceError: there can be no such reference for this policy.
    """
    args = trainer.args
    module, adapter = _given_reference(trainer, ref_model)
    if module is not None and args.disable_dropout:
        disable_dropout(module)
    trainer.reference = make_reference(
        trainer.model,
        ref_model=module,
        peft_is_fresh=peft_is_fresh,
        ref_adapter_name=adapter,
        will_move=args.moving_reference is not None or any(map(moves_reference, callbacks)),
        precompute=trainer.stores_reference,
        streams=any(isinstance(rows, IterableDataset) for rows in trainer.held_sets),
    )
    trainer.reference.prepare(trainer.accelerator)
    trainer.callback_handler = RefModelCallbackHandler.from_handler(trainer.callback_handler, trainer.reference)
    for callback in reference_callbacks(args, trainer.reference, callbacks):
        trainer.add_callback(callback)


def _given_reference(trainer: BaseTrainer, ref_model: Any) -> tuple[nn.Module | None, str | None]:
    """The module, or the adapter of the policy, that was given as the reference."""
    args, name = trainer.args, trainer.args.ref_adapter_name
    if not isinstance(ref_model, str):
        return ref_model, name
    if peft_model(trainer.model) is None or not is_saved_adapter(ref_model):
        module = load_model(
            ref_model,
            auto_class=trainer.auto_class,
            init_kwargs=args.model_init_kwargs,
            trust_remote_code=args.trust_remote_code,
        )
        return module, name
    if name is not None:
        raise ConfigError(
            f"ref_model={ref_model!r} is a saved adapter and ref_adapter_name={name!r} another one; the reference can "
            "be only one of them."
        )
    return None, saved_adapter_reference(trainer.model, ref_model)
