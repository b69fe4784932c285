"""Parameters however they are laid out: whole, FSDP2 shards (DTensor) or ZeRO-3 partitions, and the way between.

What is elementwise runs on `local_shard`s and gathers nothing; `assemble` and `full_tensor` are collectives.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from preftune.errors import ReferenceError
from preftune.models.structure import unwrap

# What hooks, FSDP2 (beside its class) and ZeRO-3 keep in a module's `__dict__`; transformers marks where it has hooks.
_FOREIGN = re.compile(r"hook|fsdp|composable_api|^ds_")


def is_zero3(parameter: Tensor) -> bool:
    """True for a parameter that DeepSpeed has partitioned: its own data are empty, the shard is `ds_tensor`."""
    return "ds_id" in vars(parameter)


def is_sharded_by_zero3(model: nn.Module) -> bool:
    """Whether ZeRO-3 has partitioned the model; its first parameter tells."""
    return any(is_zero3(p) for p in islice(model.parameters(), 1))


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether different ranks hold different parts of these parameters."""
    return any(isinstance(p, DTensor) or is_zero3(p) for p in parameters)


def will_be_sharded(accelerator: Any) -> bool:
    """Whether training spreads the weights of the policy over ranks: FSDP or ZeRO-3."""
    kind = accelerator.distributed_type.value
    return kind == "FSDP" or (kind == "DEEPSPEED" and accelerator.state.deepspeed_plugin.zero_stage == 3)


@contextmanager
def loaded_whole() -> Iterator[None]:
    """Models that are loaded within are whole on every rank, and each calls them as often as it needs.

    ZeRO-3 would partition them as they are loaded: every call would be a collective.
    """
    from transformers.integrations import deepspeed as switch

    before = switch._hf_deepspeed_config_weak_ref
    switch.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        switch._hf_deepspeed_config_weak_ref = before


def size_of(parameter: Any) -> int:
    """Elements of the whole parameter."""
    return parameter.ds_numel if is_zero3(parameter) else parameter.numel()


def local_shard(parameter: Tensor) -> Tensor:
    """The part that this rank holds, detached and sharing memory: writing to it writes the parameter."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        if is_zero3(parameter):
            return _zero3_shard(parameter)
        return parameter.detach()


def _zero3_shard(parameter: Any) -> Tensor:
    """The partition without the padding that the last rank has."""
    shard = parameter.ds_tensor
    start = dist.get_rank(parameter.ds_process_group) * shard.numel()
    return shard.detach()[: max(0, min(shard.numel(), parameter.ds_numel - start))]


def follow_shards(parameters: Iterable[Tensor]) -> None:
    """Call it after writes to shards: ZeRO-3 keeps small parameters whole beside them, and forwards read the whole.

    A collective there; elsewhere it does nothing.
    """
    whole: list[Any] = [p for p in parameters if is_zero3(p) and p.numel()]
    if whole:
        whole[0].partition(whole)
        whole[0].all_gather(whole)


def reshard(model: nn.Module) -> None:
    """Gives FSDP2 groups their shards back: a forward without backward leaves the outer ones whole.

    `named_parameters()` would then mix tensors and DTensors. Call it before anything here; elsewhere it does nothing.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def callable_alone(model: nn.Module) -> Iterator[None]:
    """Lets a model be called that ZeRO-3 partitioned while it was loaded and no engine has taken over yet.

    For its call each module gathers the parameters of its own, without gradients. On any other model it does nothing.
    """
    inner = unwrap(model)
    if not is_sharded_by_zero3(inner) or "ds_id" in vars(inner):  # the engine numbers the modules that it looks after
        yield
        return
    import deepspeed  # pyright: ignore[reportMissingImports]

    gathered: list[Any] = []

    def gather(module: nn.Module, _: Any) -> None:
        gathered.append(deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False))))
        gathered[-1].__enter__()

    def release(*_: Any) -> None:
        gathered.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for module in inner.modules():
            if any(map(is_zero3, module.parameters(recurse=False))):
                hooks.callback(module.register_forward_pre_hook(gather).remove)
                hooks.callback(module.register_forward_hook(release, always_call=True).remove)
        yield


def full_tensor(parameter: Tensor) -> Tensor:
    """The whole parameter, detached, on its own device (a collective where it is sharded)."""
    if is_zero3(parameter):
        import deepspeed  # pyright: ignore[reportMissingImports]

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    whole = parameter.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def on_accelerator(parameter: Tensor) -> Tensor:
    """`full_tensor` where it is computed with: FSDP2 may keep shards on the CPU."""
    whole = full_tensor(parameter)
    return whole.to(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else whole


def assemble(parameter: Tensor, shard: Tensor) -> Tensor:
    """The whole tensor whose part on each rank is `shard`, cut as `parameter` is (a collective where it is sharded)."""
    if isinstance(parameter, DTensor):
        local = shard.to(parameter.to_local().device)
        whole = DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
        return whole.full_tensor()
    if is_zero3(parameter):
        return _assemble_zero3(parameter, shard)
    return shard


def _assemble_zero3(parameter: Any, shard: Tensor) -> Tensor:
    padded = torch.zeros(parameter.ds_tensor.numel(), dtype=shard.dtype, device=parameter.device)
    padded[: shard.numel()] = shard
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(parameter.ds_process_group))]
    dist.all_gather(parts, padded, group=parameter.ds_process_group)
    return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)


