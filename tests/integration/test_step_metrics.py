"""Metrics of training steps: every one by hand in float64, and the same however a step is cut into micro-batches.

Names are those that dashboards of other libraries look for.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from tests.support.trainers import ONLINE
from tests.support.trainers import build as build_trainer

# a round serves two optimizer steps whatever the cut, so that ratios are not all 1
ROUNDS = {"num_generations": 4, "max_completion_length": 5, "beta": 0.1, "epsilon": 0.01, "num_iterations": 2}
ROUNDS |= {"max_steps": 4, "learning_rate": 0.1}
OPTIONS = {
    "sft": {},
    "dpo": {"ld_alpha": 0.5, "loss_type": ["sigmoid", "sft"]},
    "kto": {"beta": 0.02},
    "reward": {},
    "grpo": ROUNDS,
    "rloo": ROUNDS,
}
EVERY = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens"}
ROUND = {
    "reward", "reward_std", "rewards/letters/mean", "rewards/letters/std", "frac_reward_zero_std", "entropy", "kl",
    *(f"completions/{kind}_length" for kind in ("mean", "min", "max")), "completions/clipped_ratio",
    *(f"clip_ratio/{kind}" for kind in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")),
}  # fmt: skip
NAMES = {
    "sft": {"entropy", "mean_token_accuracy"},
    "dpo": {
        "entropy", "mean_token_accuracy", "rewards/accuracies", "rewards/margins",
        *(f"{name}/{side}" for name in ("rewards", "logps", "logits") for side in ("chosen", "rejected")),
    },
    "kto": {
        "kl", "entropy", "rewards/margins",
        *(f"{name}/{side}" for name in ("rewards", "logps", "logits") for side in ("chosen", "rejected")),
    },
    "reward": {"min_reward", "mean_reward", "max_reward", "accuracy", "margin"},
    "grpo": ROUND,
    "rloo": ROUND,
}  # fmt: skip
CUTS = (
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    {"per_device_train_batch_size": 8, "max_tokens_per_micro_batch": 30},
)
CLOCKS = ("runtime", "per_second", "seconds_per_sample", "_time", "total_flos")


def build(folder, kind, tokenizer, **changes):
    order = {} if kind in ONLINE else {"train_sampling_strategy": "sequential"}
    common = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.5}
    return build_trainer(folder, kind, tokenizer, **common | OPTIONS[kind] | order | changes)


def logs_of(trainer) -> list[dict[str, float]]:
    """What was logged of each step, but for times."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{name: value for name, value in entry.items() if not name.endswith(CLOCKS)} for entry in entries]


@pytest.mark.parametrize("kind", OPTIONS)
def test_names_and_the_cut_of_a_step(tmp_path, tiny_model, tokenizer, kind):
    """Eight rows a step at once, in parts, one by one, and by a budget of tokens: the same numbers under every name."""
    # against a reference of its own, since the sign of a reward of 0 is nothing but rounding
    ref = {"ref_model": tiny_model(seed=1)} if kind in ("dpo", "kto") else {}
    whole = build(tmp_path / "whole", kind, tokenizer, per_device_train_batch_size=8, **ref)
    whole.train()
    expected = logs_of(whole)
    assert EVERY | NAMES[kind] <= set().union(*expected)
    if kind in ("grpo", "rloo"):
        assert max(entry["clip_ratio/region_mean"] for entry in expected) > 0
        assert max(entry["kl"] for entry in expected) > 0
    for number, cut in enumerate(CUTS):
        trainer = build(tmp_path / str(number), kind, tokenizer, **cut, **ref)
        trainer.train()
        for one, other in zip(expected, logs_of(trainer), strict=True):
            assert set(one) == set(other)
            for name, value in one.items():
                assert other[name] == pytest.approx(value, rel=2e-4, abs=2e-5), (cut, name)


