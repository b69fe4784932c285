"""The narrow waist: `token_scores` and `branch_values`, from a prompt tree to what the model says of it.

The model (wrapped or not) is called once, and its head answers with scores instead of logits: full logits never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from preftune.errors import ConfigError
from preftune.models import structure
from preftune.models.attention import Layout, is_active, scoring
from preftune.models.distributed import callable_alone
from preftune.models.float32_head import float32_logits, require_linear
from preftune.models.head import OUTPUTS, HeadOptions, LogitTransform, generic_scores, linear_scores
from preftune.models.inputs import ModelInputs, pooling_inputs, scoring_inputs
from preftune.models.probe import LayoutChoice, choose_layout, head_plan
from preftune.models.redirect import Redirect, redirected, restored
from preftune.types import PromptTree, TokenScores

__all__ = [
    "Layout",
    "LayoutChoice",
    "branch_values",
    "choose_layout",
    "head_answers",
    "logit_transform",
    "scoring",
    "token_scores",
]


def token_scores(
    model: nn.Module,
    tree: PromptTree,
    *,
    layout: Layout,
    temperature: float = 1.0,
    outputs: Collection[str] = frozenset(),
    entropy_has_grad: bool = False,
    float32_head: bool = False,
) -> TokenScores:
    """Log-probability of every scored token of `tree`, and the `outputs` asked for.

    Gradients flow into `logps` (and `aux_loss`) where grad mode is on; other outputs have none unless asked for. All
    refer to the distribution at `temperature`. With gradient checkpointing hold `scoring(model, layout)` until backward
    has ended.

    Args:
        outputs: Subset of {"entropy", "mean_logits", "is_top1", "log_sum_sq_probs"}.
        entropy_has_grad: Gradients flow into the entropy too; the head is then run again in the backward.
        float32_head: The head's product is float32, whatever the type of its weight and autocast.

    Raises:
        ConfigError: an unknown output, a temperature that is not positive, or a head that `float32_head` cannot have.
        RuntimeError: gradient checkpointing is on, and `scoring` is not held.
    """
    if set(outputs) - set(OUTPUTS) or not temperature > 0:
        raise ConfigError(
            f"token_scores got outputs {sorted(outputs)} and temperature {temperature}; "
            f"outputs are among {', '.join(OUTPUTS)}, and the temperature is above 0"
        )
    names = tuple(name for name in OUTPUTS if name in outputs)
    transform = logit_transform(model, temperature)
    options = HeadOptions(names, transform, entropy_has_grad=entropy_has_grad, float32_head=float32_head)

    def compute(head: Redirect | None, hidden: Tensor) -> Tensor:
        targets = tree.target_ids.to(hidden.device)
        if float32_head:
            require_linear(head)
        if head is None:
            return generic_scores(lambda z: z, hidden, targets, hidden.shape[-1], options)
        if head.is_linear and not options.entropy_has_grad:
            return linear_scores(hidden, head.module.weight, head.module.bias, targets, options)  # pyright: ignore
        logits_of = float32_logits(head) if float32_head else head.original
        return generic_scores(logits_of, hidden, targets, structure.vocabulary_size(model), options)

    packed, aux_loss = head_answers(model, tree, compute, layout=layout)
    columns = packed.unbind(1)
    extra = {
        name: column if name == "entropy" and entropy_has_grad else column.detach()
        for name, column in zip(names, columns[1:], strict=True)
    }
    return TokenScores(columns[0], tree.branch_index, tree.num_branches, aux_loss=aux_loss, **extra)


def logit_transform(model: nn.Module, temperature: float) -> LogitTransform:
    """What to do to the output of the head that `head_answers` gives, before softmax."""
    return replace(head_plan(model).transform, temperature=temperature)


def head_answers(
    model: nn.Module, tree: PromptTree, compute: Callable[[Redirect | None, Tensor], Tensor], *, layout: Layout
) -> tuple[Float[Tensor, "T k"], Tensor | None]:
    """Float32 columns that `compute(head, hidden)` gives in place of logits, on the tree's device, and `aux_loss`.

    Called once, within the model's forward, with the hidden states `[T, H]` that predict the scored tokens; the head
    is None where the family's logits must be used themselves, which then stand in place of hidden states.
    """
    plan, inputs = head_plan(model), scoring_inputs(tree, layout)
    if plan.full_logits:
        output = _call(model, inputs, layout)
        packed = compute(None, inputs.pick(output.logits))
    else:
        head = structure.output_head(model)
        assert head is not None, "a plan without full logits has a head"
        with restored(model, plan.neutralised) as neutralise:

            def answer(redirect: Redirect, states: Tensor) -> Tensor:
                neutralise()
                return _split(compute(redirect, inputs.pick(states)))[None]

            with redirected(head, answer):
                output = _call(model, inputs, layout)
        packed = _join(output.logits[0])
    # a model spread over devices answers on its last one
    return packed.to(tree.input_ids.device), output.get("aux_loss")


def branch_values(model: nn.Module, tree: PromptTree, *, layout: Layout) -> Float[Tensor, " B"]:
    """Float32 value of each branch from a scalar head (a sequence classification model with one label).

    Read at the last token of prompt + branch that is not the padding token, as `ForSequenceClassification` does.

    Raises:
        ConfigError: the model has no `score` head, or more than one label.
    """
    head = structure.value_head(model)
    if head is None or structure.num_labels(model) != 1:
        raise ConfigError(
            f"{type(structure.unwrap(model)).__name__} has no scalar head; "
            "load a reward model with AutoModelForSequenceClassification and num_labels=1"
        )
    pad = structure.pad_token_id(model)
    inputs = pooling_inputs(tree, layout, pad)
    rows = inputs.keywords["input_ids"].shape[0]

    def answer(redirect: Redirect, states: Tensor) -> Tensor:
        values = _split(redirect.original(inputs.pick(states)).float())
        # The model now picks one position of each row; which one does not matter, every one holds the answer.
        return values.reshape(rows, 1, -1).expand(rows, states.shape[1], -1)

    with ExitStack() as stack:
        if pad is None:
            stack.enter_context(structure.pad_token(model, 0))
        stack.enter_context(redirected(head, answer))
        output = _call(model, inputs, layout)
    return _join(output.logits.reshape(tree.num_branches, -1)).squeeze(1)


def _call(model: nn.Module, inputs: ModelInputs, layout: Layout) -> Any:
    with ExitStack() as stack:
        if not is_active(model, layout):
            if torch.is_grad_enabled() and structure.recomputes(model):
                raise RuntimeError(
                    "gradient checkpointing runs layers again in backward: hold `scoring(model, layout)` around "
                    "token_scores and backward"
                )
            stack.enter_context(scoring(model, layout))
        if not torch.is_grad_enabled():
            stack.enter_context(callable_alone(model))
        return model(**inputs.keywords)


def _split(values: Float[Tensor, "T k"]) -> Float[Tensor, "T three_k"]:
    """Three columns a value that survive a cast to bfloat16 or float16 on the way out of a wrapped model.

    FSDP2 as accelerate sets it up casts every output of the model; the second and third column hold what that loses.
    """
    rest = values.detach()
    first = rest.bfloat16().float()
    second = (rest - first).bfloat16().float()
    return torch.cat([values + (first - rest), second, rest - first - second], dim=1)


def _join(columns: Tensor) -> Float[Tensor, "T k"]:
    first, second, third = columns.float().chunk(3, dim=1)
    return first + second.detach() + third.detach()
