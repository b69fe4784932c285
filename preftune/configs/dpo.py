"""Options of `DPOTrainer`: direct preference optimisation and its kin.

What contradicts itself (a moving reference that is stored, a divergence that the loss ignores) fails here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from preftune.configs.fields import option
from preftune.configs.offline import OfflineConfig
from preftune.configs.plain import function_path
from preftune.configs.reference import StorableReferenceConfig
from preftune.losses.names import DIVERGENCES, PAIR_LOSS_NAMES, validate_pair_losses


@dataclass(repr=False)
class DPOConfig(StorableReferenceConfig, OfflineConfig):
    """Direct preference optimisation: losses on pairs of completions, relative to a reference model."""

    learning_rate: float = option(1e-6, "Peak learning rate of the optimizer.", low=0)
    disable_dropout: bool = option(True, "Switch dropout off in the policy and the reference model.")
    loss_type: list[str] | str = option(
        ["sigmoid"],
        "One loss or several (their weighted sum, see loss_weights), or your own as package.module:function.",
        choices=PAIR_LOSS_NAMES,
        paths=True,
    )
    loss_weights: list[float] | None = option(None, "A weight for each loss of loss_type. Unset: 1 each.")
    beta: float = option(0.1, "How strongly the policy is held to the reference; larger is closer.", low=0)
    label_smoothing: float = option(
        0.0,
        "Share of pairs believed to be labelled the wrong way round. Used by sigmoid (then cDPO), robust, exo_pair, "
        "aot and aot_unpaired.",
        low=0,
        high=1,
    )
    f_divergence_type: str = option(
        "reverse_kl", "The divergence that holds the policy to the reference (arXiv:2309.16240).", choices=DIVERGENCES
    )
    f_alpha_divergence_coef: float = option(0.5, "The alpha of alpha_divergence.")
    ld_alpha: float | None = option(
        None,
        "Weight of the tokens beyond the shorter completion of a pair (LD-DPO, arXiv:2409.06411). Unset: 1.",
        low=0,
        high=1,
    )
    use_weighting: bool = option(
        False, "Weight each pair by how likely it is under the policy (WPO, arXiv:2406.11827)."
    )
    discopop_tau: float = option(0.05, "Temperature of the discopop loss.", above=0)

    def _normalise(self) -> None:
        super()._normalise()
        # Function objects are accepted, though the annotation names only what a config file can say.
        given = cast("Any", self.loss_type)
        names = list(given) if isinstance(given, (list, tuple)) else [given]
        self.loss_type = [function_path(name, "loss_type") if callable(name) else name for name in names]
        if isinstance(self.loss_weights, (int, float)):
            self.loss_weights = [self.loss_weights]

    def _check(self) -> None:
        super()._check()
        validate_pair_losses(
            self.loss_type,
            self.loss_weights,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            f_divergence_type=self.f_divergence_type,
            f_alpha_divergence_coef=self.f_alpha_divergence_coef,
            discopop_tau=self.discopop_tau,
            ld_alpha=self.ld_alpha,
            use_weighting=self.use_weighting,
        )
