"""Names of logged values that are no metrics of learning: clocks, and facts about how far a run is.

The panel, the report and `preftune compare` go by this one list.
"""

from __future__ import annotations

DRIFT = "reference/drift"
MOVES = "reference/moves"
LAST_MOVE = "reference/last_move_step"
FACTS = frozenset({"step", "epoch", "num_tokens", "total_flos", MOVES, LAST_MOVE})
CLOCKS = (
    "wall_time",
    "runtime",
    "per_second",
    "seconds_per_sample",
    "preparation_time",
    "compilation_time",
    "round_time",
    "step_time",
)
"""Ends of names; what stands before them says what was timed."""


def is_clock(name: str) -> bool:
    """Whether a logged value depends on how fast a machine was."""
    return name.endswith(CLOCKS)
