"""What a checkpoint holds besides policy, optimizer and random states: gathered from a trainer, and put back into it.

One rule for what moves: the reference if it moves, and every callback with torch's `Stateful` methods.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import gather_object
from torch.distributed.checkpoint.stateful import Stateful
from transformers import TrainerCallback

from preftune.errors import CheckpointError
from preftune.models.adapters import is_prompt_learning, peft_model
from preftune.models.reference import LiveReference, MovableReference, Stored
from preftune.models.virtual_tokens import VirtualTokens
from preftune.trainers.metrics import merged
from preftune.trainers.state import load_extras, save_extras

_PREFIX = 256  # values of each weight that identify it

if TYPE_CHECKING:
    from preftune.trainers.base import BaseTrainer


def moving_parts(trainer: BaseTrainer) -> dict[str, Stateful]:
    """Name -> object with `state_dict` and `load_state_dict`; callbacks of one class are numbered."""
    parts: dict[str, Stateful] = {}
    parts |= trainer.own_parts()
    if isinstance(trainer.reference, MovableReference) and trainer.reference_moves:
        parts["reference"] = cast(Stateful, trainer.reference)
    tokens = virtual_tokens(trainer)
    if tokens is not None:
        parts["virtual_tokens"] = cast(Stateful, tokens)
    seen: Counter[str] = Counter()
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, Stateful):
            name = type(callback).__name__
            seen[name] += 1
            parts[name if seen[name] == 1 else f"{name}-{seen[name]}"] = callback
    return parts


def virtual_tokens(trainer: BaseTrainer) -> VirtualTokens | None:
    """What is trained under prompt learning, else None."""
    model = peft_model(trainer.model)
    return VirtualTokens(model) if model is not None and is_prompt_learning(model) else None


def load_virtual_tokens(trainer: BaseTrainer, checkpoint: str) -> None:
    """Puts the virtual tokens of a checkpoint into the policy, and nothing else."""
    saved = load_extras(checkpoint, _shard_name(trainer)) if trainer.is_sharded else load_extras(checkpoint)["moving"]
    tokens = virtual_tokens(trainer)
    assert tokens is not None
    tokens.load_state_dict(saved["virtual_tokens"])


def moving_state(trainer: BaseTrainer) -> dict[str, Any]:
    """The state of all moving parts; this rank's shards where the model is sharded."""
    return {name: part.state_dict() for name, part in moving_parts(trainer).items()}


def save_running_state(trainer: BaseTrainer, folder: str) -> None:
    """Writes all of it (a collective). Sharded models write one file a rank."""
    mine = {"metrics": trainer.train_metrics.state_dict(), "tr_loss": trainer._tr_loss.item()}
    own = trainer.rank_state()
    if own:
        save_extras(folder, own, _rank_name(trainer))
    mine["has_state"] = bool(own)
    if isinstance(trainer.reference, Stored):
        trainer.reference.save()
    ranks = gather_object([mine])  # each its own: sums taken in another order would end in other bits
    if trainer.is_sharded:
        save_extras(folder, moving_state(trainer), _shard_name(trainer))
    if not trainer.args.should_save:
        return
    whole = {
        "layout": trainer.layout,
        "reference": reference_identity(trainer),
        "tokens_seen": float(trainer.tokens_seen),
        "ranks": ranks,
        "running": {
            "total_loss": trainer._total_loss_scalar,
            "last_logged": trainer._globalstep_last_logged,
        },
        "moving": {} if trainer.is_sharded else moving_state(trainer),
    }
    save_extras(folder, whole)


