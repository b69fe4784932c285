"""A copy of the policy to decode with: plain weights, whole on this process, adapters merged in, perhaps in bfloat16.

The policy's own weights are only read, one after the other; a copy of shards is emptied when it has served.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from preftune.models import structure
from preftune.models.adapters import peft_model
from preftune.models.distributed import copy_with, is_sharded, on_accelerator
from preftune.rollouts.weights import adapter_layers, check_mergeable, original, without_adapter, without_peft


class Snapshot:
    """The copy and where each of its weights comes from.

    Of a policy that is whole here the copy keeps its weights from one call to the next. Of a sharded one (FSDP2,
    ZeRO-3) it has them only while it is `filled`: otherwise it would take, all through training, the memory that
    sharding is for. A fill gathers every weight from all ranks once; beyond the copy it holds one layer at a time.

    Args:
        policy: Unwrapped; a PeftModel or a plain model, `reshard`ed when it is copied and at every fill.
        dtype: Of the copy's weights; None: each has the policy's.

    Raises:
        ConfigError: quantised weights, or an adapter that cannot be merged.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype | None = None) -> None:
        check_mergeable(policy, "use rollout_precision='model' with weights that are whole (DDP, ZeRO-2)")
        self._policy = policy
        self._dtype = dtype
        self.is_gathered = is_sharded(policy.parameters())
        sources: dict[int, nn.Parameter] = {}

        def empty(parameter: nn.Parameter) -> nn.Parameter:
            copied = nn.Parameter(_nothing(parameter), requires_grad=False)
            sources[id(copied)] = parameter
            return copied

        whole = copy_with(policy, empty)
        layers = dict(adapter_layers(without_peft(whole)))
        self._merged = [(layer, original(layers[name])) for name, layer in adapter_layers(without_peft(policy))]
        peft = peft_model(whole)
        self.model: nn.Module = whole if peft is None else peft.base_model.unload()  # pyright: ignore
        for name in ("forward", "_original_forward", "generate"):  # put around the policy by accelerate and FSDP2
            vars(self.model).pop(name, None)
        self.model.eval()
        merged = {id(p) for _, copied in self._merged for p in copied.parameters()}
        self._copied = [(p, sources[id(p)]) for p in self.model.parameters() if id(p) not in merged]
        buffers = dict(without_peft(policy).named_buffers())
        self._buffers = [(b, buffers[name]) for name, b in self.model.named_buffers() if name in buffers]

    @contextmanager
    def filled(self) -> Iterator[nn.Module]:
        """The copy with the policy's weights of now (a collective where the policy is sharded).

        All of them are taken anew: what writes to `.data` leaves no trace to go by.
        """
        try:
            self._fill()
            yield self.model
        finally:
            if self.is_gathered:
                for copied in self.model.parameters():
                    copied.data = _nothing(copied)

    @torch.no_grad()
    def _fill(self) -> None:
        for copied, live in self._copied:
            self._put(copied, on_accelerator(live))
        for copied, live in self._buffers:
            copied.copy_(live)
        for layer, base in self._merged:
            # one layer at a time is merged in its own precision, then rounded
            with torch.autocast(structure.input_device(self._policy).type, enabled=False):
                merged = dict(without_adapter(layer).named_parameters())
            for name, copied in base.named_parameters():
                self._put(copied, merged[name].detach())

    def _put(self, copied: nn.Parameter, weight: Tensor) -> None:
        copied.data = weight if self._dtype is None or not weight.is_floating_point() else weight.to(self._dtype)


def _nothing(parameter: Tensor) -> Tensor:
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device)
