"""Rollouts by a function of the user, `rollout_func(prompts, trainer)`: what it returns, checked.

It gets every prompt once for each completion, as TRL's does, and answers with one entry for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from preftune.errors import RolloutError
from preftune.models import structure
from preftune.models.random_state import forked_random_states
from preftune.rollouts.base import Stream, call_seed, finish_reasons
from preftune.types import Rollouts, Sampling

_WANTED = ("prompt_ids", "completion_ids", "logprobs")
RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]


class FunctionRollouts:
    """Calls `rollout_func(prompts, trainer)`.

    It returns a dict of `prompt_ids`, `completion_ids` and `logprobs` (or None), each a list with an entry for each of
    `prompts`; `env_mask`, 1 at tokens that the policy drew; and whatever else reward functions shall get: a list has a
    value for each, anything else is handed to all.

    Global random states within are a function of the round, and come back after.
    """

    def __init__(self, rollout_func: RolloutFunc, trainer: Any) -> None:
        self._function = rollout_func
        self._trainer = trainer

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], size: int, sampling: Sampling, stream: Sequence[Stream]
    ) -> Rollouts:
        """`size` completions of each row.

        Raises:
            RolloutError: what the function returned is no rollout of these prompts, with the row and what is wrong.
        """
        prompts = [row.get("prompt", row["prompt_ids"]) for row in rows for _ in range(size)]
        with forked_random_states(call_seed(sampling.seed, stream)):
            returned = self._function(list(prompts), self._trainer)
        given = _checked(returned, len(prompts))
        for name in ("prompt_ids", "completion_ids"):
            _check_known(name, given[name], structure.vocabulary_size(self._trainer.model))
        masks = given.pop("env_mask")
        completion_ids, logps = given.pop("completion_ids"), given.pop("logprobs")
        return Rollouts(
            prompt_ids=given.pop("prompt_ids"),
            completion_ids=completion_ids,
            finish_reasons=finish_reasons(completion_ids, sampling),
            logps=logps,
            masks=masks,
            columns={name: _for_each(name, value, len(prompts)) for name, value in given.items()},
        )


def _checked(returned: Any, rows: int) -> dict[str, Any]:
    """What was returned, as lists of plain numbers; log-probs are NaN where `env_mask`, if there is one, is 0."""
    missing = [name for name in _WANTED if not isinstance(returned, Mapping) or name not in returned]
    if missing:
        what = f"a dict with {sorted(returned)}" if isinstance(returned, Mapping) else f"a {type(returned).__name__}"
        raise RolloutError(f"rollout_func returned {what}; wanted a dict that has {', '.join(map(repr, missing))} too.")
    given = {"env_mask": None, **returned}
    for name, kind in (("prompt_ids", int), ("completion_ids", int), ("logprobs", _number), ("env_mask", _one_or_zero)):
        if given[name] is not None or name in ("prompt_ids", "completion_ids"):
            given[name] = [
                _plain(name, kind, values, row) for row, values in enumerate(_entries(name, given[name], rows))
            ]
    for name in ("logprobs", "env_mask"):
        for row, values in enumerate(given[name] or ()):
            if len(values) != len(given["completion_ids"][row]):
                raise RolloutError(
                    f"rollout_func returned {len(values)} values of {name!r} and {len(given['completion_ids'][row])} "
                    f"of 'completion_ids' in row {row}; wanted one for each token."
                )
    empty = [row for row, ids in enumerate(given["prompt_ids"]) if not ids]
    if empty:
        raise RolloutError(f"rollout_func returned no 'prompt_ids' in row {empty[0]}; nothing predicts its first token")
    if given["logprobs"] is not None and given["env_mask"] is not None:
        for values, mask in zip(given["logprobs"], given["env_mask"], strict=True):
            values[:] = [value if drawn else float("nan") for value, drawn in zip(values, mask, strict=True)]
    return given


def _entries(name: str, value: Any, rows: int) -> Any:
    count = len(value) if isinstance(value, Sized) else 0
    if count != rows:
        raise RolloutError(
            f"rollout_func returned {count} entries of {name!r} for {rows} prompts; wanted one for each prompt it was "
            "given, which names a prompt as often as it has completions."
        )
    return value


def _plain(name: str, kind: Callable[[Any], Any], values: Any, row: int) -> list[Any]:
    try:
        return list(map(kind, values))
    except (TypeError, ValueError, IndexError) as error:
        raise RolloutError(
            f"rollout_func returned {values!r:.80} as {name!r} of row {row}; wanted a list of numbers, or an empty one."
        ) from error


def _check_known(name: str, entries: Sequence[Sequence[int]], size: int) -> None:
    for row, ids in enumerate(entries):
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise RolloutError(
                f"rollout_func returned token {wrong} in {name!r} of row {row}, and the model knows the ids 0 to "
                f"{size - 1}."
            )


def _one_or_zero(value: Any) -> int:
    return int(bool(value))


def _number(value: Any) -> float:
    """A log-probability; engines that give several candidates put that of the token first."""
    return float(value[0]) if isinstance(value, list | tuple) else float(value)


def _for_each(name: str, value: Any, rows: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * rows
    if len(value) != rows:
        raise RolloutError(f"rollout_func returned {len(value)} values of {name!r} for {rows} prompts; wanted {rows}.")
    return value
