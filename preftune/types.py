"""The records that travel between data, models, losses and trainers.

Axes, as suffixes of tensor names: B branches (sequences), P prompts, G samples of a prompt, N flat tokens of a tree,
T scored tokens, V vocabulary. Log-probabilities are natural logarithms in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TreeImages:
    """What a vision-language model is given of the images of a tree, besides token ids.

    Attributes:
        prompts: For each prompt the arguments of the model's forward that its images make (`pixel_values`,
            `image_grid_thw`, ...), empty where it has none. Rows of a batch are put one after another along their first
            axis; further axes of unlike size are filled up with zeros.
        tokens: `[N]` integers for each flat token (`token_type_ids`, `mm_token_type_ids`), by the argument's name.
    """

    prompts: tuple[Mapping[str, Tensor], ...]
    tokens: Mapping[str, Tensor]

    def select(self, prompts: Sequence[int], flat: Tensor) -> TreeImages:
        """Those of some prompts, with the flat tokens `flat` (numbers or a mask)."""
        return TreeImages(
            tuple(self.prompts[p] for p in prompts), {name: values[flat] for name, values in self.tokens.items()}
        )

    def to(self, device: Any, non_blocking: bool = False) -> TreeImages:
        def move(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in tensors.items()}

        return TreeImages(tuple(map(move, self.prompts)), move(self.tokens))


@dataclass(frozen=True)
class PromptTree:
    """The token ids of a micro-batch: every prompt once, its branches right after it, no padding.

    Flat order: prompt 0, its branches in order, prompt 1, its branches, ... A branch is a completion; scored tokens
    are those of branches whose mask is 1. The first token of a branch is predicted by the last token of its prompt;
    with an empty prompt nothing predicts it and it is never scored.

    Attributes:
        layout: One `(prompt_length, (branch_length, ...))` per prompt. Plain integers, so that laying out attention
            costs no device synchronisation. `sum` over all lengths is N.
        input_ids: `[N]` token ids.
        position_ids: `[N]` logical positions: 0.. in the prompt; each branch goes on at `prompt_length`.
        predict_index: `[T]` flat index of the token whose hidden state predicts scored token t.
        target_index: `[T]` flat index of scored token t itself; `input_ids[target_index]` are the targets.
        branch_index: `[T]` number (0..B-1) of the branch of scored token t; non-decreasing.
        images: Of its prompts, or None where none has any. They belong to all branches of a prompt.
    """

    layout: tuple[tuple[int, tuple[int, ...]], ...]
    input_ids: Tensor
    position_ids: Tensor
    predict_index: Tensor
    target_index: Tensor
    branch_index: Tensor
    images: TreeImages | None = None

    @property
    def num_prompts(self) -> int:
        return len(self.layout)

    @property
    def num_branches(self) -> int:
        return sum(len(branches) for _, branches in self.layout)

    @property
    def num_tokens(self) -> int:
        """N, tokens really forwarded: the shared prompt counts once."""
        return self.input_ids.shape[0]

    @property
    def target_ids(self) -> Tensor:
        """`[T]` ids of the scored tokens."""
        return self.input_ids[self.target_index]

    def to(self, device: Any, non_blocking: bool = False) -> PromptTree:
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=non_blocking)
            for f in fields(self)
            if f.name != "layout" and getattr(self, f.name) is not None
        }
        return PromptTree(layout=self.layout, **moved)


@dataclass(frozen=True)
class TokenScores:
    """What the model says of every scored token of a tree, in the order of `PromptTree.target_index`.

    Attributes:
        logps: `[T]` log-probability of the token, float32, with gradient where the caller asked for one.
        branch_index: `[T]` the branch of each token.
        num_branches: B.
        entropy: `[T]` Shannon entropy of the predicting distribution in nats, or None if not asked for.
        mean_logits: `[T]` mean over the vocabulary of the logits, or None.
        is_top1: `[T]` 1.0 where the token is the (first) argmax, else 0.0, or None.
        log_sum_sq_probs: `[T]` log of the sum over the vocabulary of squared probabilities, or None.
        aux_loss: Scalar load-balancing loss of a mixture-of-experts model, or None.
    """

    logps: Tensor
    branch_index: Tensor
    num_branches: int
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    aux_loss: Tensor | None = None

    def branch_sum(self, values_T: Tensor) -> Tensor:
        """`[B]` sums of a per-token quantity over the scored tokens of each branch (0 where there are none)."""
        return values_T.new_zeros(self.num_branches).index_add(0, self.branch_index, values_T)

    @property
    def branch_logps(self) -> Tensor:
        """`[B]` log-probability of each branch given its prompt: the sum over its scored tokens."""
        return self.branch_sum(self.logps)

    @property
    def branch_lengths(self) -> Tensor:
        """`[B]` number of scored tokens, as float32."""
        import torch

        return self.branch_sum(torch.ones_like(self.logps, dtype=torch.float32, requires_grad=False))


@dataclass(frozen=True)
class PairScores:
    """Sequence scores of preference pairs under one model; all tensors `[B]`, one entry a pair.

    Attributes:
        chosen_logps: Summed log-probability of the chosen completion (tail weighted by `ld_alpha` where set).
        rejected_logps: The same for the rejected one.
        chosen_lengths: Scored tokens of the chosen completion, at least 1.
        rejected_lengths: Scored tokens of the rejected completion, at least 1.
        chosen_nll: Minus the plain sum of the chosen token log-probabilities (no `ld_alpha`).
        mean_chosen_length: Scalar: scored chosen tokens per pair over the whole optimizer step (all micro-batches and
            ranks), so that `chosen_nll / mean_chosen_length`, averaged over pairs, is the token mean.
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    chosen_nll: Tensor
    mean_chosen_length: Tensor


