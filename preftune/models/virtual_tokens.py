"""Prompt learning: what a checkpoint must hold of it, and saving an average of it. Routing is in `adapters`.

PEFT writes the virtual tokens themselves, which is enough to use them and not to go on training what makes them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import PeftModel
from torch import Tensor, nn

from preftune.errors import CheckpointError
from preftune.models.adapters import active_adapter, is_prompt_learning
from preftune.models.distributed import local_shard


class VirtualTokens:
    """What is trained under prompt learning, for checkpoints: PEFT saves the virtual tokens, not what encodes them."""

    def __init__(self, model: PeftModel) -> None:
        self._encoder: nn.Module = model.prompt_encoder[active_adapter(model)]
        self._kind = str(model.active_peft_config.to_dict()["peft_type"])

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{self._kind}.{name}": local_shard(p) for name, p in self._encoder.named_parameters()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        if {n: p.shape for n, p in own.items()} != {n: p.shape for n, p in state.items()}:
            raise CheckpointError(
                f"the checkpoint holds virtual tokens with parts {sorted(state)}, this run has {sorted(own)} or other "
                "shapes. Use the PEFT config of the run that wrote it."
            )
        for name, shard in own.items():
            shard.copy_(state[name])


@contextmanager
def virtual_tokens_of(model: PeftModel, state: Mapping[str, Tensor]) -> Iterator[None]:
    """What is saved inside has the virtual tokens that `state` (the whole model's, by name) makes, not the policy's.

    PEFT saves them from the live encoder, whatever state dict it is given. Other adapters are not concerned.
    """
    if not is_prompt_learning(model):
        yield
        return
    name = active_adapter(model)
    encoder = model.prompt_encoder[name]
    other = copy.deepcopy(encoder)
    with torch.no_grad():
        for key, parameter in other.named_parameters():
            parameter.copy_(state[f"prompt_encoder.{name}.{key}"])
    model.prompt_encoder[name] = other
    try:
        yield
    finally:
        model.prompt_encoder[name] = encoder
