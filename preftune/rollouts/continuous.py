"""ContinuousBackend: rollouts by transformers' continuous batching (`generate_batch`), for GPUs with paged attention.

The policy is not cast and is given back as found; there are no log-probs, so that the trainer computes the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import ContinuousBatchingConfig

from preftune.errors import ConfigError, RolloutError
from preftune.models import structure
from preftune.models.adapters import is_prompt_learning, peft_model
from preftune.rollouts.base import RolloutBackend, Stream, call_seed, check_request, finish_reasons
from preftune.rollouts.policy import budget_of, check_ids, generating
from preftune.rollouts.sampling import generation_config
from preftune.types import Rollouts, Sampling

_DEFAULTS = {"max_memory_percent": 0.5}  # training needs the rest


class ContinuousBackend(RolloutBackend):
    """Requests join and leave the batch at every step, in a paged cache that transformers sizes by free memory.

    On CPU it is far slower than `LocalBackend`. Its samples are seeded by the round as a whole: unlike the local
    backend's they depend on what else is asked for.

    Args:
        model: The policy; may be wrapped by DDP or PEFT.
        options: Fields of transformers' `ContinuousBatchingConfig`, as a mapping or an object of it.

    Raises:
        ConfigError: an unknown option, or a policy that continuous batching cannot run.
    """

    def __init__(
        self, model: nn.Module, *, options: Mapping[str, Any] | ContinuousBatchingConfig | None = None
    ) -> None:
        self.model = model
        given = dict(options or {}) if not isinstance(options, ContinuousBatchingConfig) else _set_fields(options)
        try:
            self._options = {**_DEFAULTS, **given}
            ContinuousBatchingConfig(**self._options)
        except TypeError as error:
            raise ConfigError(f"continuous batching options {sorted(given)}: {error}") from error
        peft = peft_model(model)
        if peft is not None and is_prompt_learning(peft):
            raise ConfigError(
                "continuous batching has no place for virtual tokens (prompt learning); use backend 'local'"
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        *,
        stream: Sequence[Stream],
    ) -> Rollouts:
        check_request(prompts, num_generations, sampling, stream)
        config = generation_config(sampling)
        config.num_return_sequences = num_generations
        policy = structure.unwrap(self.model)
        check_ids(policy, prompts)
        limit = structure.learned_position_limit(policy)
        if any(budget_of(len(prompt), sampling.max_new_tokens, limit) < sampling.max_new_tokens for prompt in prompts):
            raise RolloutError(
                f"a prompt with {sampling.max_new_tokens} new tokens goes beyond the model's {limit} positions; lower "
                "max_completion_length, shorten the prompts, or use backend 'local', which cuts the budget"
            )
        seed = call_seed(sampling.seed, stream)
        options = {"seed": seed, **self._options, "drop_unsupported_processors": False}
        with generating(policy, seed=seed):
            completions = self._completions(policy, prompts, config, ContinuousBatchingConfig(**options))
        wanted = len(prompts) * num_generations
        if len(completions) != wanted:
            raise RolloutError(
                f"continuous batching gave {len(completions)} of {wanted} completions; its log names the reason (often "
                "a cache that does not fit: lower max_memory_percent, or set num_blocks)"
            )
        return Rollouts(prompts, completions, finish_reasons(completions, sampling))

    def _completions(
        self, policy: nn.Module, prompts: Sequence[Sequence[int]], config: Any, batching: ContinuousBatchingConfig
    ) -> list[list[int]]:
        peft = peft_model(policy)
        model: Any = policy if peft is None else peft.get_base_model()
        attention = [(c, c._attn_implementation_internal) for c in structure.attention_configs(model)]
        try:
            outputs = model.generate_batch(
                [list(prompt) for prompt in prompts],
                generation_config=config,
                continuous_batching_config=batching,
                progress_bar=False,
            )
        except (ValueError, RuntimeError, ImportError, AttributeError, NotImplementedError) as error:
            raise RolloutError(
                f"{type(model).__name__} does not run under transformers' continuous batching ({error}); use backend "
                "'local'"
            ) from error
        finally:
            for owner, name in attention:
                owner._attn_implementation_internal = name
        failed = [output.error for output in outputs.values() if output.error is not None]
        if failed:
            raise RolloutError(f"{len(failed)} requests of continuous batching failed, the first with: {failed[0]}")
        return [list(output.generated_tokens) for output in outputs.values()]


def _set_fields(options: ContinuousBatchingConfig) -> dict[str, Any]:
    """Without those that are None: they were left open, and must not take the place of our own choice."""
    return {name: value for name, value in vars(options).items() if value is not None}
