"""What a reward function may return: one finite number or None for each completion.

Nothing is broadcast, cut or guessed: another length or type is an error that names the function.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch

from preftune.errors import RewardError
from preftune.rewards.records import shortened

# Rewards become float32: beyond this they would be infinite there.
_LARGEST = float(np.finfo(np.float32).max)


def reward_list(returned: Any, name: str, rows: int) -> list[Any]:
    """`returned` as a list of `rows` items: a list, a tuple, or a tensor or array of one axis.

    Raises:
        RewardError: anything else, with what was given and what was wanted.
    """
    wanted = f"wanted {rows} numbers (float, int, bool or None), one for each completion"
    if isinstance(returned, torch.Tensor | np.ndarray):
        if returned.ndim != 1:
            raise RewardError(
                f"reward {name!r} returned a {type(returned).__name__} of shape {tuple(returned.shape)}; {wanted}: "
                f"shape ({rows},)."
            )
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise RewardError(f"reward {name!r} returned {_shown(returned)}; {wanted}, in a list, tensor or array.")
    if len(returned) != rows:
        raise RewardError(f"reward {name!r} returned {len(returned)} values; {wanted}.")
    return list(returned)


def reward_value(value: Any, name: str, row: int) -> float:
    """One item as a float; NaN for None, which means that the function does not apply to this row.

    Raises:
        RewardError: another type, NaN, or beyond what float32 holds.
    """
    if value is None:
        return float("nan")
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, numbers.Real | np.bool_):
        raise RewardError(f"reward {name!r} returned {_shown(value)} for row {row}; wanted a float, int, bool or None.")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not abs(number) <= _LARGEST:
        raise RewardError(
            f"reward {name!r} returned {number} for row {row}; wanted a finite number. Return None where the function "
            "does not apply, or clip the value."
        )
    return number


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {shortened(value, 80)}"
