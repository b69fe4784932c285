"""A tree, a LoRA policy and a few steps of training, for the tests of the reference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from preftune.data.tree import build_tree
from preftune.models.logprobs import token_scores
from tests.support.models import tiny_model

TREE = build_tree(
    [[5, 6, 7, 8], [9, 10]],
    [[[11, 12, 13], [14, 15]], [[16, 17], [18, 19, 20, 21]]],
)
OTHER_TREE = build_tree([[30, 31, 32]], [[[33, 34], [35, 36, 37]]])


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    )


def lora_policy(config: LoraConfig | None = None, *, nonzero: bool = False, **model_options: Any):
    """A model with a LoRA adapter; `nonzero` gives its B matrices values, as training would."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(tiny_model(**model_options), config or lora())
        if nonzero:
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.data.normal_(std=0.1)
    return model


def train(policy: torch.nn.Module, steps: int = 5, lr: float = 1e-1) -> None:
    """Some steps away from where the policy was, with dropout on."""
    policy.train()
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        token_scores(policy, TREE, layout="padded").logps.mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def logps(policy: torch.nn.Module, tree=TREE) -> torch.Tensor:
    """Summed branch log-probabilities of a copy of the policy, in eval mode."""
    return token_scores(copy.deepcopy(policy).eval(), tree, layout="padded").branch_logps


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(before: dict[str, torch.Tensor], model: torch.nn.Module) -> set[str]:
    """Names of parameters whose bits differ from `before`."""
    return {name for name, p in model.named_parameters() if name in before and not torch.equal(before[name], p)}


def position(model: torch.nn.Module) -> tuple[list, list, list]:
    """Everything that a reference pass must put back: modes, flags, and where adapters point."""
    layers = [m for m in model.modules() if "_active_adapter" in vars(m)]
    return (
        [(name, m.training) for name, m in model.named_modules()],
        [(name, p.requires_grad) for name, p in model.named_parameters()],
        [(vars(m)["_active_adapter"], vars(m).get("_disable_adapters", False)) for m in layers],
    )
