"""Scorers of completions, `(prompt, completion) -> number`, plain or async: each has a time limit, none can stop a run.

They are called as reward functions are; a scorer that raises for one completion gives None for that one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from preftune.rewards.base import RewardRunner
from preftune.rewards.calling import is_async

logger = logging.getLogger(__name__)

Scorer = Callable[[str, str], float | Awaitable[float]]


class ScorerRunner:
    """Scores one completion after the other, async scorers all at once; global random states are left as found.

    Args:
        scorers: By name.
        timeout: Seconds that a scorer may take for all completions of a call; past it all of its scores are None. None:
            no limit.

    Raises:
        ValueError: something that cannot be called, or a name that is taken (`prompt`, `completion`).
    """

    def __init__(self, scorers: Mapping[str, Scorer], timeout: float | None):
        for name, scorer in scorers.items():
            if not callable(scorer):
                raise ValueError(
                    f"scorer {name!r} is a {type(scorer).__name__}; wanted a function of (prompt, completion)"
                )
            if name in ("step", "prompt", "completion", "dataset"):
                raise ValueError(f"a scorer cannot be called {name!r}, which is another column; rename it")
        self.names = list(scorers)
        self._warned: set[str] = set()
        self._runner = RewardRunner(
            [self._all(name, scorer) for name, scorer in scorers.items()],
            names=self.names,
            timeout=timeout,
            on_error="none",
        )

    def run(self, prompts: Sequence[str], completions: Sequence[str]) -> list[dict[str, float | None]]:
        """`{scorer: number or None}` of each completion."""
        if not completions:
            return []
        values = self._runner.run(
            prompts=prompts, completions=completions, completion_ids=[[] for _ in completions]
        ).values
        return [{n: None if v != v else float(v) for n, v in zip(self.names, row)} for row in values]

    def close(self) -> None:
        self._runner.close()

    def _all(self, name: str, scorer: Scorer) -> Callable[..., Any]:
        """The scorer as a reward function."""

        async def score_async(prompts: list[str], completions: list[str]) -> list[Any]:
            calls: Any = [scorer(prompt, completion) for prompt, completion in zip(prompts, completions)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            return [self._or_none(name, value) if isinstance(value, BaseException) else value for value in found]

        def score(prompts: list[str], completions: list[str]) -> list[Any]:
            return [one(prompt, completion) for prompt, completion in zip(prompts, completions)]

        def one(prompt: str, completion: str) -> Any:
            try:
                value = scorer(prompt, completion)
                return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value
            except Exception as error:  # noqa: BLE001  (whatever a user's scorer raises, training goes on)
                return self._or_none(name, error)

        return score_async if is_async(scorer) else score

    def _or_none(self, name: str, error: BaseException) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "scorer %r failed: %s: %s. That completion has no score; further failures are not reported.",
                name,
                type(error).__name__,
                error,
            )


async def _awaited(value: Any) -> Any:
    """What an async function behind a decorator or a lambda gives."""
    return await value
