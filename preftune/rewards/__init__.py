"""Reward functions and the runner that calls them.

A reward is a function of prompts and completions that returns one number or None per completion.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preftune.rewards.accuracy import accuracy_reward, reasoning_accuracy_reward
    from preftune.rewards.base import RewardFunc, RewardRunner, RewardTable
    from preftune.rewards.format import think_format_reward
    from preftune.rewards.length import get_cosine_scaled_reward, get_soft_overlong_punishment
    from preftune.rewards.matching import exact_match_reward, numeric_match_reward
    from preftune.rewards.model import RewardModel
    from preftune.rewards.registry import resolve_reward
    from preftune.rewards.repetition import get_repetition_penalty_reward

# Where each name is defined: importing one reward loads neither torch nor the others.
_MODULE_OF = {
    "RewardFunc": "base",
    "RewardModel": "model",
    "RewardRunner": "base",
    "RewardTable": "base",
    "accuracy_reward": "accuracy",
    "exact_match_reward": "matching",
    "get_cosine_scaled_reward": "length",
    "get_repetition_penalty_reward": "repetition",
    "get_soft_overlong_punishment": "length",
    "numeric_match_reward": "matching",
    "reasoning_accuracy_reward": "accuracy",
    "resolve_reward": "registry",
    "think_format_reward": "format",
}

__all__ = [
    "RewardFunc",
    "RewardModel",
    "RewardRunner",
    "RewardTable",
    "accuracy_reward",
    "exact_match_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "numeric_match_reward",
    "reasoning_accuracy_reward",
    "resolve_reward",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'preftune.rewards' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"preftune.rewards.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
