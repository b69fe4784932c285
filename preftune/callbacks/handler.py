"""The callback handler that passes the reference to every event, and what a callback that moves it says of itself.

`on_init_end` fires in the constructor of transformers' trainer, before there is a reference: start in `on_train_begin`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from preftune.errors import ReferenceError
from preftune.models.reference import FrozenCopy, MovableReference, ReferenceModel


class ReferenceMover(TrainerCallback):
    """A callback that may move the reference. Subclass it, so that the trainer makes a reference that can move."""

    @property
    def moves_reference(self) -> bool:
        """Whether this one does, with its options."""
        return True


def moves_reference(callback: Any) -> bool:
    """Whether a callback (an object, or a class as transformers allows) moves the reference."""
    if isinstance(callback, type) and issubclass(callback, ReferenceMover):
        callback = callback()
    return isinstance(callback, ReferenceMover) and callback.moves_reference


def as_reference_model(ref_model: nn.Module | ReferenceModel | None) -> ReferenceModel | None:
    """Wraps a bare module, which is thereby frozen and put in eval mode."""
    return FrozenCopy(ref_model) if isinstance(ref_model, nn.Module) else ref_model


class RefModelCallbackHandler(CallbackHandler):
    """transformers' handler, which also passes to every event:

    - `ref_model`: the frozen reference module, or None where the reference is no module of its own;
    - `reference`: the `ReferenceModel`, or None without one.

    Args:
        ref_model: A module, a `ReferenceModel` or None.
    """

    def __init__(
        self,
        callbacks: list[Any],
        model: Any,
        ref_model: nn.Module | ReferenceModel | None,
        processing_class: Any,
        optimizer: Any,
        lr_scheduler: Any,
    ) -> None:
        self.reference = as_reference_model(ref_model)
        super().__init__(callbacks, model, processing_class, optimizer, lr_scheduler)

    @classmethod
    def from_handler(cls, handler: CallbackHandler, reference: ReferenceModel | None) -> RefModelCallbackHandler:
        """A handler with the callbacks and all other attributes of `handler`.

        Raises:
            ReferenceError: a callback moves the reference, and it cannot move.
        """
        made = cls.__new__(cls)
        vars(made).update(vars(handler))
        made.reference = reference
        for callback in made.callbacks:
            made._require_movable(callback)
        return made

    @property
    def ref_model(self) -> nn.Module | None:
        return self.reference.module if self.reference is not None else None

    @ref_model.setter
    def ref_model(self, ref_model: nn.Module | ReferenceModel | None) -> None:
        self.reference = as_reference_model(ref_model)

    def add_callback(self, callback: Any) -> None:
        """Adds a callback.

        Raises:
            ReferenceError: it moves the reference, and that cannot move.
        """
        made = callback() if isinstance(callback, type) else callback
        self._require_movable(made)
        super().add_callback(made)

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return super().call_event(
            event, args, state, control, ref_model=self.ref_model, reference=self.reference, **kwargs
        )

    def _require_movable(self, callback: Any) -> None:
        reference = self.reference
        if reference is None or isinstance(reference, MovableReference):
            return
        if moves_reference(callback):
            raise ReferenceError(
                f"{type(callback).__name__} moves the reference, but a reference of the form {reference.form!r} cannot "
                "move. Pass the callback to the constructor of the trainer (callbacks=[...]) without "
                "precompute_ref_log_probs: it then makes a reference that can."
            )


CallbackHandlerWithRefModel = RefModelCallbackHandler
