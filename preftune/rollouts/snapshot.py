"""A copy of the policy's weights in bfloat16 to decode with: half the memory traffic, and adapters merged into it.

The policy's own weights are only read. The copy costs two bytes per parameter for as long as the backend lives.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from preftune.errors import ConfigError
from preftune.models.adapters import is_prompt_learning, peft_model
from preftune.rollouts.weights import without_adapter

DTYPE = torch.bfloat16


class Snapshot:
    """The copy and where each of its weights comes from.

    Args:
        policy: Unwrapped, its weights whole on this process; a PeftModel or a plain model.

    Raises:
        ConfigError: quantised weights, or an adapter that cannot be merged.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._check(policy)
        copies: dict[int, Any] = {id(p): _empty_copy(p) for p in policy.parameters()}
        sources = {id(copies[id(p)]): p for p in policy.parameters()}
        whole = copy.deepcopy(policy, dict(copies))
        peft = peft_model(whole)
        live_layers = list(_outermost_adapter_layers(policy))
        copied_layers = list(_outermost_adapter_layers(whole))
        self._merged = [
            (live, copied.get_base_layer()) for live, copied in zip(live_layers, copied_layers, strict=True)
        ]
        self.model: Any = whole if peft is None else peft.base_model.unload()  # pyright: ignore
        for name in ("forward", "_original_forward"):  # accelerate's autocast around the policy
            vars(self.model).pop(name, None)
        self.model.eval().requires_grad_(False)
        by_layer = {id(p) for _, base in self._merged for p in base.parameters()}
        self._refuse_shared(by_layer)
        self._copied = [(p, sources[id(p)]) for p in self.model.parameters() if id(p) not in by_layer]
        live_model = policy if (live_peft := peft_model(policy)) is None else live_peft.get_base_model()
        buffers = dict(live_model.named_buffers())
        self._buffers = [(b, buffers[name]) for name, b in self.model.named_buffers() if name in buffers]

    @staticmethod
    def _check(policy: nn.Module) -> None:
        peft = peft_model(policy)
        if peft is not None and is_prompt_learning(peft):
            raise ConfigError(
                "rollouts in bfloat16 need weights to merge the adapter into, and prompt learning has virtual tokens; "
                "use precision='model'"
            )
        quantised = [name for name, p in policy.named_parameters() if not p.is_floating_point()]
        if quantised:
            raise ConfigError(
                f"rollouts in bfloat16 copy the weights, and {quantised[0]!r} is quantised; use precision='model'"
            )

    def _refuse_shared(self, adapted: set[int]) -> None:
        uses = Counter(id(p) for module in self.model.modules() for p in module._parameters.values())
        if any(uses[key] > 1 for key in adapted):
            raise ConfigError(
                "an adapter sits on a weight that another module shares (tied embeddings): merging it would change "
                "both; use precision='model' for rollouts"
            )

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes the policy's weights of now. Always all of them: what writes to `.data` leaves no trace to go by."""
        for copied, live in (*self._copied, *self._buffers):
            copied.copy_(live)
        for layer, base in self._merged:
            # one layer at a time is merged in its own precision, then rounded
            merged = dict(without_adapter(layer).named_parameters())
            for name, copied in base.named_parameters():
                copied.copy_(merged[name])


def _empty_copy(parameter: nn.Parameter) -> nn.Parameter:
    data: Tensor = torch.empty_like(parameter, dtype=DTYPE if parameter.is_floating_point() else parameter.dtype)
    return nn.Parameter(data, requires_grad=False)


def _outermost_adapter_layers(module: nn.Module) -> Iterator[Any]:
    for child in module.children():
        if isinstance(child, BaseTunerLayer):
            yield child
        else:
            yield from _outermost_adapter_layers(child)
