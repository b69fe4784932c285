"""Whole training runs for tests: options, digests, and a child process that dies at a chosen point.

`digest` covers everything that moves, so that two runs are equal or not, never nearly.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from preftune.models.distributed import full_state_dict, unwrap
from preftune.trainers.extras import moving_state


def options(output_dir: Any, **changes: Any) -> dict[str, Any]:
    """Arguments of a config for a short run in float32 on the CPU that logs every step and reports nowhere."""
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 0,
    } | changes


# by torch, by ZeRO-2 and by ZeRO-3
_OPTIMIZER_STATE = (
    "state", "base_optimizer_state", "single_partition_of_fp32_groups", "optimizer_state_dict", "fp32_flat_groups"
)  # fmt: skip


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, DTensor):
        value = value.to_local()  # this rank's part
    if isinstance(value, torch.Tensor):
        sha.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.ndim else b"")
        sha.update(repr(value.item()).encode() if value.ndim == 0 else b"")
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            sha.update(str(key).encode())
            _feed(sha, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(sha, item)
    else:
        sha.update(repr(value).encode())


def digest(trainer: Any) -> str:
    """sha256 of weights (all adapters), optimizer, scheduler, reference and averages; a collective where sharded."""
    sha = hashlib.sha256()
    _feed(sha, full_state_dict(unwrap(trainer.model), {}))
    optimizer = trainer.optimizer.state_dict()
    _feed(sha, {name: optimizer[name] for name in _OPTIMIZER_STATE if name in optimizer})
    _feed(sha, trainer.lr_scheduler.state_dict())
    _feed(sha, moving_state(trainer))
    return sha.hexdigest()


def logged(trainer: Any, key: str) -> list[float]:
    """All values logged under a name, in order."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def killed(run: Callable[[], None]) -> int:
    """Runs in a forked child that kills itself with SIGKILL (no `finally` runs); returns the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
