"""What tools and environments add to a trainer: rewards of their own, prompts where the environment has them all.

Everything here happens at construction; rounds go through `preftune.rollouts.tools`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset

from preftune.configs.grpo import GRPOConfig
from preftune.errors import ConfigError, DataFormatError
from preftune.models.structure import learned_position_limit, unwrap
from preftune.rollouts.toolbox import Toolbox
from preftune.rollouts.tools import ToolRollouts


def toolbox_of(
    args: GRPOConfig, tools: Sequence[Callable[..., Any]] | None, environment_factory: Any, rollout_func: Any
) -> Toolbox | None:
    """The tools of a run, None where it has none.

    Raises:
        ConfigError: tools beside a function that makes the rollouts, or as `Toolbox`.
    """
    if not tools and environment_factory is None:
        return None
    if rollout_func is not None:
        raise ConfigError(
            f"rollout_func makes the whole rollout, so {'tools' if tools else 'environment_factory'} would not be "
            "used. Call them in rollout_func, or leave rollout_func out."
        )
    return Toolbox(tools, environment_factory, timeout=args.tool_timeout)


def with_own_rewards(toolbox: Toolbox, reward_funcs: Any, args: GRPOConfig) -> tuple[list[Any], GRPOConfig]:
    """The reward functions and those of environments, which come last with weight 1 where weights are given."""
    given = [] if reward_funcs is None else reward_funcs
    functions = list(given) if isinstance(given, list | tuple) else [given]
    own = toolbox.rewards
    if own and args.reward_weights is not None and len(args.reward_weights) == len(functions):
        args = replace(args, reward_weights=[*args.reward_weights, *[1.0] * len(own)])
    return [*functions, *own], args


def prompts_or_empty(toolbox: Toolbox, train_dataset: Any, args: GRPOConfig) -> Any:
    """The dataset, or without one as many empty prompts as a round takes: then `reset` says what there is to do.

    Raises:
        DataFormatError: none is given and rows are needed, or nothing says how long to train.
    """
    if train_dataset is not None or toolbox.environments is None:
        return train_dataset
    if toolbox.environments.is_named or args.max_steps <= 0:
        raise DataFormatError(
            "train_dataset is missing. Without one a single environment_factory is to say by its reset what to do, and "
            "max_steps how long to train; with a dict of environments rows name theirs in 'environment'."
        )
    return Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}] * args.round_prompts)


def tool_rollouts(trainer: Any, toolbox: Toolbox) -> ToolRollouts:
    """What draws completions with tools, through the backend of an online trainer."""
    return ToolRollouts(
        trainer.backend,
        trainer.tokenizer,
        toolbox,
        options=trainer.args.chat_template_kwargs,
        max_iterations=trainer.args.max_tool_calling_iterations,
        max_tokens=learned_position_limit(unwrap(trainer.model)),
    )
