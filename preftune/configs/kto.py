"""Options of `KTOTrainer`: tuning on single completions that are labelled good or bad.

Rows are shuffled unless `train_sampling_strategy="sequential"` asks for their own order: no batch needs both labels.
"""

from __future__ import annotations

from dataclasses import dataclass

from preftune.configs.fields import option
from preftune.configs.offline import OfflineConfig
from preftune.configs.reference import StorableReferenceConfig
from preftune.errors import ConfigError
from preftune.losses.names import NEEDS_BASELINE, UNPAIRED_LOSS_NAMES

_STRATEGIES = ("random", "sequential")


@dataclass(repr=False)
class KTOConfig(StorableReferenceConfig, OfflineConfig):
    """Kahneman-Tversky optimisation: labelled single completions, relative to a reference model."""

    learning_rate: float = option(1e-6, "Peak learning rate of the optimizer.", low=0)
    disable_dropout: bool = option(True, "Switch dropout off in the policy and the reference model.")
    loss_type: str = option(
        "kto",
        "kto (arXiv:2402.01306), or apo_zero_unpaired (arXiv:2408.06266), which needs no mismatched completions.",
        choices=UNPAIRED_LOSS_NAMES,
    )
    beta: float = option(0.1, "How strongly the policy is held to the reference; larger is closer.", above=0)
    desirable_weight: float = option(
        1.0, "Weight of rows with label true; with undesirable_weight it makes up for unlike numbers of rows.", low=0
    )
    undesirable_weight: float = option(1.0, "Weight of rows with label false.", low=0)

    def _check(self) -> None:
        super()._check()
        if self.desirable_weight == self.undesirable_weight == 0:
            raise ConfigError(
                "desirable_weight=0 and undesirable_weight=0 leave nothing to learn. Set one above 0; 1 each is usual."
            )
        strategy = str(self.train_sampling_strategy)
        if self.loss_type in NEEDS_BASELINE and strategy not in _STRATEGIES:
            raise ConfigError(
                f"train_sampling_strategy={strategy!r} would group completions by length, and loss_type='kto' compares "
                "each row with the completion of the row that follows in a random order. Use "
                f"{' or '.join(map(repr, _STRATEGIES))}, or loss_type='apo_zero_unpaired'."
            )
