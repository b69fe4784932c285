"""Keys and values between the turns of conversations: what has been computed of a prompt is not computed again.

A sequence is found by its tokens alone, so what is used is never more than what a prompt really begins with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from preftune.data.encoding import common_prefix_length
from preftune.rollouts.cache import LayerStates


@dataclass(frozen=True)
class Past:
    """Tokens, and what the model has computed of them: of each layer the states of one row, a column a token."""

    ids: list[int]
    layers: list[LayerStates]


class KeptRows:
    """Sequences in alphabetical order, so that those with the longest common beginning are neighbours.

    None is the beginning of another one: it would say nothing more.

    Args:
        max_tokens: Of all sequences together; what does not fit is not kept. 0 keeps nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._pasts: list[Past] = []

    @property
    def keeps(self) -> bool:
        return self._max_tokens > 0

    @property
    def tokens(self) -> int:
        return sum(len(past.ids) for past in self._pasts)

    def add(self, ids: list[int], states: Callable[[], list[LayerStates]]) -> None:
        """Keeps a sequence, in place of one that it continues; its `states` are asked for if there is room."""
        at = self._place(ids)
        if at < len(self._pasts) and self._pasts[at].ids[: len(ids)] == ids:
            return
        if at and ids[: len(self._pasts[at - 1].ids)] == self._pasts[at - 1].ids:
            at -= 1
            del self._pasts[at]
        if self.tokens + len(ids) <= self._max_tokens:
            self._pasts.insert(at, Past(ids, states()))

    def known(self, prompt: Sequence[int]) -> int:
        """Tokens at the beginning of a prompt that need not be computed; its last one always is."""
        return self._nearest(list(prompt))[0]

    def past(self, prompt: Sequence[int], length: int) -> Past:
        """The first `length` tokens of a prompt of which at least so many are `known`."""
        past = self._pasts[self._nearest(list(prompt))[1]]
        return Past(past.ids[:length], [states.begin(length) for states in past.layers])

    def only(self, histories: Sequence[Sequence[int]]) -> None:
        """Frees what no prompt that begins with one of these would use."""
        used = {self._nearest(list(history)) for history in histories}
        self._pasts = [self._pasts[at] for at in sorted({at for known, at in used if known})]

    def _place(self, ids: list[int]) -> int:
        return bisect_left(self._pasts, ids, key=lambda past: past.ids)

    def _nearest(self, prompt: list[int]) -> tuple[int, int]:
        """The number of known tokens, and the place of the sequence that has them."""
        at = self._place(prompt)
        around = [i for i in (at - 1, at) if 0 <= i < len(self._pasts)]
        return max(((common_prefix_length(self._pasts[i].ids, prompt[:-1]), i) for i in around), default=(0, -1))
