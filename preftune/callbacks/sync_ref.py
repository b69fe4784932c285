"""TR-DPO's soft update (arXiv:2404.09656): every so many optimizer steps the reference takes a step towards the policy.

ref <- alpha * policy + (1 - alpha) * ref. Works with full models and with adapters, in any trainer of transformers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from preftune.callbacks.handler import ReferenceMover, as_reference_model
from preftune.errors import ConfigError, ReferenceError
from preftune.models.distributed import unwrap
from preftune.models.reference import MovableReference, ReferenceModel, blend_modules_


class SyncRefModelCallback(ReferenceMover):
    """Moves the reference at every optimizer step that `ref_model_sync_steps` divides.

    Args:
        ref_model: The `ReferenceModel`, or a module of the policy's architecture, which is then frozen.
        accelerator: Not needed; kept for scripts that pass it.
        mixup_alpha: In [0, 1]; None reads `ref_model_mixup_alpha` of the training arguments.
        sync_steps: At least 1; None reads `ref_model_sync_steps` of the training arguments.

    Raises:
        ReferenceError: a reference that cannot move.
    """

    alpha_option: ClassVar[str] = "ref_model_mixup_alpha"
    steps_option: ClassVar[str] = "ref_model_sync_steps"

    def __init__(
        self,
        ref_model: nn.Module | ReferenceModel,
        accelerator: Any = None,
        *,
        mixup_alpha: float | None = None,
        sync_steps: int | None = None,
    ) -> None:
        reference = as_reference_model(ref_model)
        if not isinstance(reference, MovableReference):
            form = "nothing" if reference is None else reference.form
            raise ReferenceError(f"SyncRefModelCallback needs a reference that can move; got {form!r}.")
        self.reference = reference
        self.accelerator = accelerator
        self.mixup_alpha = mixup_alpha
        self.sync_steps = sync_steps

    @staticmethod
    def sync_target_model(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        """target <- alpha * model + (1 - alpha) * target, by parameter name; buffers are copied."""
        blend_modules_(model, target_model, alpha)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._options(args)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, reference: Any = None, **kwargs: Any
    ) -> None:
        alpha, steps = self._options(args)
        if state.global_step % steps == 0:
            self._target(reference).blend_(None, alpha, policy=model, step=state.global_step)

    def _target(self, reference: ReferenceModel | None) -> MovableReference:
        """The trainer's own object where it holds the same module: its float32 averages are in the checkpoints."""
        own = self.reference.module
        if own is None or not isinstance(reference, MovableReference) or reference.module is None:
            return self.reference
        return reference if unwrap(reference.module) is unwrap(own) else self.reference

    def _options(self, args: Any) -> tuple[float, int]:
        try:
            alpha = getattr(args, self.alpha_option) if self.mixup_alpha is None else self.mixup_alpha
            steps = getattr(args, self.steps_option) if self.sync_steps is None else self.sync_steps
        except AttributeError as error:
            raise ConfigError(
                f"{type(args).__name__} has no {self.alpha_option} and {self.steps_option}. Give them to the callback: "
                f"{type(self).__name__}(ref_model, accelerator, mixup_alpha=0.6, sync_steps=512)."
            ) from error
        if not 0.0 <= alpha <= 1.0 or steps < 1:
            raise ConfigError(f"alpha is {alpha} and steps is {steps}; wanted a share in [0, 1] and at least 1 step.")
        return alpha, steps


class SyncTeacherModelCallback(SyncRefModelCallback):
    """The same for the teacher of SDFT and SDPO, with the options `teacher_update_rate` and `teacher_sync_steps`."""

    alpha_option = "teacher_update_rate"
    steps_option = "teacher_sync_steps"
