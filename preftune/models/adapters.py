"""PEFT adapters: what parameters one has, adding a copy of one, and routing a forward through one of them or none.

Routing changes where each layer looks and nothing else. PEFT's own switches also rewrite `requires_grad`: on the way
back they set the whole adapter training, with the parts that the user had frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import peft
import torch
from packaging.version import Version
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from preftune.errors import ReferenceError
from preftune.models.distributed import full_tensor, unwrap

_OURS = "is_preftune_reference"
# A fresh adapter with one of these leaves the base as it is and adds nothing to it; others put the policy elsewhere.
_NEUTRAL_LORA_INIT = (True, "gaussian", "eva", "orthogonal")


def peft_model(policy: nn.Module) -> PeftModel | None:
    """The PeftModel inside whatever wraps it, or None."""
    inner = unwrap(policy)
    return inner if isinstance(inner, PeftModel) else None


def require_peft(policy: nn.Module) -> PeftModel:
    model = peft_model(policy)
    if model is None:
        raise ReferenceError(
            f"the policy is a {type(unwrap(policy)).__name__} without adapter; this form needs a PeftModel."
        )
    return model


def active_adapter(model: PeftModel) -> str:
    """The one adapter that the policy trains.

    Raises:
        ReferenceError: none or several are active.
    """
    names = model.active_adapters
    if len(names) != 1:
        raise ReferenceError(
            f"adapters {names} are active; a reference needs exactly one. Call model.set_adapter(name)."
        )
    return names[0]


def is_prompt_learning(model: PeftModel) -> bool:
    """True for virtual tokens (prompt, prefix and p-tuning), which have no adapter layers."""
    return model.active_peft_config.is_prompt_learning


def starts_as_base(model: PeftModel) -> bool:
    """Whether a fresh adapter leaves the policy equal to its base, so that the base can be the reference.

    Not after PiSSA, OLoRA, CorDA, LoftQ or LoRA-GA, which take their start out of the base weights, nor after a random
    initialisation. Virtual tokens count as base: the model without them is what they steer.
    """
    if is_prompt_learning(model):
        return True
    options = model.active_peft_config.to_dict()
    neutral = options.get("init_lora_weights", True) in _NEUTRAL_LORA_INIT
    return neutral and options.get("init_weights", True) is not False and options.get("init_ia3_weights", True) is True


@contextmanager
def routed(model: PeftModel, adapter: str | None) -> Iterator[None]:
    """Forwards go through `adapter`, or through none of them; on exit (also by an exception) through those of before.

    Raises:
        ReferenceError: an adapter is merged into the base weights.
    """
    layers = _adapter_layers(model)
    if any(layer.merged_adapters for layer in layers):
        raise ReferenceError("an adapter is merged into the base weights, so there is no base left. Unmerge it first.")
    before = [(layer, layer._active_adapter, layer._disable_adapters) for layer in layers]
    virtual_tokens = _routed_prompt(model, adapter) if is_prompt_learning(model) else nullcontext()
    try:
        for layer in layers:
            layer._disable_adapters = adapter is None
            if adapter is not None:
                layer._active_adapter = [adapter]
        with virtual_tokens:
            yield
    finally:
        for layer, active, disabled in before:
            layer._active_adapter, layer._disable_adapters = active, disabled


@contextmanager
def _routed_prompt(model: PeftModel, adapter: str | None) -> Iterator[None]:
    before, forward = model.active_adapter, vars(model).get("forward")
    try:
        if adapter is None:
            model.forward = model.base_model.forward
        else:
            model.active_adapter = adapter
        yield
    finally:
        model.active_adapter = before
        if forward is not None:
            model.forward = forward
        elif adapter is None:
            del model.forward


def adapter_parameters(model: PeftModel, adapter: str) -> dict[str, nn.Parameter]:
    """The parameters of one adapter by their full names, each once."""
    mine = {id(p) for place in _places(model) if adapter in place for p in _parameters(place[adapter]).values()}
    return {name: p for name, p in model.named_parameters() if id(p) in mine}


def paired_parameters(model: PeftModel, source: str, target: str) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """`(parameter of source, parameter of target)` by the name of the source's.

    Raises:
        ReferenceError: the two adapters do not have the same parameters.
    """
    partner: dict[int, nn.Parameter] = {}
    for place in _places(model):
        ours = _parameters(place[source]) if source in place else {}
        theirs = _parameters(place[target]) if target in place else {}
        if ours.keys() != theirs.keys():
            raise ReferenceError(
                f"adapters {source!r} and {target!r} adapt different modules or have different parts, so one cannot "
                "follow the other. Make both from the same PEFT config."
            )
        partner.update({id(p): theirs[name] for name, p in ours.items()})
    return {name: (p, partner[id(p)]) for name, p in model.named_parameters() if id(p) in partner}


def require_only_adapter_trains(model: PeftModel, adapter: str) -> None:
    """Raises a ReferenceError where training would change weights that the reference also uses."""
    mine = {id(p) for p in adapter_parameters(model, adapter).values()}
    shared = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in mine]
    if shared:
        raise ReferenceError(
            f"{len(shared)} trained parameters, such as {shared[0]!r}, do not belong to adapter {adapter!r}: the "
            "reference shares them and would move with the policy. Use bias='none' and modules_to_save in the PEFT "
            "config, or pass ref_model=."
        )


def add_copy(model: PeftModel, source: str, name: str) -> None:
    """Adds a frozen adapter `name` with the config and weights of `source`; the policy is left as it was.

    Raises:
        ReferenceError: PEFT cannot add it, or would change the base weights for it.
    """
    config = _frozen_config(model.peft_config[source])
    with _policy_untouched(model):
        model.add_adapter(name, config)
    for ours, theirs in paired_parameters(model, source, name).values():
        theirs.data = full_tensor(ours).clone()
        theirs.requires_grad_(False)


def add_saved(model: PeftModel, folder: str, name: str) -> None:
    """Adds the adapter saved under `folder` as the frozen adapter `name`; the policy is left as it was.

    Raises:
        ReferenceError: it is of another kind than the policy's adapter, or of another base model.
    """
    config = PeftConfig.from_pretrained(folder)
    if config.peft_type != model.peft_type:
        raise ReferenceError(
            f"ref_model={folder!r} is a {config.peft_type} adapter and the policy has a {model.peft_type} adapter; one "
            "model cannot hold both. Merge the reference's adapter into its base (merge_and_unload), save that model "
            "and pass its folder as ref_model."
        )
    try:
        with _policy_untouched(model):
            loaded = model.load_adapter(folder, name, is_trainable=False)
    except (RuntimeError, ValueError) as error:
        raise ReferenceError(f"the adapter of ref_model={folder!r} does not fit the policy: {error}") from error
    lost = [*loaded.unexpected_keys, *(key for key in loaded.missing_keys if f".{name}" in key)]
    if lost:
        raise ReferenceError(
            f"the adapter of ref_model={folder!r} does not fit the policy's base model: {len(lost)} weights have no "
            f"counterpart, such as {lost[0]!r}. Use an adapter of the same base model."
        )
    vars(model.peft_config[name])[_OURS] = True
    for parameter in adapter_parameters(model, name).values():
        parameter.requires_grad_(False)


@contextmanager
def _policy_untouched(model: PeftModel) -> Iterator[None]:
    """An adapter may be added inside: modes, routes, `requires_grad` and the global random state are put back.

    Raises:
        ReferenceError: a weight that was there before has changed.
    """
    routes = [(layer, layer._active_adapter, layer._disable_adapters) for layer in _tuner_modules(model)]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    marks = [(name, p, p.data_ptr(), p._version) for name, p in model.named_parameters()]
    with torch.random.fork_rng(devices=sorted({p.device.index for p, _ in flags if p.device.type == "cuda"})):
        yield
    for layer, active, disabled in routes:
        layer._active_adapter, layer._disable_adapters = active, disabled
    for p, flag in flags:
        p.requires_grad_(flag)
    for module, mode in modes:
        module.training = mode
    changed = [name for name, p, pointer, version in marks if (p.data_ptr(), p._version) != (pointer, version)]
    if changed:
        raise ReferenceError(
            f"adding a second {model.peft_type} adapter changed {len(changed)} weights of the policy, such as "
            f"{changed[0]!r}. Reload the policy and pass ref_model=."
        )


def _frozen_config(config: PeftConfig) -> PeftConfig:
    config = copy.deepcopy(config)
    options = config.to_dict()
    if options.get("target_parameters") and Version(peft.__version__) < Version("0.20"):
        raise ReferenceError(
            f"the LoRA config has target_parameters={options['target_parameters']}, for which peft {peft.__version__} "
            "allows one adapter a model, so the reference cannot be a second one. Install peft>=0.20, or pass "
            "ref_model=."
        )
    made: Any = config
    # in inference mode virtual tokens have no encoder, and other parameters than the policy's
    made.inference_mode = not made.is_prompt_learning
    if "init_lora_weights" in options:
        made.init_lora_weights = True  # the weights are copied; PiSSA and its kin would take from the base once more
    if "prompt_tuning_init" in options:
        made.prompt_tuning_init = "RANDOM"  # a text would be tokenized again, by a tokenizer loaded for it
    vars(config)[_OURS] = True
    return config


def is_our_reference(model: PeftModel, name: str) -> bool:
    """Whether adapter `name` was added by `add_copy` or `add_saved`, say for an earlier trainer."""
    return _OURS in vars(model.peft_config[name])


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Modules that belong to adapters: LoRA matrices and dropouts, prompt encoders; not what they were put on."""
    found: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            parts = [part for name, part in module.named_children() if name != "base_layer"]
            found.update([module], *(part.modules() for part in parts))
        elif isinstance(module, PeftModel) and is_prompt_learning(module):
            found.update(module.prompt_encoder.modules())
    return found


def _tuner_modules(model: PeftModel) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def _adapter_layers(model: PeftModel) -> list[Any]:
    layers = _tuner_modules(model)
    if not layers and not is_prompt_learning(model):
        raise ReferenceError(
            f"{model.peft_type} adapters cannot be switched by layer. Use LoRA or another layer adapter, or pass "
            "ref_model=."
        )
    return layers


def _places(model: PeftModel) -> Iterator[nn.ModuleDict | nn.ParameterDict]:
    """Where adapters live, each place a dictionary by adapter name."""
    if is_prompt_learning(model):
        yield model.prompt_encoder
    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            for name in module.adapter_layer_names:
                place = attrgetter(name)(module)
                if isinstance(place, nn.ModuleDict | nn.ParameterDict):
                    yield place


def _parameters(part: nn.Module | Tensor) -> dict[str, nn.Parameter]:
    return {"": part} if isinstance(part, nn.Parameter) else dict(part.named_parameters())  # pyright: ignore
