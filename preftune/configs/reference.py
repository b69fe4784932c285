"""Options of a reference model that follows the policy: TR-DPO sync and BEMA.

One mechanism a run: both at once is an error here, not a surprise in training.
"""

from __future__ import annotations

from dataclasses import dataclass

from preftune.configs.base import BaseConfig
from preftune.configs.fields import option
from preftune.errors import ConfigError


@dataclass(repr=False)
class ReferenceConfig(BaseConfig):
    """Whether, how and how often the reference model is moved towards the policy."""

    ref_adapter_name: str | None = option(
        None,
        "The adapter of the PeftModel you pass that is the reference. Unset: a frozen copy of its active adapter.",
    )
    sync_ref_model: bool = option(
        False,
        "Move the reference towards the policy every ref_model_sync_steps optimizer steps (TR-DPO, arXiv:2404.09656).",
    )
    ref_model_mixup_alpha: float = option(
        0.6, "TR-DPO: share of the policy in the new reference; the rest is the old reference.", low=0, high=1
    )
    ref_model_sync_steps: int = option(512, "TR-DPO: optimizer steps between two updates of the reference.", low=1)
    bema_ref_model: bool = option(
        False,
        "Let the reference be a bias-corrected average of the policy (BEMA, arXiv:2508.00180), see the bema_* options.",
    )
    bema_update_freq: int = option(400, "BEMA: optimizer steps between two updates of the average.", low=1)
    bema_ema_power: float = option(
        0.5, "BEMA: kappa, the power of the EMA weight's decay; 0 turns the EMA off (the average is then the policy)."
    )
    bema_bias_power: float = option(
        0.2, "BEMA: eta, the power of the bias correction's decay; below 0 turns the correction off."
    )
    bema_lag: int = option(10, "BEMA: rho, an offset of the step count that tames the first weights.", low=0)
    bema_update_after: int = option(
        0, "BEMA: the step of the first snapshot, from which the average starts (burn-in).", low=0
    )
    bema_multiplier: float = option(1.0, "BEMA: gamma, the scale of the step count in the weights.", above=0)
    bema_min_ema_multiplier: float = option(0.0, "BEMA: lower bound of the EMA weight.", low=0, high=1)
    bema_device: str = option(
        "cpu", "BEMA: the device that holds the snapshot and the average, for instance cpu or cuda."
    )
    ref_model_update_freq: int = option(
        400, "BEMA: optimizer steps between two copies of the average into the reference.", low=1
    )
    ref_model_update_after: int = option(
        0, "BEMA: the step from which the average is copied into the reference.", low=0
    )

    def _check(self) -> None:
        super()._check()
        if self.sync_ref_model and self.bema_ref_model:
            raise ConfigError(
                "sync_ref_model=True and bema_ref_model=True both move the reference model. Set one of them to False."
            )

    @property
    def moving_reference(self) -> str | None:
        """The option that moves the reference, or None where it stays."""
        return "sync_ref_model" if self.sync_ref_model else "bema_ref_model" if self.bema_ref_model else None


@dataclass(repr=False)
class StorableReferenceConfig(ReferenceConfig):
    """A reference of which a number for each row is enough, so that it can be scored once, before training."""

    precompute_ref_log_probs: bool = option(
        False, "Compute the reference's log-probabilities once, before training, and keep no reference model."
    )
    precompute_ref_batch_size: int | None = option(
        None, "Batch size of that computation. Unset: the training and evaluation batch sizes.", low=1
    )

    def _check(self) -> None:
        super()._check()
        if self.precompute_ref_log_probs and self.moving_reference is not None:
            raise ConfigError(
                f"{self.moving_reference}=True moves the reference model, but precompute_ref_log_probs=True keeps only "
                "its log-probabilities from before training. Set one of them to False."
            )
