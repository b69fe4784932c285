"""What reward functions report beside rewards: `log_extra` columns and `log_metric` numbers.

Each call gets a `Records` of its own, which can be pickled, so that it works in a process too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from preftune.errors import RewardError

# What training logs under names without a family before them; a number of the user's would be taken for it.
_OWN_NAMES = {
    *("loss", "aux_loss", "policy_loss", "grad_norm", "learning_rate", "kl", "entropy", "entropy_coef"),
    *("epoch", "step", "num_tokens", "total_flos", "step_time", "round_time"),
    *("reward", "reward_std", "frac_reward_zero_std"),
}
_OWN_FAMILIES = ("completions/", "sampling/", "clip_ratio/", "reference/", "eval_")


class Records:
    """Takes what one call of one function reports.

    Attributes:
        columns: Lists of one value per completion, by the name that the function gave.
        metrics: All numbers reported under a name.
    """

    def __init__(self, name: str, rows: int) -> None:
        self.name = name
        self.rows = rows
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Adds a column to the table of completions.

        Raises:
            RewardError: not one value for each completion.
        """
        values = list(values)
        if len(values) != self.rows:
            raise RewardError(
                f"reward {self.name!r} called log_extra({column!r}, ...) with {len(values)} values; wanted one for "
                f"each of the {self.rows} completions, in one call."
            )
        self.columns[column] = values

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to the logs; several under one name are averaged, and NaN counts as not reported.

        Raises:
            RewardError: not a number, or a name under which training itself logs.
        """
        if name in _OWN_NAMES or name.startswith(_OWN_FAMILIES):
            raise RewardError(
                f"reward {self.name!r} called log_metric({name!r}, ...), and training itself logs under that name; "
                f"take another one, such as {f'{self.name}/{name}'!r}."
            )
        try:
            number = float(value) if not isinstance(value, str) else None
        except (TypeError, ValueError, RuntimeError):  # the last from tensors of several numbers
            number = None
        if number is None:
            raise RewardError(
                f"reward {self.name!r} called log_metric({name!r}, ...) with {shortened(value, 80)}; wanted one number."
            )
        if not math.isnan(number):
            self.metrics.setdefault(name, []).append(number)


def call_recorded(function: Any, args: list[Any], kwargs: dict[str, Any], records: Records) -> tuple[Any, Records]:
    """For worker processes: `kwargs` hold methods of `records`, which comes back filled beside what was returned."""
    return function(*args, **kwargs), records


class ExtraColumns:
    """Keeps the columns of several functions apart, under names that stay the same from call to call.

    The function that used a name first keeps it; another one's column of that name is called "function/column".
    """

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._known: dict[str, None] = {}

    def merged(self, records: Sequence[Records], rows: int) -> dict[str, list[Any]]:
        """All columns; one that was used before and not in this call is a column of None."""
        merged: dict[str, list[Any]] = {}
        for record in records:
            for column, values in record.columns.items():
                owner = self._owners.setdefault(column, record.name)
                merged[column if owner == record.name else f"{record.name}/{column}"] = values
        self._known |= dict.fromkeys(merged)
        return {column: merged.get(column, [None] * rows) for column in self._known}


def mean_metrics(records: Sequence[Records]) -> dict[str, float]:
    """The mean of everything reported under a name, over all functions."""
    together: dict[str, list[float]] = {}
    for record in records:
        for name, values in record.metrics.items():
            together.setdefault(name, []).extend(values)
    return {name: math.fsum(values) / len(values) for name, values in together.items()}


def shortened(value: Any, limit: int = 200) -> str:
    """The beginning of `repr(value)`."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