class Slow:
    """Numbers of one completion from an ordinary forward in float64."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).double().eval()

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0]

    def __call__(self, prompt: list[int], answer: list[int]) -> dict[str, np.ndarray]:
        """`[T]` of log-probability, entropy, mean logit and whether it is the most probable, for each token."""
        logits = self.logits(prompt + answer)[len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1)
        drawn = torch.tensor(answer)
        return {
            "logp": logps.gather(1, drawn[:, None])[:, 0].numpy(),
            "entropy": -(logps.exp() * logps).sum(-1).numpy(),
            "mean_logit": logits.mean(-1).numpy(),
            "top": (logits.argmax(-1) == drawn).double().numpy(),
            "length": np.full(1, len(prompt) + len(answer)),
        }

    def likely(self, prompt: list[int], length: int) -> list[int]:
        """An answer in which every other token is the most probable one, the rest is anything."""
        ids = list(prompt)
        for n in range(length):
            ids.append(int(self.logits(ids)[-1].argmax()) if n % 2 else 7 + 11 * n % 300)
        return ids[len(prompt) :]


WINDOW = {
    "max_steps": 2, "logging_steps": 2, "learning_rate": 0.0, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
}  # fmt: skip
LENGTHS = [(3, 4), (9, 2), (2, 17), (5, 6)]


def joined(seen: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
    return np.concatenate([one[name] for one in seen])


def test_sft_by_hand(tmp_path, tiny_model, tokenizer):
    """One log over two steps of two micro-batches, rows of very different lengths: means are over tokens."""
    slow = Slow(tiny_model())
    texts = [([9 + n, *range(20, 20 + before)], after) for n, (before, after) in enumerate(LENGTHS)]
    texts = [(prompt, slow.likely(prompt, after)) for prompt, after in texts]
    rows = [{"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer} for prompt, answer in texts]
    trainer = build(tmp_path, "sft", tokenizer, rows=rows, **WINDOW)
    trainer.train()
    seen = [slow(*text) for text in texts]
    # the loss is that of a step, a mean over the tokens of its rows; a log is the mean of its steps
    wanted = {
        "loss": -np.mean([joined(seen[n : n + 2], "logp").mean() for n in (0, 2)]),
        "entropy": joined(seen, "entropy").mean(),
        "mean_token_accuracy": joined(seen, "top").mean(),
        "num_tokens": joined(seen, "length").sum(),
    }
    assert 0.2 < wanted["mean_token_accuracy"] < 0.8
    (found,) = logs_of(trainer)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def test_dpo_by_hand(tmp_path, tiny_model, tokenizer):
    """Rows weigh alike in what is of rows, tokens in what is of tokens, over two steps of two micro-batches."""
    policy, ref = Slow(tiny_model()), Slow(tiny_model(seed=1))
    prompts = [[9 + n, *range(20, 20 + before)] for n, (before, _) in enumerate(LENGTHS)]
    answers = [[model.likely(p, after) for model in (policy, ref)] for p, (_, after) in zip(prompts, LENGTHS)]
    answers[3].reverse()
    answers = [[chosen, rejected[: 1 + n]] for n, (chosen, rejected) in enumerate(answers)]
    rows = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, (c, r) in zip(prompts, answers)]
    plain = {"ld_alpha": None, "loss_type": ["sigmoid"], "beta": 0.05}
    trainer = build(tmp_path, "dpo", tokenizer, rows=rows, ref_model=tiny_model(seed=1), **WINDOW, **plain)
    trainer.train()
    of, rewards = {}, {}
    for place, side in enumerate(("chosen", "rejected")):
        of[side] = [policy(prompt, pair[place]) for prompt, pair in zip(prompts, answers)]
        refs = [ref(prompt, pair[place]) for prompt, pair in zip(prompts, answers)]
        rewards[side] = np.array([0.05 * (a["logp"].sum() - b["logp"].sum()) for a, b in zip(of[side], refs)])
    gaps = rewards["chosen"] - rewards["rejected"]
    wanted = {
        "loss": np.mean([math.log1p(math.exp(-gap)) for gap in gaps]),
        "rewards/margins": gaps.mean(),
        "rewards/accuracies": (gaps > 0).mean(),
        "mean_token_accuracy": joined(of["chosen"], "top").mean(),
        "entropy": joined(of["chosen"] + of["rejected"], "entropy").mean(),
        "num_tokens": joined(of["chosen"] + of["rejected"], "length").sum(),
    }
    for side, ones in of.items():
        wanted[f"rewards/{side}"] = rewards[side].mean()
        wanted[f"logps/{side}"] = np.mean([one["logp"].sum() for one in ones])
        wanted[f"logits/{side}"] = joined(ones, "mean_logit").mean()
    assert len(trainer.train_dataset) == 4
    assert 0 < wanted["rewards/accuracies"] < 1 and 0 < wanted["mean_token_accuracy"] < 1
    (found,) = logs_of(trainer)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
