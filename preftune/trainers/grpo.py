"""Group relative policy optimisation (arXiv:2402.03300) and its family: each completion against its group.

The algorithm is `advantages` and `loss`; how a loss is averaged over tokens is the other half of its name (`reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from preftune.configs.grpo import GRPOConfig
from preftune.data.report import DataReport
from preftune.losses.advantages import combine_rewards, gdpo_advantages, group_advantages
from preftune.losses.aggregate import REDUCTION_OF
from preftune.losses.entropy import EntropyController, entropy_threshold, top_entropy_mask
from preftune.losses.importance import off_policy_keep, sampler_gap, sampler_ratio
from preftune.losses.policy_gradient import policy_loss
from preftune.models.float32_head import check_float32_head, head_in_float32
from preftune.rollouts.base import RolloutBackend
from preftune.rollouts.function import FunctionRollouts, RolloutFunc
from preftune.trainers.agents import prompts_or_empty, tool_rollouts, toolbox_of, with_own_rewards
from preftune.trainers.arguments import own_config
from preftune.trainers.base import EvalData, RawData
from preftune.trainers.online import OnlineTrainer
from preftune.trainers.shares import Batch
from preftune.trainers.step import StepTotals
from preftune.types import LossOutput, PolicyTokens, Rollouts, Sampling

_HYPER = (
    "epsilon", "epsilon_high", "delta", "beta", "use_bias_correction_kl", "importance_sampling_level", "loss_type",
    "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg",
)  # fmt: skip


class GRPOTrainer(OnlineTrainer):
    """Trains a policy on rewards of its own completions, compared within groups of one prompt.

    Args:
        model: Name or folder of a causal language model, a model, or a PeftModel.
        reward_funcs: One or several functions, names of built-in ones, or reward models; see `docs/rewards.md`.
        args: A `GRPOConfig`; by default `GRPOConfig("{model}-GRPO")`.
        train_dataset: Rows with a `prompt`, text or messages; other columns go to the reward functions.
        eval_dataset: The same, or a dict of such sets.
        tools: Functions that the policy can call in its completions; see `docs/agents.md`.
        rollout_func: `rollout_func(prompts, trainer)` makes the completions.
        environment_factory: Makes an environment for each completion, whose methods are tools; or a dict of such.
        rollout_backend: What draws completions, in place of the one that `args` name.

    Without scaling, advantages are those of RLOO times (G - 1) / G.
    """

    args: GRPOConfig
    config_class = GRPOConfig
    name = "GRPO"

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: RawData | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: Any = None,
        *,
        rollout_backend: RolloutBackend | None = None,
    ) -> None:
        args = cast(GRPOConfig, own_config(self.config_class, args, model, self.name))
        self._toolbox = toolbox_of(args, tools, environment_factory, rollout_func)
        self.rollout_columns = None if rollout_func is not None else ()
        if self._toolbox is not None:
            self.rollout_columns = self._toolbox.columns
            reward_funcs, args = with_own_rewards(self._toolbox, reward_funcs, args)
            train_dataset = prompts_or_empty(self._toolbox, train_dataset, args)
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
        args = self.args
        self.float32_head = args.cast_lm_head_to_fp32
        if self.float32_head:
            check_float32_head(self.model)
        self._rollouts: Callable[..., Rollouts] | None = None
        if rollout_func is not None:
            self._rollouts = FunctionRollouts(rollout_func, self)
        elif self._toolbox is not None:
            self._rollouts = tool_rollouts(self, self._toolbox)
        self._entropy = EntropyController(
            args.entropy_coef,
            args.use_adaptive_entropy,
            target=args.entropy_target,
            delta=args.entropy_coef_delta,
            low=args.entropy_coef_min,
            high=args.entropy_coef_max,
        )
        self._threshold: Tensor | None = None
        if args.use_adaptive_entropy:
            self._entropy_sums = torch.zeros(2, dtype=torch.float64, device=args.device)
            self.add_callback(_SteerEntropy(self))

    # Agents

    def rollout(
        self, rows: Sequence[Mapping[str, Any]], size: int, sampling: Sampling, stream: Sequence[tuple[int, ...]]
    ) -> Rollouts:
        draw = self._rollouts or super().rollout
        with head_in_float32(self.model) if self.float32_head else nullcontext():  # as the trainer's own scores
            return draw(rows, size, sampling, stream)

    def prepare_dataset(self, dataset: RawData, split: str) -> tuple[RawData, DataReport]:
        prepared, report = super().prepare_dataset(dataset, split)
        if self._toolbox is not None:
            self._toolbox.check_rows(prepared, split)
        return prepared, report

    # The algorithm

    def advantages(self, rewards_PGK: Tensor, kl_PG: Tensor | None) -> Tensor:
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            return gdpo_advantages(rewards_PGK, self.reward_weights)
        rewards_PG = combine_rewards(rewards_PGK, self.reward_weights)
        return group_advantages(rewards_PG, scale=str(self.args.scale_rewards))

    def loss(self, tokens: PolicyTokens) -> LossOutput:
        """A surrogate of `loss_type` for each token, masked and corrected, plus beta times the KL."""
        hyper = {name: vars(self.args)[name] for name in _HYPER}
        correction, metrics = self._sampler_correction(tokens)
        output = policy_loss(
            tokens.logps,
            tokens.old_logps,
            tokens.ref_logps,
            tokens.advantages,
            tokens.mask,
            keep=self._keep(tokens),
            sampler_ratio=correction,
            **hyper,
        )
        return LossOutput(output.loss, {**output.metrics, **metrics})

    def reduce(self, loss: Tensor, mask_BT: Tensor, totals: StepTotals) -> Tensor:
        return REDUCTION_OF[self.args.loss_type](
            loss,
            mask_BT,
            rows=totals.counts["rows"].float(),
            tokens=totals.counts["tokens"].float(),
            max_completion_length=self.args.max_completion_length,
        )

    # Masks and corrections

    def _keep(self, tokens: PolicyTokens) -> Tensor | None:
        """0 where the surrogate is switched off: rows too far off-policy, tokens that are not uncertain enough."""
        keep = None
        if self.args.off_policy_mask_threshold is not None:
            sampled = tokens.sampler_logps if tokens.sampler_logps is not None else tokens.old_logps
            keep = off_policy_keep(
                tokens.logps,
                tokens.logps.detach() if sampled is None else sampled,
                tokens.advantages,
                tokens.mask,
                threshold=self.args.off_policy_mask_threshold,
            ).float()
        if self._threshold is not None:
            assert tokens.entropy is not None
            uncertain = top_entropy_mask(tokens.entropy.detach(), tokens.mask, self._threshold).float()
            keep = uncertain if keep is None else keep * uncertain
        return keep

    @property
    def corrects_sampler(self) -> bool:
        """Whether completions come from an engine whose probabilities are slightly others than the trainer's."""
        is_foreign = self.args.resolved_rollout_backend in ("server", "vllm")
        return self.args.vllm_importance_sampling_correction and (
            is_foreign or self.args.rollout_precision == "bfloat16"
        )

    def _sampler_correction(self, tokens: PolicyTokens) -> tuple[Tensor | None, dict[str, Tensor]]:
        if tokens.sampler_logps is None or not self.corrects_sampler:
            return None, {}
        old = tokens.logps.detach() if tokens.old_logps is None else tokens.old_logps
        weight = sampler_ratio(
            sampler_gap(old, tokens.sampler_logps, tokens.mask),
            mode=self.args.vllm_importance_sampling_mode,
            clip_min=self.args.vllm_importance_sampling_clip_min,
            clip_max=self.args.vllm_importance_sampling_clip_max,
        )
        seen = weight if weight.shape == tokens.mask.shape else weight.flatten()
        name = "sampling/importance_sampling_ratio"
        metrics = {f"{name}/{kind}": seen for kind in ("mean", "min", "max")}
        return weight, {**metrics, f"{name}/dropped": (seen == 0).float()}

    # Entropy

    @property
    def entropy_coef(self) -> float:
        return self._entropy.active_coef if self.model.training else 0.0

    def entropy_bonus(self, tokens: PolicyTokens, totals: StepTotals) -> Tensor:
        if self._threshold is None:
            return super().entropy_bonus(tokens, totals)
        assert tokens.entropy is not None
        uncertain = top_entropy_mask(tokens.entropy.detach(), tokens.mask, self._threshold)
        return (tokens.entropy * uncertain).sum() / totals.statistics.clamp(min=1)

    def step_statistics(self, model: nn.Module, batches: list[Batch], totals: StepTotals) -> Tensor | None:
        """The entropy from which on a token learns, over all tokens of the step; returns how many do."""
        self._threshold = None
        if self.args.top_entropy_quantile == 1.0:
            return None
        with torch.no_grad(), self.metrics.paused():
            parts = [part for batch in batches for part in self.micro_batches(batch)]
            # a stand-in for a rank without tokens too: ranks go through a sharded policy together
            seen = [(self.tokens_of(model, part)[0], part["repeated"]) for part in parts]
        entropies = [t.entropy[t.mask > 0] for t, repeated in seen if t.entropy is not None and not repeated]
        whole = self.gathered_rows(torch.cat([torch.zeros(0, device=self.args.device), *entropies]))
        self._threshold = entropy_threshold(whole, self.args.top_entropy_quantile)
        return (whole >= self._threshold).sum().float()

    def observe(self, tokens: PolicyTokens) -> None:
        if self.args.use_adaptive_entropy:
            assert tokens.entropy is not None
            self._entropy_sums += torch.stack([tokens.entropy.detach().double().sum(), tokens.mask.double().sum()])

    def steer_entropy(self) -> None:
        """Tells the controller the mean entropy of a token over the step that has ended, over all ranks."""
        total, count = cast(Tensor, self.accelerator.reduce(self._entropy_sums, "sum")).tolist()
        self._entropy.update(total / max(count, 1))
        self._entropy_sums.zero_()

    def own_parts(self) -> dict[str, Any]:
        return {"entropy": self._entropy} if self.args.use_adaptive_entropy else {}


class _SteerEntropy(TrainerCallback):
    """Steers at the end of each optimizer step, before a checkpoint of it is written."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.steer_entropy()
