"""A new online algorithm with its own config: GMPO (arXiv:2507.20673), the geometric mean of a completion's ratios.

Run it: python examples/extend_online.py MODEL GSM8K.jsonl   (rows with question and answer)
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset, load_dataset
from torch import Tensor

from preftune import GRPOConfig, GRPOTrainer
from preftune.losses.importance import log_ratio, masked_mean
from preftune.types import LossOutput, PolicyTokens


@dataclass(repr=False)
class GMPOConfig(GRPOConfig):
    """epsilon bounds the logarithm of a token's ratio: e^-0.4 to e^0.4."""

    epsilon: float = field(default=0.4, metadata={"help": "How far the log-ratio of a token may move from 0."})


class GMPOTrainer(GRPOTrainer):
    """Loss of a completion: -A exp(mean over its tokens of the log-ratio, clipped where that would gain)."""

    args: GMPOConfig
    config_class = GMPOConfig
    name = "GMPO"

    def loss(self, tokens: PolicyTokens) -> LossOutput:
        log_r_BT = log_ratio(tokens.logps, tokens.old_logps, tokens.mask)
        sign_B1 = tokens.advantages.sign()[:, None]
        bounded_BT = log_r_BT.clamp(-self.args.epsilon, self.args.epsilon)
        kept_BT = sign_B1 * torch.minimum(sign_B1 * log_r_BT, sign_B1 * bounded_BT)
        ratio_B = masked_mean(kept_BT, tokens.mask)[:, 0].exp()
        is_clipped_BT = (kept_BT != log_r_BT).float()
        return LossOutput(-ratio_B * tokens.advantages, {"gmpo/clip_ratio": is_clipped_BT})

    def reduce(self, loss: Tensor, mask_BT: Tensor, totals: Any) -> Tensor:
        return loss.sum() / totals.counts["rows"].float()  # the mean over completions


def train(model: str, rows: Dataset, rewards: Any, output_dir: str, **options: Any) -> GMPOTrainer:
    trainer = GMPOTrainer(model=model, reward_funcs=rewards, args=GMPOConfig(output_dir, **options), train_dataset=rows)
    trainer.train()
    return trainer


if __name__ == "__main__":
    questions = load_dataset("json", data_files=sys.argv[2], split="train").rename_column("question", "prompt")
    train(sys.argv[1], questions, "numeric_match_reward", "gmpo-output", num_iterations=2)