def load_running_state(trainer: BaseTrainer, checkpoint: str) -> None:
    """Puts back what `save_running_state` wrote; loss sums are restored later, in `on_train_begin`.

    Raises:
        CheckpointError: the checkpoint is of a run with another layout or other moving parts.
    """
    saved = load_extras(checkpoint)
    if saved["layout"] != trainer.layout:
        raise CheckpointError(
            f"{checkpoint} was written with attention layout {saved['layout']!r}, this run uses {trainer.layout!r}: "
            f"the numbers would differ in their last bits. Set attention_layout={saved['layout']!r}."
        )
    ranks, world = saved["ranks"], trainer.accelerator.num_processes
    if trainer.is_sharded and len(ranks) != world:
        raise CheckpointError(
            f"{checkpoint} holds the shards of {len(ranks)} processes, and this run has {world}. Go on with as many as "
            "wrote it, or start a new run from the saved model."
        )
    if saved["reference"] != reference_identity(trainer):
        raise CheckpointError(
            f"the reference of this run is not that of the run that wrote {checkpoint}: it was "
            f"{saved['reference']!r}, it is {reference_identity(trainer)!r}. Give the trainer the model that the run "
            "began with (the checkpoint's weights are loaded into it), and the same reference options."
        )
    moving = load_extras(checkpoint, _shard_name(trainer)) if trainer.is_sharded else saved["moving"]
    _load_moving(checkpoint, moving_parts(trainer), moving)
    trainer.tokens_seen = saved["tokens_seen"]
    if len(ranks) != world:
        mean = sum(rank["tr_loss"] for rank in ranks) / len(ranks)
        together = merged(rank["metrics"] for rank in ranks)
        ranks = [{"tr_loss": mean, "metrics": together if n == 0 else {}} for n in range(world)]
    if any(rank["has_state"] for rank in saved["ranks"]):
        if len(saved["ranks"]) != world:
            raise CheckpointError(
                f"{checkpoint} was written in the middle of a round by {len(saved['ranks'])} processes, each with its "
                f"own completions, and this run has {world}. Go on with as many, or from a checkpoint between rounds."
            )
        trainer.load_rank_state(load_extras(checkpoint, _rank_name(trainer)))
    mine = ranks[trainer.accelerator.process_index]
    trainer.train_metrics.load_state_dict(mine["metrics"])
    trainer.train_metrics.to(trainer.args.device)
    trainer.running_totals = saved["running"] | {"tr_loss": mine["tr_loss"]}


class RestoreRunningTotals(TrainerCallback):
    """Puts loss sums back after the training loop has set them to zero, so that a log window may span a resume."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, running = self.trainer, self.trainer.running_totals
        if running is None:
            return
        trainer.running_totals = None
        trainer._tr_loss = torch.tensor(running["tr_loss"], device=args.device)
        trainer._total_loss_scalar = running["total_loss"]
        trainer._globalstep_last_logged = running["last_logged"]
        trainer._initial_global_step = 0


def reference_identity(trainer: BaseTrainer) -> str:
    """What a fixed reference is: its form and the start of each of its weights; of a moving one the form alone.

    A fixed reference is not saved, so a resumed run must have been built with the same one.
    """
    reference = trainer.reference
    if reference is None:
        return "none"
    if isinstance(reference, Stored):
        return f"stored {reference.identity}"
    if trainer.reference_moves or trainer.is_sharded or not isinstance(reference, LiveReference):
        return reference.form
    sha = hashlib.sha256()
    for name, tensor in sorted(reference.weights(trainer.model).items()):
        sha.update(name.encode())
        sha.update(tensor.detach().flatten()[:_PREFIX].float().cpu().numpy().tobytes())
    return f"{reference.form} {sha.hexdigest()[:16]}"


def _rank_name(trainer: BaseTrainer) -> str:
    return f"preftune_rank_{trainer.args.process_index}"


def _shard_name(trainer: BaseTrainer) -> str:
    return f"preftune_state_{trainer.args.process_index}"


def _load_moving(checkpoint: str, parts: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    if set(parts) != set(saved):
        raise CheckpointError(
            f"{checkpoint} holds the state of {sorted(saved) or 'nothing'} besides the policy, this run moves "
            f"{sorted(parts) or 'nothing'}. Use the reference options and callbacks of the run that wrote it."
        )
    for name, part in parts.items():
        part.load_state_dict(saved[name])
