"""RolloutBackend: what turns prompts into completions, and the checks that every backend makes of its arguments.

A backend gets each prompt once and draws `num_generations` samples of it; it leaves model and random state as found.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from preftune.errors import RolloutError
from preftune.types import FinishReason, Rollouts, Sampling

Stream = tuple[int, ...]
"""Names a prompt within a run, for example `(round, global index of the prompt)`."""


class RolloutBackend(ABC):
    """Draws completions of the policy; a new backend implements `generate`.

    `load_weights` is for one with weights of its own, `conversations` for one that can go on from an earlier turn.
    """

    needs_weights: bool = False
    """Whether it has weights of its own: a trainer then calls `load_weights` before a round, after each step."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        *,
        stream: Sequence[Stream],
    ) -> Rollouts:
        """`num_generations` completions of each prompt.

        Args:
            prompts: Token ids of the prompts of this process, each prompt once.
            num_generations: G; at least 1.
            sampling: How tokens are drawn.
            stream: One key per prompt. With `sampling.seed` and the sample's number g it names the random numbers of a
                sample: given equal logits, what is drawn does not depend on which other prompts are asked for.

        Raises:
            ConfigError: an option of `sampling` that this backend cannot follow.
            RolloutError: prompts that cannot be continued, or a model that gives no numbers to draw from.
        """

    @contextmanager
    def conversations(self) -> Iterator[Callable[[Sequence[Sequence[int]]], None]]:
        """A block in which prompts begin with earlier prompts and what was drawn after them; weights stay the same.

        A backend may keep there what it has computed. It gives a function that is to be called with the token ids of
        conversations that go on, prompt and completion: what was kept of others is freed then, and the rest at the end.
        """
        yield lambda histories: None

    def load_weights(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:  # noqa: B027
        """Takes over the policy's weights; backends that run the policy itself have nothing to do."""

    def close(self) -> None:  # noqa: B027
        """Gives back what the backend holds; calling it again does nothing."""


def check_request(
    prompts: Sequence[Sequence[int]], num_generations: int, sampling: Sampling, stream: Sequence[Stream]
) -> None:
    """Raises a RolloutError where the arguments of `generate` cannot be followed by any backend."""
    if num_generations < 1 or sampling.max_new_tokens < 1 or not sampling.temperature >= 0:
        raise RolloutError(
            f"num_generations={num_generations}, max_new_tokens={sampling.max_new_tokens}, "
            f"temperature={sampling.temperature}; wanted at least 1, at least 1, and at least 0"
        )
    if len(stream) != len(prompts):
        raise RolloutError(f"{len(prompts)} prompts came with {len(stream)} stream keys; wanted one key per prompt")
    empty = [index for index, prompt in enumerate(prompts) if len(prompt) == 0]
    if empty:
        raise RolloutError(
            f"prompt {empty[0]} ({len(empty)} in all) has no tokens, so nothing predicts its first token; start it "
            "with the beginning-of-sequence token, or remove the row"
        )


def call_seed(seed: int, stream: Sequence[Stream]) -> int:
    """A seed below 2**31 for a whole call of `generate`, from the run's seed and every key."""
    key = repr((seed, *map(tuple, stream))).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1


def finish_reasons(completion_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[FinishReason]:
    """ "stop" where a completion ends in an end token, or has no token at all; else "length"."""
    ends = set(sampling.eos_token_ids)
    return ["stop" if not ids or ids[-1] in ends else "length" for ids in completion_ids]
