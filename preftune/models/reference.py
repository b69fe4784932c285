"""The one place that chooses the form of the reference model: `make_reference`; every public name of it is here.

A form is chosen once, when the trainer is built; whoever scores or moves the reference never asks which one it is.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn

from preftune.data.tree import build_tree
from preftune.errors import ConfigError, ReferenceError
from preftune.models import adapters
from preftune.models.distributed import deep_copy, is_zero3, unwrap
from preftune.models.reference_base import (
    LiveReference,
    MovableReference,
    ReferenceModel,
    blend_modules_,
    drift_norm,
)
from preftune.models.reference_forms import CurrentPolicy, DisabledAdapter, FrozenCopy, ReferenceAdapter
from preftune.models.stored import Stored
from preftune.models.structure import input_device, vocabulary_size


def make_reference(
    policy: nn.Module,
    *,
    ref_model: nn.Module | None = None,
    peft_is_fresh: bool = False,
    ref_adapter_name: str | None = None,
    will_move: bool = False,
    precompute: bool = False,
    streams: bool = False,
    store_dir: str | Path | None = None,
) -> ReferenceModel:
    """The reference for a policy that has not been trained or prepared yet.

    Args:
        policy: The live model, with its adapter if it has one.
        ref_model: A model to use as it is; None makes the reference from the policy.
        peft_is_fresh: The adapter was just put on, so that its base is the policy's start.
        ref_adapter_name: An adapter that is already in the policy and is to be the reference.
        will_move: A callback is going to move it.
        precompute: Score every row once, before training, and keep numbers instead of a model.
        streams: With `precompute`: not all rows can be read before training, so there must be a live reference as long
            as it goes on.
        store_dir: Where those numbers are kept; None: beside the datasets cache.

    Raises:
        ConfigError: the numbers of `precompute` cannot move.
        ReferenceError: there can be no such reference for this policy.
    """
    if precompute and will_move:
        raise ConfigError(
            "precompute_ref_log_probs=True stores fixed numbers, but sync_ref_model, bema_ref_model or a callback "
            "moves the reference. Set precompute_ref_log_probs=False, or leave the reference where it is."
        )
    from_policy = precompute and not streams  # it is scored before it changes, and need not be copied
    live = _live_reference(policy, ref_model, peft_is_fresh, ref_adapter_name, will_move, from_policy)
    if will_move and not isinstance(live, MovableReference):
        raise ReferenceError(f"a reference of the form {live.form!r} cannot move.")
    if will_move and isinstance(live, MovableReference):
        live.check_follows(policy)
    return Stored(live, store_dir) if precompute else live


def _live_reference(
    policy: nn.Module,
    ref_model: nn.Module | None,
    peft_is_fresh: bool,
    ref_adapter_name: str | None,
    will_move: bool,
    from_policy: bool,
) -> LiveReference:
    model = adapters.peft_model(policy)
    if ref_model is not None:
        _check_given(policy, ref_model, ref_adapter_name, moves_with_adapter=will_move and model is not None)
        return FrozenCopy(ref_model)
    if model is None:
        if ref_adapter_name is not None:
            raise ReferenceError(f"ref_adapter_name={ref_adapter_name!r} was given, but the policy has no adapters.")
        return CurrentPolicy() if from_policy else FrozenCopy.of(policy)
    policy_adapter = adapters.active_adapter(model)
    adapters.require_only_adapter_trains(model, policy_adapter)
    if ref_adapter_name is not None:
        if ref_adapter_name not in model.peft_config:
            raise ReferenceError(
                f"there is no adapter {ref_adapter_name!r}; the policy has {sorted(model.peft_config)}."
            )
        return ReferenceAdapter(policy, ref_adapter_name, existing=True)
    if peft_is_fresh and not will_move and _starts_as_base(policy, model):
        return DisabledAdapter()
    if from_policy:
        return CurrentPolicy()
    return ReferenceAdapter(policy, _free_adapter_name(model))


def _starts_as_base(policy: nn.Module, model: PeftModel) -> bool:
    """Whether the base can be the reference of a fresh adapter: its config says so, and a few tokens agree.

    PEFT has dozens of kinds of adapters, and not all say in one option how they start.
    """
    if not adapters.starts_as_base(model):
        return False
    if adapters.is_prompt_learning(model):
        return True
    ids = torch.arange(12).remainder(vocabulary_size(policy)).tolist()
    tree = build_tree([ids[:4]], [[ids[4:8], ids[8:]]]).to(input_device(policy))
    both = [live.branch_logps(policy, tree, layout="padded") for live in (CurrentPolicy(), DisabledAdapter())]
    exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters() if p.is_floating_point())
    return torch.allclose(*both, rtol=0, atol=1e-3 if exact else 0.5)


def saved_adapter_reference(policy: nn.Module, folder: str) -> str:
    """Puts a saved adapter beside the policy's, frozen, and returns its name there: a `ref_adapter_name`.

    Raises:
        ReferenceError: it does not fit the policy.
    """
    model = adapters.require_peft(policy)
    name = _free_adapter_name(model)
    adapters.add_saved(model, folder, name)
    return name


def _free_adapter_name(model: PeftModel) -> str:
    name = "reference" if model.peft_type == "PREFIX_TUNING" else "ref"  # PEFT minds a name that is part of its own
    if name in model.peft_config:
        if not adapters.is_our_reference(model, name):
            raise ReferenceError(
                f"the policy already has an adapter {name!r}. Pass ref_adapter_name={name!r} to use it as the "
                f"reference, or remove it first: model.delete_adapter({name!r})."
            )
        model.delete_adapter(name)
    return name


def _check_given(
    policy: nn.Module, ref_model: nn.Module, ref_adapter_name: str | None, *, moves_with_adapter: bool
) -> None:
    if ref_adapter_name is not None:
        raise ReferenceError("both ref_model and ref_adapter_name were given; the reference can be only one of them.")
    if unwrap(ref_model) is unwrap(policy):
        raise ReferenceError(
            "ref_model is the policy itself and would train with it. Leave ref_model out: the reference is then made "
            "from the policy as it is now."
        )
    trained = {id(p): name for name, p in policy.named_parameters() if p.requires_grad}
    shared = [trained[id(p)] for p in ref_model.parameters() if id(p) in trained]
    if shared:
        raise ReferenceError(
            f"ref_model shares {len(shared)} trained parameters with the policy, such as {shared[0]!r}, and would move "
            "with it. Leave ref_model out, or load it separately."
        )
    if moves_with_adapter:
        raise ReferenceError(
            "a ref_model of its own cannot follow a policy that trains an adapter: they have different weights. Leave "
            "ref_model out; the reference is then a second adapter, which can."
        )


def create_reference_model(
    model: nn.Module, num_shared_layers: int | None = None, pattern: str | None = None
) -> nn.Module:
    """A frozen copy of a model for use as `ref_model=`, optionally sharing its first layers to save memory.

    Args:
        num_shared_layers: Share everything that comes before layer number `num_shared_layers`: embeddings and that many
            layers are then the same tensors in both models, frozen in both. None shares nothing.
        pattern: The name of a layer with `{layer}` for its number; by default the longest list of layers is found.

    Raises:
        ConfigError: no such layer.
        ReferenceError: the model cannot be copied.
    """
    if num_shared_layers is None:
        return FrozenCopy.of(model).module
    if any(is_zero3(p) for p in model.parameters()):
        raise ReferenceError("layers cannot be shared under ZeRO-3; leave num_shared_layers out.")
    names = [name for name, _ in model.named_parameters()]
    pattern = pattern or _layer_pattern(model)
    first_own = re.compile(rf"(^|\.){re.escape(pattern.format(layer=num_shared_layers))}(\.|$)")
    start = next((i for i, name in enumerate(names) if first_own.search(name)), None)
    if start is None:
        raise ConfigError(
            f"no parameter belongs to {pattern.format(layer=num_shared_layers)!r}; the model has names such as "
            f"{names[-1]!r}. num_shared_layers must be below the number of layers, and pattern name a layer, as in "
            "'model.layers.{layer}'."
        )
    shared = [model.get_parameter(name) for name in names[:start]]
    for parameter in shared:
        parameter.requires_grad_(False)
    return FrozenCopy(deep_copy(model, share=shared)).module


def _layer_pattern(model: nn.Module) -> str:
    lists = [(len(m), name) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers; pass pattern='...{{layer}}'.")
    longest = max(length for length, _ in lists)
    return next(name for length, name in lists if length == longest) + ".{layer}"


__all__ = [
    "CurrentPolicy",
    "DisabledAdapter",
    "FrozenCopy",
    "LiveReference",
    "MovableReference",
    "ReferenceAdapter",
    "ReferenceModel",
    "Stored",
    "blend_modules_",
    "create_reference_model",
    "drift_norm",
    "make_reference",
    "saved_adapter_reference",
]
