"""Keeps what a forward saves for its backward in host memory; weights and small tensors stay where they are.

Values are copied there and back unchanged, so gradients are those of a run without it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from preftune.models.distributed import local_shard

MIN_BYTES = 1024


@dataclass
class Moved:
    """What went to host memory inside `offloading`: number of tensors and their bytes."""

    tensors: int = 0
    nbytes: int = 0


@contextmanager
def offloading(model: nn.Module, *, min_bytes: int = MIN_BYTES, from_host: bool = False) -> Iterator[Moved]:
    """Forwards inside keep their saved activations in host memory, pinned where there is a GPU.

    Weights are saved for backward as well, and stay on the device: moving them would cost a copy of the model at each
    step. With gradient checkpointing little is saved outside the layers, and little is moved.

    Args:
        min_bytes: Smaller tensors are not worth a transfer.
        from_host: Copy tensors that are in host memory already, too; for tests on a machine without a GPU.
    """
    weights = {local_shard(p).untyped_storage().data_ptr() for p in model.parameters()}
    moved = Moved()

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if not (from_host or tensor.device.type != "cpu") or tensor.nbytes < min_bytes or _is_weight(tensor, weights):
            return tensor
        pinned = tensor.device.type == "cuda"
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        moved.tensors += 1
        moved.nbytes += tensor.nbytes
        return tensor.device, there.copy_(tensor, non_blocking=pinned)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, there = packed
        return there.to(device, non_blocking=there.is_pinned())

    with saved_tensors_hooks(pack, unpack):
        yield moved


def _is_weight(tensor: Tensor, weights: set[int]) -> bool:
    """A parameter or a view of one; what FSDP2 gathers for a forward is a parameter too."""
    owner = tensor if tensor._base is None else tensor._base
    if isinstance(tensor, nn.Parameter) or isinstance(owner, nn.Parameter):
        return True
    return tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() in weights
