"""Which callbacks a trainer attaches for its options, as a pure function of the options and the reference.

Contradictions are found here, when the trainer is built: two movers at once, or a mover of what cannot move.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback

from preftune.callbacks.bema import BEMACallback
from preftune.callbacks.handler import moves_reference
from preftune.callbacks.sync_ref import SyncRefModelCallback, SyncTeacherModelCallback
from preftune.configs.distillation import DistillationConfig
from preftune.configs.reference import ReferenceConfig
from preftune.errors import ConfigError
from preftune.models.reference import MovableReference, ReferenceModel

_REMEDY = {
    "stored": "Set precompute_ref_log_probs=False",
    "disabled_adapter": "Let the trainer make the reference, so that it becomes a second adapter",
    "none": "Set beta above 0, so that there is a reference",
}


def reference_callbacks(
    args: ReferenceConfig | DistillationConfig, reference: ReferenceModel | None, callbacks: Iterable[Any] = ()
) -> list[TrainerCallback]:
    """The callbacks that move the reference as `args` ask; an empty list where it stays.

    Args:
        callbacks: The user's own, which may move it too.

    Raises:
        ConfigError: more than one callback would move the reference, or it cannot move.
    """
    asked = [name for name, wanted in _asked(args).items() if wanted]
    asked += [type(callback).__name__ for callback in callbacks if moves_reference(callback)]
    if len(asked) > 1:
        raise ConfigError(
            f"{' and '.join(asked)} would each move the reference model, and one would undo the other. Keep one of "
            "them."
        )
    if not asked:
        return []
    if not isinstance(reference, MovableReference):
        form = "none" if reference is None else reference.form
        remedy = _REMEDY.get(form, "Use another form of reference")
        raise ConfigError(
            f"{asked[0]} moves the reference model, but a reference of the form {form!r} cannot move. {remedy}, or "
            f"leave {asked[0].split('=')[0]} out."
        )
    if isinstance(args, DistillationConfig):
        return [SyncTeacherModelCallback(reference)] if args.moving_reference is not None else []
    if args.sync_ref_model:
        return [SyncRefModelCallback(reference)]
    return [_bema(args)] if args.bema_ref_model else []


def _asked(args: ReferenceConfig | DistillationConfig) -> dict[str, bool]:
    if isinstance(args, DistillationConfig):
        return {"teacher_model_kind='ema'": args.moving_reference is not None}
    return {"sync_ref_model=True": args.sync_ref_model, "bema_ref_model=True": args.bema_ref_model}


def _bema(args: ReferenceConfig) -> BEMACallback:
    return BEMACallback(
        update_freq=args.bema_update_freq,
        ema_power=args.bema_ema_power,
        bias_power=args.bema_bias_power,
        lag=args.bema_lag,
        update_after=args.bema_update_after,
        multiplier=args.bema_multiplier,
        min_ema_multiplier=args.bema_min_ema_multiplier,
        device=args.bema_device,
        update_ref_model=True,
        ref_model_update_freq=args.ref_model_update_freq,
        ref_model_update_after=args.ref_model_update_after,
    )


__all__ = ["moves_reference", "reference_callbacks"]
