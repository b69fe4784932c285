"""The rollout backend and the sampling options that a config asks for.

One place knows every backend by name; a trainer that is given a backend object does not come here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from preftune.configs.rollout import RolloutConfig
from preftune.rollouts.base import RolloutBackend
from preftune.rollouts.continuous import ContinuousBackend
from preftune.rollouts.local import LocalBackend
from preftune.types import Sampling


def sampling_of(args: RolloutConfig, eos_token_ids: Collection[int]) -> Sampling:
    """How the completions of a run are drawn; every id of `eos_token_ids` ends one."""
    return Sampling(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        seed=args.seed,
        extra=dict(args.generation_kwargs or {}),  # pyright: ignore[reportArgumentType, reportCallIssue]
    )


def make_backend(args: RolloutConfig, model: nn.Module, tokenizer: Any) -> RolloutBackend:
    """The backend that `args` ask for, for this policy."""
    if args.resolved_rollout_backend == "continuous":
        return ContinuousBackend(model, options=args.transformers_continuous_batching_config)
    return LocalBackend(model, pad_token_id=tokenizer.pad_token_id, precision=args.rollout_precision)  # pyright: ignore
