"""PolicyAnswers: what the policy answers to the prompts of the eval set, with its log-probability and the reference's.

Every rank answers its share of the prompts; what is answered depends on the policy alone, not on the number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import GenerationConfig, Trainer

from preftune.callbacks.generation import (
    Generate,
    as_sampling,
    check_generates,
    complete_with_images,
    effective_config,
    generate_completions,
    pad_id,
    tokenizer_of,
)
from preftune.callbacks.handler import RefModelCallbackHandler
from preftune.callbacks.prompts import Prompt, check_has_prompts, read_prompts
from preftune.data.image_texts import ImageEncoder
from preftune.data.multimodal import is_multimodal, with_images
from preftune.data.tree import build_tree
from preftune.models.distributed import is_sharded
from preftune.models.isolation import isolated
from preftune.models.logprobs import token_scores
from preftune.models.reference_base import LiveReference
from preftune.rollouts.base import call_seed
from preftune.rollouts.local import LocalBackend

logger = logging.getLogger(__name__)

_STREAM = 0xA25E  # first part of the keys of these random streams; those of training have four parts


@dataclass(frozen=True)
class Answer:
    """A prompt and what came of it.

    Attributes:
        ids: The completion; None where generation failed.
        text: The same without special tokens.
        logp, ref_logp: Log-probability of the completion (its end token included) under policy and reference, in nats;
            None where there is no reference with a forward of its own, or generation failed.
        implicit_reward: beta (logp - ref_logp); None without a beta.
    """

    prompt: Prompt
    ids: list[int] | None
    text: str | None
    logp: float | None = None
    ref_logp: float | None = None
    implicit_reward: float | None = None


class PolicyAnswers:
    """Generates isolated from training and scores what came; used by the callbacks that show completions.

    Args:
        trainer: Gives policy, reference, tokenizer and eval set.
        generation_config: See `effective_config`.
        num_prompts: The first so many prompts of each set; None takes all.
        dataset: Rows, or a dict of named row sets, in place of the eval set.
        generate: In place of the rollout backend; all ranks call it, perhaps with no prompt.
        options: Fields of a generation config that win.

    Raises:
        ValueError: no eval set, no prompts in it, no tokenizer, a model that cannot generate, an unknown option.
    """

    def __init__(
        self,
        trainer: Trainer,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        *,
        dataset: Any = None,
        generate: Generate | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        if num_prompts is not None and num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}; wanted 1 or more, or None for all")
        self.trainer = trainer
        check_generates(self._policy())
        self.tokenizer = tokenizer_of(trainer.processing_class)
        self._dataset = trainer.eval_dataset if dataset is None else dataset
        if self._dataset is None:
            raise ValueError("the trainer has no eval_dataset to take prompts from; give it one, or give dataset= here")
        with isolated():  # looking at a streamed set may draw random numbers
            check_has_prompts(self._dataset)
        self._num_prompts = num_prompts
        self._config = generation_config
        self._options = dict(options or {})
        self._generate = generate
        self._prompts: list[Prompt] | None = None
        self._failed = False
        self.effective_generation_config()

    def effective_generation_config(self) -> GenerationConfig:
        """What is generated with: the config given, else the model's, then the keyword arguments."""
        return effective_config(self._policy(), self.tokenizer, self._config, self._options)

    @property
    def prompts(self) -> list[Prompt]:
        if self._prompts is None:
            with isolated(tokenizer=self.tokenizer):
                self._prompts = read_prompts(self._dataset, self.tokenizer, self._num_prompts, self._images())
        return self._prompts

    def mine(self, dataset: str | None = None) -> list[Answer]:
        """This rank's answers now; every rank must call it. A failure is one warning, and the answers are None.

        Args:
            dataset: Of several sets, the one to answer the prompts of; None: all.
        """
        try:
            prompts = [prompt for prompt in self.prompts if dataset is None or prompt.dataset == dataset]
        except Exception as error:  # noqa: BLE001  (as below)
            self._warn_once(error)
            return []
        share = -(-len(prompts) // self.trainer.args.world_size)
        own = range(len(prompts))[self.trainer.args.process_index * share :][:share]
        # a sharded model computes on all ranks together, so each of them does everything
        asked = range(len(prompts)) if is_sharded(self._wrapped.parameters()) else own
        try:
            answers = dict(zip(asked, self._answer(prompts, asked)))
        except Exception as error:  # noqa: BLE001  (whatever it is, training goes on)
            self._warn_once(error)
            answers = {i: Answer(prompts[i], None, None) for i in own}
        return [answers[i] for i in own]

    def gathered(self, mine: list[Any]) -> list[Any]:
        """What each rank made of its answers, in the order of the prompts, on every rank (a collective)."""
        return gather_object(mine)

    def _answer(self, prompts: Sequence[Prompt], asked: Sequence[int]) -> list[Answer]:
        if not asked and self._generate is None:
            return []
        policy = self._policy()
        with isolated(policy, self.tokenizer, seed=self.trainer.args.seed), torch.no_grad():
            completions = self._complete(policy, [prompts[i] for i in asked], asked)
        if len(completions) != len(asked):
            raise ValueError(f"generate gave {len(completions)} completions for {len(asked)} prompts")
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
        found = [Answer(prompts[i], ids, str(text)) for i, ids, text in zip(asked, completions, texts)]
        reference = self._reference()
        if reference is None:
            return found
        beta = vars(self.trainer.args).get("beta")
        scored = []
        size = self.trainer.args.per_device_eval_batch_size
        for start in range(0, len(found), size):
            batch = found[start : start + size]
            for answer, (logp, ref_logp) in zip(batch, self._logps(policy, batch, reference)):
                reward = None if beta is None else beta * (logp - ref_logp)
                scored.append(Answer(answer.prompt, answer.ids, answer.text, logp, ref_logp, reward))
        return scored

    def _complete(self, policy: Any, asked: Sequence[Prompt], numbers: Sequence[int]) -> list[list[int]]:
        config = self.effective_generation_config()
        prompts = [prompt.ids for prompt in asked]
        if self._generate is not None:
            return self._generate(policy, self.tokenizer, prompts, config)
        if any(prompt.images for prompt in asked):
            return [self._look(policy, prompt, number, config) for prompt, number in zip(asked, numbers)]
        sampling = as_sampling(config, self.trainer.args.seed)
        if sampling is None or is_sharded(policy.parameters()):
            size = self.trainer.args.per_device_eval_batch_size
            return generate_completions(policy, self.tokenizer, prompts, config, batch_size=size)
        backend = LocalBackend(policy, pad_token_id=pad_id(self.tokenizer))
        rollouts = backend.generate(prompts, 1, sampling, stream=[(_STREAM, number) for number in numbers])
        return [list(ids) for ids in rollouts.completion_ids]

    def _look(self, policy: Any, prompt: Prompt, number: int, config: GenerationConfig) -> list[int]:
        """A completion of a prompt with images: backends draw from ids alone."""
        torch.manual_seed(call_seed(self.trainer.args.seed, [(_STREAM, number)]))
        return complete_with_images(policy, self.trainer.processing_class, prompt.ids, prompt.images, config)

    def _logps(self, policy: Any, batch: Sequence[Answer], reference: LiveReference) -> list[list[float]]:
        """`[log p_policy, log p_ref]` of each answer."""
        if not any(answer.ids for answer in batch):
            return [[0.0, 0.0] for _ in batch]
        tree = build_tree([answer.prompt.ids for answer in batch], [[answer.ids or []] for answer in batch])
        shown = [{"images": list(answer.prompt.images)} for answer in batch]
        tree = with_images(tree, shown, self.trainer.processing_class).to(self.trainer.args.device)
        with isolated(policy), torch.no_grad(), self.trainer.accelerator.autocast():
            scores = token_scores(self._wrapped, tree, layout="padded")
            known = reference.token_scores(self._wrapped, tree, layout="padded")
        return torch.stack([scores.branch_logps, known.branch_logps], dim=1).tolist()

    def _images(self) -> ImageEncoder | None:
        """What reads the images of rows, where the model sees them."""
        processor = self.trainer.processing_class
        return ImageEncoder(processor) if is_multimodal(processor) else None

    def _reference(self) -> LiveReference | None:
        handler = self.trainer.callback_handler
        reference = handler.reference if isinstance(handler, RefModelCallbackHandler) else None
        return reference if isinstance(reference, LiveReference) and not reference.is_policy else None

    @property
    def _wrapped(self) -> Any:
        """The policy as the trainer has it now: sharding replaces it."""
        return self.trainer.model

    def _policy(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self._wrapped)

    def _warn_once(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger.warning(
                "completions could not be generated: %s: %s. Training goes on without them; further failures are not "
                "reported.",
                type(error).__name__,
                error,
            )
