"""The live forms of the reference model: a module of its own, a disabled adapter, a second adapter, the policy itself.

Each says where its weights are and how a forward reaches them; scoring and moving are in `reference_base`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from preftune.errors import ReferenceError
from preftune.models import adapters, logprobs
from preftune.models.attention import Layout
from preftune.models.distributed import deep_copy, prepare_frozen, reshard, unwrap
from preftune.models.reference_base import LiveReference, MovableReference, evaluating, saved_buffers


class FrozenCopy(MovableReference):
    """A module of its own: `FrozenCopy.of(policy)` copies the live policy, `FrozenCopy(module)` takes a given one.

    The module is put in eval mode before every use, whatever happened to it in between, and has no gradients.
    """

    form = "frozen_copy"

    def __init__(self, module: nn.Module, *, same_as_policy: bool = False) -> None:
        """`same_as_policy` says that no layout needs to be probed for it."""
        super().__init__()
        self.module: nn.Module = module
        self.module.requires_grad_(False)
        self.module.eval()
        self._padded_only: bool | None = False if same_as_policy else None

    @classmethod
    def of(cls, policy: nn.Module) -> FrozenCopy:
        """A copy of the policy as it is now, sharing nothing with it.

        Raises:
            ReferenceError: the policy is quantised, spread over devices, or sharded by FSDP2 already.
        """
        model = unwrap(policy)
        reason = _why_no_copy(model)
        if reason is not None:
            raise ReferenceError(
                f"the policy is {reason} and cannot be copied for the reference. Train an adapter (peft_config=): the "
                "reference is then the disabled adapter, which needs no copy. Or pass ref_model=."
            )
        return cls(deep_copy(model), same_as_policy=True)

    @contextmanager
    def as_reference(self, policy: nn.Module) -> Iterator[nn.Module]:
        self.module.eval()
        yield self.module

    def weights(self, policy: nn.Module) -> dict[str, Tensor]:
        return {**self.own_parameters(), **self.own_buffers()}

    def layout_for(self, layout: Layout) -> Layout:
        if layout == "padded":
            return layout
        if self._padded_only is None:
            self._padded_only = logprobs.choose_layout(self.module, "auto").layout == "padded"
        return "padded" if self._padded_only else layout

    def prepare(self, accelerator: Any) -> None:
        self.module = prepare_frozen(self.module, accelerator)
        self.module.eval()

    def own_parameters(self) -> dict[str, nn.Parameter]:
        reshard(self.module)
        return dict(unwrap(self.module).named_parameters())

    def policy_parameters(self, policy: nn.Module) -> dict[str, nn.Parameter]:
        return dict(unwrap(policy).named_parameters())

    def own_buffers(self) -> dict[str, Tensor]:
        return saved_buffers(unwrap(self.module))

    def policy_buffers(self, policy: nn.Module) -> dict[str, Tensor]:
        return saved_buffers(unwrap(policy))


class DisabledAdapter(LiveReference):
    """The policy with its adapter switched off: costs nothing and cannot move."""

    form = "disabled_adapter"

    @contextmanager
    def as_reference(self, policy: nn.Module) -> Iterator[nn.Module]:
        with evaluating(policy), adapters.routed(adapters.require_peft(policy), None):
            yield _without_ddp(policy)

    def weights(self, policy: nn.Module) -> dict[str, Tensor]:
        return _base_weights(adapters.require_peft(policy))


class ReferenceAdapter(MovableReference):
    """A second adapter beside the policy's, on the same base weights.

    Args:
        policy: A PeftModel, wrapped or not; its active adapter is the policy's.
        adapter_name: Added as a copy of the policy's adapter, unless `existing` says that it is there already.
    """

    form = "reference_adapter"

    def __init__(self, policy: nn.Module, adapter_name: str = "ref", *, existing: bool = False) -> None:
        super().__init__()
        self._model = adapters.require_peft(policy)
        self.adapter_name: str = adapter_name
        self.policy_adapter = adapters.active_adapter(self._model)
        if adapter_name == self.policy_adapter:
            raise ReferenceError(
                f"adapter {adapter_name!r} is the one that the policy trains; it cannot also be the reference. Name "
                "another one, or make another one active (model.set_adapter)."
            )
        if existing:
            for p in adapters.adapter_parameters(self._model, adapter_name).values():
                p.requires_grad_(False)
        else:
            adapters.add_copy(self._model, self.policy_adapter, adapter_name)

    @contextmanager
    def as_reference(self, policy: nn.Module) -> Iterator[nn.Module]:
        if unwrap(policy) is not self._model:
            raise ReferenceError(f"adapter {self.adapter_name!r} is in another model than the one that was passed.")
        with evaluating(policy), adapters.routed(self._model, self.adapter_name):
            yield _without_ddp(policy)

    def weights(self, policy: nn.Module) -> dict[str, Tensor]:
        reshard(self._model)
        return {**_base_weights(self._model), **adapters.adapter_parameters(self._model, self.adapter_name)}

    def own_parameters(self) -> dict[str, nn.Parameter]:
        reshard(self._model)
        pairs = adapters.paired_parameters(self._model, self.policy_adapter, self.adapter_name)
        return {name: theirs for name, (_, theirs) in pairs.items()}

    def policy_parameters(self, policy: nn.Module) -> dict[str, nn.Parameter]:
        return adapters.adapter_parameters(adapters.require_peft(policy), self.policy_adapter)


class CurrentPolicy(LiveReference):
    """The policy as it is now. The reference only before the first update: `Stored` is filled from it."""

    form = "current_policy"
    is_policy = True

    @contextmanager
    def as_reference(self, policy: nn.Module) -> Iterator[nn.Module]:
        with evaluating(policy):
            yield _without_ddp(policy)

    def weights(self, policy: nn.Module) -> dict[str, Tensor]:
        reshard(policy)
        return dict(unwrap(policy).named_parameters()) | saved_buffers(unwrap(policy))


def _why_no_copy(model: nn.Module) -> str | None:
    facts = vars(model)
    if facts.get("hf_quantizer") is not None or facts.get("is_quantized"):
        return "quantised"
    if len(set((facts.get("hf_device_map") or {}).values())) > 1:
        return "spread over several devices (device_map)"
    return None


def _base_weights(model: Any) -> dict[str, Tensor]:
    reshard(model)
    owned = {id(p) for name in model.peft_config for p in adapters.adapter_parameters(model, name).values()}
    return {name: p for name, p in model.named_parameters() if id(p) not in owned} | saved_buffers(model)


def _without_ddp(policy: nn.Module) -> nn.Module:
    """Without gradients there is nothing for DDP to do but send buffers around."""
    return policy.module if isinstance(policy, DistributedDataParallel) else policy
