"""A new loss on pairs with its own config: SimPO (arXiv:2405.14734), which needs no reference model.

Run it: python examples/extend_pair_loss.py MODEL PAIRS.json   (rows with prompt, chosen, rejected)
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from datasets import Dataset, load_dataset

from preftune import DPOConfig, DPOTrainer
from preftune.types import LossOutput, PairScores


@dataclass(repr=False)
class SimPOConfig(DPOConfig):
    """beta scales the mean log-probability of a token; gamma is the margin that chosen must keep."""

    beta: float = field(default=2.0, metadata={"help": "Scale of the length-normalised reward."})
    gamma: float = field(default=0.5, metadata={"help": "Target margin between chosen and rejected, in reward."})


class SimPOTrainer(DPOTrainer):
    """Loss: -log sigmoid(beta/|c| log p(c) - beta/|r| log p(r) - gamma)."""

    args: SimPOConfig
    config_class = SimPOConfig
    name = "SimPO"
    needs_reference = False  # the loss compares with nothing; no second model is held

    def loss(self, policy: PairScores, ref: PairScores | None) -> LossOutput:
        chosen = policy.chosen_logps / policy.chosen_lengths
        rejected = policy.rejected_logps / policy.rejected_lengths
        margin = self.args.beta * (chosen - rejected) - self.args.gamma
        return LossOutput(-F.logsigmoid(margin), {"simpo/margin": margin})


def train(model: str, pairs: Dataset, output_dir: str, **options: Any) -> SimPOTrainer:
    trainer = SimPOTrainer(model=model, args=SimPOConfig(output_dir, **options), train_dataset=pairs)
    trainer.train()
    return trainer


if __name__ == "__main__":
    train(sys.argv[1], load_dataset("json", data_files=sys.argv[2], split="train"), "simpo-output")
