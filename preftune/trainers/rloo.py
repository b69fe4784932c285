"""REINFORCE leave-one-out (arXiv:2402.14740): each completion against the mean of its siblings.

The KL penalty is part of the reward, so the distance from the reference is paid for by the completion that goes it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from preftune.configs.rloo import RLOOConfig
from preftune.losses.advantages import combine_rewards, leave_one_out, shaped_rewards, whiten
from preftune.losses.kl import k1
from preftune.losses.policy_gradient import rloo
from preftune.rollouts.base import RolloutBackend
from preftune.trainers.base import EvalData, RawData
from preftune.trainers.online import OnlineTrainer
from preftune.trainers.step import StepTotals
from preftune.types import LossOutput, PolicyTokens


class RLOOTrainer(OnlineTrainer):
    """Trains a policy on rewards of its own completions, with the leave-one-out baseline.

    Args:
        model: Name or folder of a causal language model, a model, or a PeftModel.
        reward_funcs: One or several functions, names of built-in ones, or reward models; see `docs/rewards.md`.
        args: An `RLOOConfig`; by default `RLOOConfig("{model}-RLOO")`.
        train_dataset: Rows with a `prompt`, text or messages; other columns go to the reward functions.
        eval_dataset: The same, or a dict of such sets.

    With two completions of a prompt the advantages are the difference of their rewards and its negative.
    """

    args: RLOOConfig
    config_class = RLOOConfig
    name = "RLOO"
    needs_old_logps: ClassVar[bool] = True

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any,
        args: RLOOConfig | None = None,
        train_dataset: RawData | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        rollout_backend: RolloutBackend | None = None,
    ) -> None:
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            rollout_backend=rollout_backend,
        )

    def advantages(self, rewards_PGK: Tensor, kl_PG: Tensor | None) -> Tensor:
        rewards_PG = combine_rewards(rewards_PGK, self.reward_weights)
        shaped_PG = shaped_rewards(
            rewards_PG, kl_PG, beta=self.args.beta, reward_clip_range=self.args.reward_clip_range
        )
        advantages_PG = leave_one_out(shaped_PG)
        return whiten(advantages_PG, ~rewards_PG.isnan()) if self.args.normalize_advantages else advantages_PG

    def loss(self, tokens: PolicyTokens) -> LossOutput:
        """The clipped surrogate of whole completions, `[B]`."""
        output = rloo(
            tokens.logps,
            tokens.old_logps,
            tokens.advantages,
            tokens.mask,
            epsilon=self.args.epsilon,
            epsilon_high=self.args.epsilon_high,
        )
        if tokens.ref_logps is None:
            return output
        old_logps_BT = tokens.logps.detach() if tokens.old_logps is None else tokens.old_logps
        return LossOutput(output.loss, {**output.metrics, "kl": k1(old_logps_BT, tokens.ref_logps)})

    def reduce(self, loss: Tensor, mask_BT: Tensor, totals: StepTotals) -> Tensor:
        return loss.sum() / totals.counts["rows"].float()

    @property
    def learns_from_flat(self) -> bool:
        """The KL is in the advantage: where that is 0, so is the gradient."""
        return bool(self.aux_loss_coef)
