"""The rollout backend and the sampling options that a config asks for.

One place knows every backend by name; a trainer that is given a backend object does not come here.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import nn

from preftune.configs.rollout import RolloutConfig
from preftune.errors import ConfigError
from preftune.models.distributed import will_be_sharded
from preftune.rollouts.base import RolloutBackend
from preftune.rollouts.continuous import ContinuousBackend
from preftune.rollouts.http import server_url
from preftune.rollouts.local import LocalBackend
from preftune.rollouts.sampling import generation_config
from preftune.rollouts.server import ServerBackend
from preftune.rollouts.transfer import NcclTransfer, ReloadTransfer
from preftune.rollouts.weights import ON_A_SERVER, check_mergeable
from preftune.types import Sampling

_SHARE = 0.9  # of the time that other ranks wait, so that an error of the server's is seen before theirs


def sampling_of(args: RolloutConfig, eos_token_ids: Collection[int]) -> Sampling:
    """How the completions of a run are drawn; every id of `eos_token_ids` ends one."""
    extra = dict(cast(dict[str, Any], args.generation_kwargs or {}))
    if args.vllm_structured_outputs_regex is not None:
        extra["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    return Sampling(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        seed=args.seed,
        extra=extra,
    )


def make_backend(args: RolloutConfig, model: nn.Module, tokenizer: Any, accelerator: Any = None) -> RolloutBackend:
    """The backend that `args` ask for, for this policy.

    Args:
        accelerator: Says whether training will shard the policy; None: it will not.

    Raises:
        ConfigError: options that the backend cannot follow, or a policy that it could not draw from.
    """
    if args.resolved_rollout_backend == "server":
        return _server(args, model)
    generation_config(sampling_of(args, ()))  # names a wrong option now, not in the first round
    if accelerator is not None and will_be_sharded(accelerator):
        _check_gathers(args, model, accelerator)
    if args.resolved_rollout_backend == "continuous":
        return ContinuousBackend(model, options=cast(Any, args.transformers_continuous_batching_config))
    return LocalBackend(model, pad_token_id=tokenizer.pad_token_id, precision=args.rollout_precision)  # pyright: ignore


def _check_gathers(args: RolloutConfig, model: nn.Module, accelerator: Any) -> None:
    """A whole copy of the weights can be gathered for rollouts, and may be."""
    instead = "Generate with a vLLM server (rollout_backend='server'), or train with DDP or ZeRO-2"
    if accelerator.distributed_type.value == "FSDP" and not accelerator.is_fsdp2:
        raise ConfigError(f"rollouts in process need FSDP version 2. Set fsdp_version: 2 in its config. {instead}.")
    if args.resolved_rollout_backend == "continuous":
        raise ConfigError(
            "continuous batching draws from the policy's own weights, and FSDP and ZeRO-3 shard them. Use "
            f"rollout_backend='local', which gathers a whole copy for the time of the rollouts. {instead}."
        )
    if not args.ds3_gather_for_generation:
        raise ConfigError(
            "ds3_gather_for_generation=False lets no whole copy of the weights be gathered, and FSDP and ZeRO-3 shard "
            f"them: every token would gather all of them anew. Set it to True. {instead}."
        )
    check_mergeable(model, "train with weights that are whole (DDP, ZeRO-2)")


def _server(args: RolloutConfig, model: nn.Module) -> ServerBackend:
    check_mergeable(model, ON_A_SERVER)  # before anything waits for the server
    folder = args.vllm_weights_dir
    if folder is None and not torch.cuda.is_available():
        folder = os.path.join(args.output_dir or ".", "vllm_weights")
    return ServerBackend(
        server_url(args.vllm_server_base_url, args.vllm_server_host, args.vllm_server_port),
        transfer=NcclTransfer() if folder is None else ReloadTransfer(folder),
        connect_timeout=args.vllm_server_timeout,
        generation_timeout=_SHARE * args.ddp_timeout,
    )
