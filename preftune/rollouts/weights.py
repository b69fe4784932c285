"""The policy's weights as a checkpoint has them: whole tensors under their public names, adapters merged in.

The policy is only read: a layer is merged in a copy of it, and one layer at a time.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from preftune.errors import ConfigError
from preftune.models import structure
from preftune.models.adapters import is_prompt_learning, peft_model
from preftune.models.distributed import copy_with, full_tensor, is_sharded, on_accelerator, reshard
from preftune.rollouts.base import RolloutBackend

Weights = Iterator[tuple[str, Tensor]]
_WRAPPER = "_checkpoint_wrapped_module."  # accelerate's, around layers that recompute
ON_A_SERVER = "use rollout_backend='local'"


class Follow:
    """Gives a backend that draws with weights of its own those of the policy: before the first round, and after steps.

    A collective; every rank calls it before it draws.
    """

    def __init__(self, backend: RolloutBackend) -> None:
        self._backend = backend
        self._step: int | None = None

    def __call__(self, model: nn.Module, step: int) -> None:
        if self._backend.needs_weights and step != self._step:
            self._backend.load_weights(policy_weights(model))
            self._step = step


@torch.no_grad()
def policy_weights(model: nn.Module) -> Weights:
    """`(name, tensor)` of each weight and saved buffer, tied ones once; detached, on its own device.

    A collective where the model is sharded: every rank has to go through all of it. Loading the tensors by
    `from_pretrained` gives a model with the policy's logits (tested with LoRA, tied embeddings, mixture of experts).

    Raises:
        ConfigError: quantised weights, or adapters that cannot be merged.
    """
    policy = structure.unwrap(model)
    check_mergeable(policy, ON_A_SERVER)
    reshard(policy)
    base = without_peft(policy)
    named = _merged(base)
    sketch = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in _outline(base)}
    if set(revert_weight_conversion(base, dict(sketch))) == set(sketch):
        yield from named
    else:  # transformers stacks what checkpoints keep apart, such as experts; that needs all of them
        yield from revert_weight_conversion(base, dict(named)).items()


def check_mergeable(policy: nn.Module, instead: str) -> None:
    """Raises a ConfigError where this policy, as plain weights with the adapter merged in, would be another one.

    Args:
        instead: What to do, beside training without the adapter.
    """
    quantised = [name for name, p in policy.named_parameters() if not p.is_floating_point()]
    if quantised or vars(without_peft(policy)).get("hf_quantizer") is not None:
        raise ConfigError(
            "rollouts would draw from a copy of the weights, and the weights of the policy are quantised"
            f"{''.join(f' ({name!r})' for name in quantised[:1])}. Load it without quantisation, or {instead}."
        )
    peft = peft_model(policy)
    if peft is None:
        return
    if is_prompt_learning(peft):
        raise ConfigError(
            "rollouts would draw from a copy of the weights, and the virtual tokens of prompt learning are in none of "
            f"them. Take another adapter such as LoRA, or {instead}."
        )
    base = peft.get_base_model()
    uses = Counter(id(p) for module in base.modules() for p in module._parameters.values() if p is not None)
    for name, layer in adapter_layers(base):
        if isinstance(layer, BaseTunerLayer) and any(uses[id(p)] > 1 for p in layer.get_base_layer().parameters()):
            raise ConfigError(
                f"the adapter on {name!r} would, once merged for rollouts, also change the module that shares its "
                f"weight (tied embeddings). Leave that module out of target_modules, or {instead}."
            )


def without_peft(policy: nn.Module) -> Any:
    """The model that PEFT was put on; its layers still go through the adapters."""
    peft = peft_model(policy)
    return policy if peft is None else peft.get_base_model()


def _outline(base: nn.Module) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and type of every weight of the model without adapters, without gathering anything."""
    layers = dict(adapter_layers(base))
    seen: set[int] = set()
    for name, tensor in base.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and not _is_inside(name, layers):
            seen.add(id(tensor))
            yield _public(name), tuple(tensor.shape), tensor.dtype
    for name, layer in layers.items():
        for key, tensor in original(layer).state_dict().items():
            yield _public(f"{name}.{key}"), tuple(tensor.shape), tensor.dtype


def _merged(base: nn.Module) -> Weights:
    """Weights outside adapted layers, whole where they are sharded; then those of each adapted layer, merged."""
    layers = dict(adapter_layers(base))
    seen: set[int] = set()
    for name, tensor in base.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and not _is_inside(name, layers):
            seen.add(id(tensor))
            yield _public(name), full_tensor(tensor)
    for name, layer in layers.items():
        for key, tensor in without_adapter(layer).state_dict().items():
            yield _public(f"{name}.{key}"), tensor


def without_adapter(layer: Any) -> nn.Module:
    """A whole copy of the layer below, with the active adapters merged into it (a collective where it is sharded)."""
    if is_sharded(layer.parameters()):
        scratch = copy_with(layer, lambda p: nn.Parameter(on_accelerator(p).clone(), requires_grad=False))
    else:
        scratch = copy.deepcopy(layer)
    if isinstance(scratch, AuxiliaryTrainingWrapper):
        return scratch.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    for part in reversed([m for m in scratch.modules() if isinstance(m, BaseTunerLayer)]):
        if not part.disable_adapters:
            part.merge(adapter_names=list(part.active_adapters))  # pyright: ignore
    return scratch.get_base_layer()


def original(layer: Any) -> nn.Module:
    """The layer below, without adapters; of modules that are trained whole, the one that is in use."""
    if isinstance(layer, BaseTunerLayer):
        return layer.get_base_layer()
    whole = layer.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
    return whole.get_base_layer() if isinstance(whole, BaseTunerLayer) else whole


def adapter_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost modules that PEFT put in the place of others, by name."""
    for name, child in module.named_children():
        if isinstance(child, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield prefix + name, child
        else:
            yield from adapter_layers(child, f"{prefix}{name}.")


def _is_inside(name: str, layers: dict[str, Any]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[: i + 1]) in layers for i in range(len(parts)))


def _public(name: str) -> str:
    return name.replace(_WRAPPER, "")
