"""HealthCallback: warns, while a run goes on, when its logs look like a failure that people have met before.

It reads logs and never changes a run, unless `stop_on` names findings that should end it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from preftune.callbacks.findings import CHECKS, START, WINDOW, Entry, Finding, find, is_training
from preftune.callbacks.formatting import plain
from preftune.configs.fields import did_you_mean
from preftune.errors import ConfigError

logger = logging.getLogger(__name__)

AGAIN = 10
"""A finding is said again once the run is so many times as long as when it was last said."""


class HealthCallback(TrainerCallback):
    """Looks at every log of training and says each finding once, with what was seen and what to try.

    Works in any trainer of transformers; metrics that are not logged are not judged. The findings are those of the
    report, see docs/health.md.

    Args:
        stop_on: Names of findings that end training after the step at which they are seen, such as
            `["loss_not_finite"]`. All ranks see the same logs, and stop together.

    Attributes:
        findings: By name, the last finding that was said.

    Raises:
        ConfigError: `stop_on` names no finding.
    """

    def __init__(self, stop_on: Sequence[str] = ()) -> None:
        if isinstance(stop_on, str):
            raise ConfigError(f"stop_on={stop_on!r} is a string; wanted a list of names, for instance [{stop_on!r}].")
        for name in stop_on:
            if name not in CHECKS:
                raise ConfigError(
                    f"stop_on has {name!r}, which is no finding{did_you_mean(name, CHECKS) or '.'} "
                    f"There are: {', '.join(CHECKS)}."
                )
        self.stop_on = tuple(stop_on)
        self.findings: dict[str, Finding] = {}
        self._start: list[Entry] = []
        self._recent: deque[Entry] = deque(maxlen=WINDOW)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts anew, or, in a resumed run, with the logs from before."""
        self.findings = {}
        self._start, self._recent = [], deque(maxlen=WINDOW)
        for entry in state.log_history:
            self._add(entry)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        entry = {key: plain(value) for key, value in (logs or {}).items()} | {"step": state.global_step}
        if not self._add(entry):
            return
        for finding in find([*self._start, *self._recent]):
            said = self.findings.get(finding.code)
            if said is None or state.global_step >= AGAIN * max(1, said.step or 0):
                self._say(finding, state)
            if finding.code in self.stop_on:
                control.should_training_stop = True

    def _add(self, entry: Entry) -> bool:
        """Whether it is a log of training, and was added."""
        if not is_training(entry):
            return False
        if len(self._start) < START:
            self._start.append(entry)
        else:
            self._recent.append(entry)
        return True

    def _say(self, finding: Finding, state: TrainerState) -> None:
        self.findings[finding.code] = finding
        if state.is_world_process_zero:
            end = " Training stops here, as stop_on asks." if finding.code in self.stop_on else ""
            logger.warning("Health at step %d: %s (%s)%s", state.global_step, finding, finding.code, end)
