"""Makes FSDP2 and DeepSpeed run in CPU processes over gloo, for tests alone.

Neither library offers it by its own switches: accelerate silently trains by DDP instead, DeepSpeed compiles a lot.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState


def prepare_backend() -> None:
    """What the environment of this process asks for; call it before the first config is built."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        allow_fsdp_on_cpu()
    if has_deepspeed():
        leave_out_shared_memory_op()


def allow_fsdp_on_cpu() -> None:
    """accelerate turns FSDP on in a world of MULTI_GPU and its like alone; a MULTI_CPU world becomes plain DDP."""
    original = AcceleratorState.__init__

    def start(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        if "_mixed_precision" not in AcceleratorState._shared_state:
            PartialState(cpu=True)
            if PartialState._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
                PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    AcceleratorState.__init__ = start


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def leave_out_shared_memory_op() -> None:
    """Plain gloo is enough; a process killed while it builds the op leaves a lock that all later ones wait for."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    importlib.import_module("deepspeed").ops.__compatible_ops__["deepspeed_shm_comm"] = False
