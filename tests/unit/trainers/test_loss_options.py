"""Every option of GRPO and RLOO reaches what it is an option of: changing it changes the advantages or the loss.

That the numbers are right is tested where they are made, in `tests/unit/losses`.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from preftune import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from preftune.rollouts.choose import sampling_of
from preftune.types import PolicyTokens, Sampling
from tests.support.runs import options

KINDS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def one(completions, **_):
    return [1.0] * len(completions)


def other(completions, **_):
    return [2.0] * len(completions)


@pytest.fixture
def build(tmp_path, tiny_model, tokenizer):
    def made(kind: str, **changes):
        trainer, config = KINDS[kind]
        defaults = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 5, "beta": 0.1}
        return trainer(
            tiny_model(),
            [one, other],
            config(**options(tmp_path, **defaults | changes)),
            Dataset.from_list([{"prompt": text} for text in ("a", "b")]),
            processing_class=tokenizer,
        )

    return made


def tokens() -> PolicyTokens:
    """Far off-policy, both signs of advantage, so that whatever clips, fades or drops does so."""
    generator = torch.Generator().manual_seed(0)
    logps, ref = (-torch.rand(4, 3, generator=generator) * 3 for _ in range(2))
    # ratios of the completions: 1.35, 0.74, 1.22, 0.37
    old = logps - torch.tensor([[0.1, 0.1, 0.1], [-0.85, 0.55, 0.0], [0.3, -0.3, 0.2], [-1.0, 0.0, 0.0]])
    sampler = old + torch.tensor([[0.2], [-0.2], [0.2], [-0.2]])  # the sampler's correction: 0.55, 1.5, 0.55, 1.2
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0])
    return PolicyTokens(logps * mask, old * mask, advantages, mask, ref * mask, sampler * mask, torch.ones(4, 3))


@pytest.mark.parametrize(
    ("kind", "base", "changed"),
    [
        ("grpo", {}, {"epsilon": 0.05}),
        ("grpo", {}, {"epsilon_high": 0.05}),
        ("grpo", {}, {"delta": 1.5}),
        ("grpo", {}, {"beta": 0.3}),
        ("grpo", {}, {"use_bias_correction_kl": False}),
        ("grpo", {"loss_type": "grpo"}, {"importance_sampling_level": "sequence"}),
        ("grpo", {}, {"loss_type": "cispo"}),
        ("grpo", {"loss_type": "cispo"}, {"epsilon_high": 1.5}),
        ("grpo", {"loss_type": "sapo"}, {"sapo_temperature_neg": 3.0}),
        ("grpo", {"loss_type": "sapo"}, {"sapo_temperature_pos": 3.0}),
        *[("grpo", {"loss_type": "vespo"}, {f"vespo_{name}": 0.5}) for name in ("k_pos", "lambda_pos", "k_neg")],
        ("grpo", {"loss_type": "vespo"}, {"vespo_lambda_neg": 0.5}),
        ("grpo", {}, {"off_policy_mask_threshold": 0.0}),
        ("grpo", {"off_policy_mask_threshold": 0.0}, {"off_policy_mask_threshold": 2.0}),
        ("grpo", {"vllm_importance_sampling_correction": False}, {"vllm_importance_sampling_correction": True}),
        ("grpo", {}, {"vllm_importance_sampling_mode": "token_truncate"}),
        ("grpo", {}, {"vllm_importance_sampling_clip_max": 0.5}),
        ("grpo", {}, {"vllm_importance_sampling_clip_min": 0.9}),
        ("rloo", {}, {"epsilon": 0.05}),
        ("rloo", {}, {"epsilon_high": 0.05}),
    ],
    ids=str,
)
def test_options_of_the_loss(build, kind, base, changed):
    corrected = {"rollout_precision": "bfloat16"} if any("vllm" in name for name in base | changed) else {}
    losses = [build(kind, **corrected | base | more).loss(tokens()).loss for more in ({}, changed)]
    assert not torch.allclose(*losses)


REWARDS = torch.tensor([[[0.0, 4.0], [1.0, 2.0]], [[7.0, 0.0], [3.0, 1.0]]], dtype=torch.float64)
KL = torch.tensor([[0.5, 0.1], [2.0, 0.3]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("grpo", {"scale_rewards": "batch"}),
        ("grpo", {"scale_rewards": False}),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}),
        ("grpo", {"reward_weights": [1.0, 0.1]}),
        ("rloo", {"reward_weights": [1.0, 0.1]}),
        ("rloo", {"beta": 0.7}),
        ("rloo", {"reward_clip_range": [0.0, 3.5]}),
        ("rloo", {"normalize_advantages": True}),
    ],
    ids=str,
)
def test_options_of_the_advantages(build, kind, changed):
    advantages = [build(kind, **more).advantages(REWARDS, KL if kind == "rloo" else None) for more in ({}, changed)]
    assert not torch.allclose(*advantages)


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_options_of_sampling(config):
    """A temperature that reaches the scores and not the sampler would train on other tokens than are drawn."""
    args = config(
        "out", temperature=0.5, top_p=0.6, top_k=7, min_p=0.1, repetition_penalty=1.2, max_completion_length=9, seed=3,
        generation_kwargs={"min_new_tokens": 2},
    )  # fmt: skip
    assert sampling_of(args, {5, 4}) == Sampling(9, 0.5, 0.6, 7, 0.1, 1.2, (4, 5), 3, {"min_new_tokens": 2})
