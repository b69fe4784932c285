"""A head whose product is float32 whatever its weight and autocast: for scores, and within the policy's own forward.

Only a plain linear head can be read and cast; any other is refused, as early as the trainer's construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from preftune.errors import ConfigError
from preftune.models import structure
from preftune.models.head import float32_linear
from preftune.models.probe import head_plan
from preftune.models.redirect import Redirect, redirected


def check_float32_head(model: nn.Module) -> None:
    """Raises a ConfigError where the product of the model's head cannot be had in float32."""
    plan, head = head_plan(model), structure.output_head(model)
    require_linear(None if plan.full_logits or head is None else Redirect(head, _never), plan.reason)


def require_linear(head: Redirect | None, reason: str = "") -> None:
    """Raises a ConfigError unless the head is a plain linear layer; None stands for a family's own logits."""
    if head is not None and head.is_linear:
        return
    if head is None:
        found = f"this model's log-probabilities need its own logits ({reason or 'the head cannot be called alone'})"
    else:
        kind = type(head.module)
        found = f"the head is a {kind.__module__}.{kind.__name__} or hooked (an adapter, quantisation, device_map)"
    raise ConfigError(
        "cast_lm_head_to_fp32=True casts the weight of a head that is a plain linear layer, and "
        f"{found}. Take the head out of target_modules and modules_to_save of the adapter, load it unquantised on one "
        "device, or set cast_lm_head_to_fp32=False."
    )


def float32_logits(head: Redirect) -> Callable[[Tensor], Tensor]:
    """The head's function in float32; it reads the weight when it is called, and holds a float32 copy only then."""
    layer: Any = head.module
    return lambda hidden: float32_linear(hidden, layer.weight, layer.bias)


@contextmanager
def head_in_float32(model: nn.Module) -> Iterator[None]:
    """Until exit the model's own forward, and so its `generate`, has the head's product in float32.

    A weight of fewer bits is copied once, when the head is first called: it must not change before exit. Does nothing
    where the weight has 32 bits already (autocast, which no rollout of ours has, would still lower it).
    """
    head: Any = structure.output_head(model)
    if head.weight.dtype.itemsize >= 4:
        yield
        return
    copies: list[Tensor] = []

    def answer(redirect: Redirect, hidden: Tensor) -> Tensor:
        if not copies:
            require_linear(redirect)
            copies.append(head.weight.float())
        return float32_linear(hidden, copies[0], head.bias)

    with redirected(head, answer):
        yield


def _never(redirect: Redirect, hidden: Tensor) -> Tensor:
    raise AssertionError("asked about, never called")