def full_state_dict(model: nn.Module, replaced: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`model.state_dict()` with whole tensors, some of them replaced (a collective where the model is sharded).

    Args:
        model: Unwrapped.
        replaced: Shards by parameter name, of any float dtype; they come back in the parameter's dtype. A name that is
            tied to another one replaces both.
    """
    reshard(model)
    canonical = {id(p): name for name, p in model.named_parameters()}
    names = {alias: canonical[id(p)] for alias, p in model.named_parameters(remove_duplicate=False)}
    made: dict[str, Tensor] = {}
    state = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        name = names.get(key, key)
        if name not in made:
            whole = assemble(tensor, replaced[name]) if name in replaced else full_tensor(tensor)
            made[name] = whole.to(tensor.dtype)
        state[key] = made[name]
    return state


def sum_over_ranks(value: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """The sum of each rank's `value` where `parameters` are sharded; else `value`, which every rank has whole."""
    if is_sharded(parameters) and dist.is_initialized():
        dist.all_reduce(value)
    return value


def deep_copy(model: nn.Module, share: Iterable[nn.Parameter] = ()) -> nn.Module:
    """A copy that shares nothing with `model` but the parameters of `share`; ZeRO-3 is copied parameter by parameter.

    Raises:
        ReferenceError: the model is already wrapped by FSDP2, which cannot be copied.
    """
    if any(isinstance(m, FSDPModule) for m in model.modules()):
        raise ReferenceError(
            "the policy is already sharded by FSDP2 and cannot be copied. Make the reference before the model is "
            "prepared, or pass ref_model=."
        )
    zero3 = [p for p in model.parameters() if is_zero3(p)]
    memo: dict[int, Any] = {id(p): p for p in share} | {id(p): _zero3_copy(p) for p in zero3}
    return copy.deepcopy(model, memo)


def copy_with(model: nn.Module, parameter: Callable[[nn.Parameter], nn.Parameter]) -> Any:
    """A copy that is this process's own: `parameter` gives each of its parameters, tied ones once.

    Of a sharded model the copy is a plain one, without what FSDP2 and ZeRO-3 put on modules (classes, hooks, tables).
    """
    memo: dict[int, Any] = {id(p): parameter(p) for p in model.parameters()}
    if is_sharded(model.parameters()):
        memo |= {id(module): object.__new__(_own_class(module)) for module in model.modules()}
        for module in model.modules():
            vars(memo[id(module)]).update(copy.deepcopy(_own_state(module), memo))
    return copy.deepcopy(model, memo)


def _own_class(module: nn.Module) -> type:
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def _own_state(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if not _FOREIGN.search(name)}
    no_hooks = {name: value for name, value in vars(nn.Module()).items() if "hook" in name}
    return own | no_hooks | {"_parameters": dict(module._parameters.items())}


def _zero3_copy(parameter: Tensor) -> nn.Parameter:
    import deepspeed  # pyright: ignore[reportMissingImports]
    from transformers.integrations.deepspeed import deepspeed_config

    holder = nn.Module()
    holder.weight = nn.Parameter(full_tensor(parameter), requires_grad=False)
    deepspeed.zero.Init(module=holder, config_dict_or_path=deepspeed_config())
    return holder.weight


def prepare_frozen(module: nn.Module, accelerator: Any) -> nn.Module:
    """Places a module that is only read as the policy is placed: on the device, sharded under FSDP2 and ZeRO-3.

    Raises:
        ReferenceError: FSDP version 1.
    """
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        return _prepare_deepspeed(module, accelerator)
    if kind == "FSDP":
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        if not accelerator.is_fsdp2:
            raise ReferenceError(
                "a reference model of its own needs FSDP version 2; set fsdp_version: 2 in the config."
            )
        return fsdp2_prepare_model(accelerator, module)
    return accelerator.prepare_model(module, evaluation_mode=True)


def _prepare_deepspeed(module: nn.Module, accelerator: Any) -> nn.Module:
    import deepspeed  # pyright: ignore[reportMissingImports]

    config = _without_auto(accelerator.state.deepspeed_plugin.deepspeed_config)
    zero = config["zero_optimization"]
    zero["stage"] = 3 if zero["stage"] == 3 else 0
    # a small parameter that is kept whole would not notice that its shard has moved
    zero["stage3_param_persistence_threshold"] = 0
    zero.pop("offload_optimizer", None)
    for key in ("optimizer", "scheduler", "train_batch_size", "gradient_accumulation_steps"):
        config.pop(key, None)
    config["train_micro_batch_size_per_gpu"] = 1  # asked for, and without meaning for a module that is only read
    return deepspeed.initialize(model=module, config=config)[0]


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the values that transformers fills in only when training starts."""
    kept = {key: value for key, value in config.items() if value != "auto"}
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else copy.copy(value) for key, value in kept.items()
    }


__all__ = [
    "assemble",
    "callable_alone",
    "copy_with",
    "deep_copy",
    "follow_shards",
    "full_state_dict",
    "full_tensor",
    "is_sharded",
    "is_zero3",
    "loaded_whole",
    "local_shard",
    "on_accelerator",
    "prepare_frozen",
    "reshard",
    "size_of",
    "sum_over_ranks",
    "unwrap",
    "will_be_sharded",
]
