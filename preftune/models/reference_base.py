"""What every reference model can do, and how a moving one moves: by name, shard by shard, averages in float32.

A form is a subclass of `LiveReference` (fixed) or `MovableReference`; it says where its weights are and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from preftune.errors import CheckpointError, ReferenceError
from preftune.losses.reduce import ld_branch_logps
from preftune.models import logprobs
from preftune.models.attention import Layout
from preftune.models.averaging import ema
from preftune.models.distributed import follow_shards, local_shard, reshard, sum_over_ranks, unwrap
from preftune.types import PromptTree, TokenScores


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Holds `model` in eval mode; on exit every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


class ReferenceModel(ABC):
    """What gives log p_ref: a copy, an adapter, the base under an adapter, or stored numbers.

    Attributes:
        form: The name of the form, for logs.
        module: The frozen module that callbacks get as `ref_model`; None where the reference is no module of its own.
        adapter_name: The adapter of the policy that belongs to the reference, if any.
    """

    form: ClassVar[str]
    module: nn.Module | None = None
    adapter_name: str | None = None

    @abstractmethod
    def branch_logps(
        self, policy: nn.Module, tree: PromptTree, *, layout: Layout, ld_alpha: float | None = None
    ) -> Float[Tensor, " B"]:
        """Log-probability of each branch under the reference, summed over its scored tokens; without gradient."""

    def prepare(self, accelerator: Any) -> None:  # noqa: B027 - most forms have nothing to place
        """Places what the reference owns as the policy is placed. Call it once, after the forms were made."""


class LiveReference(ReferenceModel):
    """A reference with a forward of its own, or one that it borrows from the policy.

    Attributes:
        is_policy: It is the policy itself, so that it is the reference no longer once training has begun.
    """

    is_policy: ClassVar[bool] = False

    @abstractmethod
    def as_reference(self, policy: nn.Module) -> AbstractContextManager[nn.Module]:
        """The module that speaks for the reference, in eval mode; on exit the policy is exactly as it was."""

    @abstractmethod
    def weights(self, policy: nn.Module) -> dict[str, Tensor]:
        """The tensors that decide what the reference says, by name; they may be sharded."""

    @final
    @torch.no_grad()
    def token_scores(
        self,
        policy: nn.Module,
        tree: PromptTree,
        *,
        layout: Layout,
        temperature: float = 1.0,
        float32_head: bool = False,
    ) -> TokenScores:
        """Scores of every scored token of the tree, without gradient; arguments as of `logprobs.token_scores`."""
        with self.as_reference(policy) as module:
            layout = self.layout_for(layout)
            return logprobs.token_scores(
                module, tree, layout=layout, temperature=temperature, float32_head=float32_head
            )

    @final
    def branch_logps(
        self, policy: nn.Module, tree: PromptTree, *, layout: Layout, ld_alpha: float | None = None
    ) -> Float[Tensor, " B"]:
        return ld_branch_logps(self.token_scores(policy, tree, layout=layout), ld_alpha)

    def layout_for(self, layout: Layout) -> Layout:
        """The layout to use where the policy uses `layout`; the same unless the reference is another kind of model."""
        return layout


class MovableReference(LiveReference):
    """A reference that can follow the policy.

    Where its weights are in bfloat16 or float16, the average lives in a float32 copy and the weights are its rounding:
    added to the weights themselves, a small alpha would round away and the reference stand still.

    Attributes:
        moves: How often it has moved.
        last_move_step: The optimizer step of the last move, or None.
    """

    def __init__(self) -> None:
        self.moves = 0
        self.last_move_step: int | None = None
        self._masters: dict[str, Tensor] = {}

    @abstractmethod
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that move, by the name of the policy's parameter that each follows."""

    @abstractmethod
    def policy_parameters(self, policy: nn.Module) -> dict[str, nn.Parameter]:
        """The policy's parameters that are followed, by name."""

    def own_buffers(self) -> dict[str, Tensor]:
        """Saved buffers of the reference, copied from the policy at each move."""
        return {}

    def policy_buffers(self, policy: nn.Module) -> dict[str, Tensor]:
        return {}

    @final
    @torch.no_grad()
    def blend_(
        self,
        source: Mapping[str, Tensor] | None,
        alpha: float,
        *,
        policy: nn.Module | None = None,
        step: int | None = None,
    ) -> None:
        """w <- (1 - alpha) * w + alpha * source, for every parameter of the reference, in place.

        Args:
            source: Values by the policy's parameter names (shards where the policy is sharded). None: the policy's own.
            alpha: In [0, 1].
            policy: Gives what `source` does not name, and the buffers.
            step: The optimizer step, for the record.

        Raises:
            ReferenceError: names or shapes do not match.
            ValueError: alpha outside [0, 1], or neither a source nor a policy.
        """
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha is {alpha}; wanted a share in [0, 1]")
        if source is None and policy is None:
            raise ValueError("blend_ needs a source, a policy, or both")
        own = self._shards(self.own_parameters())
        values = dict(source or {})
        if policy is not None:
            reshard(policy)
            values = {**self._shards(self.policy_parameters(policy)), **values}
        check_match(own, values)
        blend_shards_(own, values, alpha, masters=self._masters)
        follow_shards(self.own_parameters().values())
        if policy is not None:
            copy_buffers_(self.own_buffers(), self.policy_buffers(policy))
        self.moves += 1
        self.last_move_step = step

    @final
    def check_follows(self, policy: nn.Module) -> None:
        """Raises a ReferenceError now that the first move would raise."""
        check_match(self._shards(self.own_parameters()), self._shards(self.policy_parameters(policy)))

    @final
    @torch.no_grad()
    def drift(self, policy: nn.Module) -> Float[Tensor, ""]:
        """L2 norm of policy minus reference over the moving parameters (a collective where they are sharded)."""
        own = self._shards(self.own_parameters())
        reshard(policy)
        parameters = self.policy_parameters(policy)
        check_match(own, self._shards(parameters))
        total = torch.zeros((), device=next(iter(own.values())).device)
        for name, shard in own.items():
            value = local_shard(parameters[name])
            difference = value.float() - self._masters.get(name, shard).to(value.device, torch.float32)
            total += torch.linalg.vector_norm(difference).square().to(total.device)
        return sum_over_ranks(total, parameters.values()).sqrt()

    def drift_metrics(self, policy: nn.Module) -> dict[str, float]:
        """What to log of a moving reference: distance from the policy, number of moves, step of the last one."""
        metrics = {"reference/drift": self.drift(policy).item(), "reference/moves": float(self.moves)}
        if self.last_move_step is not None:
            metrics["reference/last_move_step"] = float(self.last_move_step)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Weights (this rank's shards), float32 copies and counters; tensors share memory with the reference."""
        state: dict[str, Any] = {"moves": self.moves, "last_move_step": self.last_move_step}
        for name, shard in self._shards(self.own_parameters()).items():
            if name in self._masters:
                state[f"master.{name}"] = self._masters[name]
            else:
                state[f"parameter.{name}"] = shard
        state.update({f"buffer.{name}": buffer for name, buffer in self.own_buffers().items()})
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` gave, bit for bit.

        Raises:
            CheckpointError: the state is that of another model.
        """
        targets = {f"parameter.{n}": s for n, s in self._shards(self.own_parameters()).items()}
        targets.update({f"buffer.{name}": buffer for name, buffer in self.own_buffers().items()})
        given = {_weight_key(key): value for key, value in state.items() if isinstance(value, Tensor)}
        wrong = _mismatch(targets, given)
        if wrong:
            raise CheckpointError(
                f"the saved reference does not fit the {self.form} of this run: {wrong}. Use the model and the "
                "reference options of the run that wrote the checkpoint."
            )
        self._masters = {}
        for key, value in state.items():
            if key.startswith("master."):
                target = targets[_weight_key(key)]
                self._masters[key.removeprefix("master.")] = value.to(target.device, torch.float32, copy=True)
                target.copy_(value)
            elif isinstance(value, Tensor):
                if value.dtype != targets[key].dtype:
                    raise CheckpointError(f"{key} was saved as {value.dtype}, this run has it as {targets[key].dtype}.")
                targets[key].copy_(value)
        follow_shards(self.own_parameters().values())
        self.moves, self.last_move_step = state["moves"], state["last_move_step"]

    def _shards(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: local_shard(parameter) for name, parameter in parameters.items()}


def _weight_key(key: str) -> str:
    """The key of the weights that a float32 copy is the average of; any other key as it is."""
    return "parameter." + key.removeprefix("master.") if key.startswith("master.") else key


def blend_shards_(
    own: Mapping[str, Tensor], values: Mapping[str, Tensor], alpha: float, *, masters: dict[str, Tensor] | None = None
) -> None:
    """(1 - alpha) * own + alpha * values, elementwise into `own`; names and shapes must agree already.

    Args:
        masters: Float32 averages of low-precision tensors, made when first needed. None: computed in float32, rounded.
    """
    for name, target in own.items():
        if not target.is_floating_point():
            raise ReferenceError(f"{name!r} is quantised ({target.dtype}) and cannot be averaged; load it unquantised.")
        if target.dtype not in (torch.bfloat16, torch.float16):
            target.copy_(ema(target, values[name].to(target.device, target.dtype), alpha))
            continue
        value = values[name].to(target.device, torch.float32)
        known = masters is not None and name in masters
        average = masters[name] if masters is not None and known else target.float()
        average = ema(average, value, alpha)
        # with alpha 1 nothing accumulates, so no copy is kept for it
        if masters is not None and (known or alpha < 1.0):
            masters[name] = average
        target.copy_(average)


def copy_buffers_(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    check_match(own, values)
    for name, target in own.items():
        target.copy_(values[name])


def check_match(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Raises a ReferenceError unless both have the same names and shapes."""
    wrong = _mismatch(own, values)
    if wrong:
        raise ReferenceError(
            f"the reference cannot follow the policy: {wrong}. Both must be the same architecture with the same tied "
            "weights, wrapped the same way; leave ref_model out to get a reference that is made from the policy."
        )


def _mismatch(own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> str | None:
    only_own, only_values = [n for n in own if n not in values], [n for n in values if n not in own]
    if only_own:
        return f"{len(only_own)} names are only in the reference, such as {only_own[0]!r}"
    if only_values:
        return f"{len(only_values)} names are not in the reference, such as {only_values[0]!r}"
    for name, tensor in own.items():
        if tensor.shape != values[name].shape:
            return (
                f"{name!r} has shape {tuple(tensor.shape)} in the reference and {tuple(values[name].shape)} outside it"
            )
    return None


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are part of the state dict (others follow from the config)."""
    saved = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def drift_norm(policy: nn.Module, reference: MovableReference) -> Float[Tensor, ""]:
    """L2 norm of policy minus reference over the parameters that move; see `MovableReference.drift`."""
    return reference.drift(policy)


@torch.no_grad()
def blend_modules_(source: nn.Module, target: nn.Module, alpha: float) -> None:
    """target <- (1 - alpha) * target + alpha * source for two models of one architecture; buffers are copied.

    Raises:
        ReferenceError: names or shapes do not match.
    """
    source, target = unwrap(source), unwrap(target)
    reshard(source)
    reshard(target)
    own = {name: local_shard(p) for name, p in target.named_parameters()}
    values = {name: local_shard(p) for name, p in source.named_parameters()}
    check_match(own, values)
    blend_shards_(own, values, alpha)
    follow_shards(target.parameters())
    copy_buffers_(saved_buffers(target), saved_buffers(source))