@dataclass(frozen=True)
class LossOutput:
    """A loss and what to log of it.

    Attributes:
        loss: `[B]` losses per row (pair, sequence or token, as the family says), not reduced: the trainer divides the
            sum by the true number of rows of the optimizer step over all micro-batches and ranks.
        metrics: Values per row, `[B]`, logged as means over all rows.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; one object for every rollout backend.

    Attributes:
        max_new_tokens: Budget of each completion, at least 1.
        temperature: Above 0; logits are divided by it. 0 is greedy.
        top_p, top_k, min_p, repetition_penalty: As in transformers' `GenerationConfig`; the defaults change nothing.
        eos_token_ids: Every id that ends a completion. The id drawn is kept as its last token.
        seed: With the round and the sample's place in it, the key of the sample's own random stream.
        extra: Other options of the backend (`generation_kwargs`), applied last.
        budgets: The budget of each prompt of a call where they differ; `max_new_tokens` is then the largest. A backend
            may ignore it and draw too much.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    budgets: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from softmax(logits / temperature) itself, so that its log-probs can be used."""
        plain = (self.top_p, self.top_k, self.min_p, self.repetition_penalty) == (1.0, 0, None, 1.0)
        return plain and not self.extra and self.temperature > 0


@dataclass(frozen=True)
class Rollouts:
    """G completions of each of P prompts: sample g of prompt p stands at index p * G + g of every list.

    Attributes:
        prompt_ids: P lists of token ids, each prompt once; one for each completion where they may differ (G is then 1).
        completion_ids: P * G lists of token ids, cut after the first end-of-sequence token, which is kept.
        finish_reasons: P * G; "stop" where a completion ended by itself, "length" where its budget was spent.
        logps: P * G lists, the sampler's log-probability of each completion token under softmax(logits / temperature),
            or None where the backend gives none. NaN at tokens that no sampler drew (tool results).
        masks: P * G lists of 0 and 1: 1 at tokens that the policy drew; None where that is all of them.
        columns: Values per completion to pass on to reward functions, by name.
        metrics: Values to log of this round.
    """

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[Sequence[int]]
    finish_reasons: Sequence[FinishReason]
    logps: Sequence[Sequence[float]] | None = None
    masks: Sequence[Sequence[int]] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_generations(self) -> int:
        """G."""
        return len(self.completion_ids) // len(self.prompt_ids)


@dataclass(frozen=True)
class PolicyTokens:
    """What an online loss sees: completions as rows `[B, T]`, scored tokens only, padded at the end.

    Attributes:
        logps: Log-probabilities under the policy at the sampling temperature, with gradient.
        old_logps: The same under the policy that drew the tokens, no gradient; None where no update lies between, so
            that the ratio of the two is exactly 1.
        advantages: `[B]` advantage of each completion, no gradient.
        mask: 1 where there is a token, else 0; every other field is 0 there.
        ref_logps: Under the reference, or None without one.
        sampler_logps: As the sampler itself gave them, or None; they differ from `old_logps` in precision alone.
        entropy: Entropy in nats of the distribution each token was drawn from, no gradient.
        divergence: How far the policy is from a teacher at each token, with gradient, 0 where there is no teacher; None
            where nothing is learned from one.
    """

    logps: Tensor
    old_logps: Tensor | None
    advantages: Tensor
    mask: Tensor
    ref_logps: Tensor | None = None
    sampler_logps: Tensor | None = None
    entropy: Tensor | None = None
    divergence: Tensor | None = None
