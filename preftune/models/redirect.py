"""For the time of one model call, lets a head answer with scores and switches off what the family does to logits.

Everything is restored on exit, also after an error; a deep copy made meanwhile is an ordinary model of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn

from preftune.models.structure import PostHeadField, is_plain_linear, post_head_owner


class Redirect:
    """Stands in for a head's `forward`; `answer(redirect, hidden)` is what the model then takes for logits.

    Attributes:
        original: The forward that stood there, for heads that are more than a linear layer.
        calls: How often the model has called its head.
    """

    def __init__(self, module: nn.Module, answer: Callable[[Redirect, Tensor], Tensor]) -> None:
        current = module.__dict__.get("forward")
        self.module = module
        self.answer = answer
        self.original: Callable[[Tensor], Tensor] = (
            current.original if isinstance(current, Redirect) else module.forward
        )
        self.calls = 0

    @property
    def is_linear(self) -> bool:
        """The head is a bare `nn.Linear`, whose weight may be used directly; to be asked when it is called."""
        return self._is_own_forward and is_plain_linear(self.module)

    @property
    def _is_own_forward(self) -> bool:
        original = self.original
        own = type(self.module).forward
        return isinstance(original, MethodType) and original.__self__ is self.module and original.__func__ is own

    def __call__(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        self.calls += 1
        return self.answer(self, hidden)

    def __deepcopy__(self, memo: dict) -> Any:
        if self._is_own_forward:
            return MethodType(type(self.module).forward, memo[id(self.module)])
        return copy.deepcopy(self.original, memo)


@contextmanager
def redirected(module: nn.Module, answer: Callable[[Redirect, Tensor], Tensor]) -> Iterator[Redirect]:
    """Replaces `module.forward` (the instance attribute, so hooks around the call stay) until exit."""
    redirect = Redirect(module, answer)
    before = module.__dict__.get("forward")
    module.forward = redirect
    try:
        yield redirect
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@contextmanager
def restored(model: nn.Module, fields: Sequence[PostHeadField]) -> Iterator[Callable[[], None]]:
    """Yields a function that sets each field of the model to its neutral value; on exit all have their values back.

    The head calls it when it answers, so that during the layers before it the model is as it always is.
    """
    owners = [(post_head_owner(model, field.place), field) for field in fields]
    before = [(owner, field.name, getattr(owner, field.name)) for owner, field in owners]

    def neutralise() -> None:
        for owner, field in owners:
            setattr(owner, field.name, field.neutral)

    try:
        yield neutralise
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
