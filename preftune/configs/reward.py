"""Options of `RewardTrainer`: a scalar head that learns which of two answers is the better one.

Rows longer than max_length are left out and counted, unless `overlong="cut"` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from preftune.configs.fields import option
from preftune.configs.offline import OfflineConfig
from preftune.errors import ConfigError

OVERLONG = ("drop", "cut")


@dataclass(repr=False)
class RewardConfig(OfflineConfig):
    """Reward modelling: scores of prompt + answer, trained so that the chosen answer's is the higher one."""

    learning_rate: float = option(1e-4, "Peak learning rate of the optimizer.", low=0)
    disable_dropout: bool = option(True, "Switch dropout off in the model.")
    chat_template_path: str | None = option(
        None, "A Jinja file, or a tokenizer (folder or hub name), whose chat template is used and saved with the model."
    )
    eos_token: str | None = option(None, "The token that ends a text or turn. Unset: the tokenizer's own.")
    center_rewards_coefficient: float | None = option(
        None,
        "Weight of (score of chosen + score of rejected)^2, which keeps scores around 0 (arXiv:2312.09244; 0.01 is "
        "usual). Unset: 0.",
        low=0,
    )
    overlong: str = option(
        "drop",
        "What becomes of a pair with more than max_length tokens on a side: drop (left out and counted) or cut "
        "(truncation_mode says at which end).",
        choices=OVERLONG,
    )

    def _check(self) -> None:
        super()._check()
        if self.router_aux_loss_coef:
            raise ConfigError(
                f"router_aux_loss_coef={self.router_aux_loss_coef}: sequence classification models do not compute a "
                "load balancing loss. Leave it out."
            )
