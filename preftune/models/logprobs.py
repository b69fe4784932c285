"""The narrow waist: `token_scores` and `branch_values`, from a prompt tree to what the model says of it.

The model (wrapped or not) is called once, and its head answers with scores instead of logits: full logits never exist.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from preftune.errors import ConfigError
from preftune.models import structure
from preftune.models.attention import TREE_ATTENTION, Layout, is_active, scoring
from preftune.models.head import OUTPUTS, HeadOptions, generic_scores, linear_scores, logit_scores
from preftune.models.inputs import ModelInputs, pooling_inputs, scoring_inputs
from preftune.models.probe import LayoutChoice, choose_layout, head_plan
from preftune.models.redirect import Redirect, redirected, restored
from preftune.types import PromptTree, TokenScores

__all__ = ["Layout", "LayoutChoice", "branch_values", "choose_layout", "scoring", "token_scores"]


def token_scores(
    model: nn.Module,
    tree: PromptTree,
    *,
    layout: Layout,
    temperature: float = 1.0,
    outputs: Collection[str] = frozenset(),
) -> TokenScores:
    """Log-probability of every scored token of `tree`, and the `outputs` asked for.

    Gradients flow into `logps` (and `aux_loss`) where grad mode is on; the other outputs are detached. All refer to the
    distribution at `temperature`. With gradient checkpointing hold `scoring(model, layout)` until backward has ended.

    Args:
        outputs: Subset of {"entropy", "mean_logits", "is_top1", "log_sum_sq_probs"}.

    Raises:
        ConfigError: an unknown output, or a temperature that is not positive.
    """
    unknown = set(outputs) - set(OUTPUTS)
    if unknown or not temperature > 0:
        raise ConfigError(
            f"token_scores got outputs {sorted(outputs)} and temperature {temperature}; "
            f"outputs are among {', '.join(OUTPUTS)}, and the temperature is above 0"
        )
    plan = head_plan(model)
    names = tuple(name for name in OUTPUTS if name in outputs)
    options = HeadOptions(names, replace(plan.transform, temperature=temperature))
    inputs = scoring_inputs(tree, layout)
    head = structure.output_head(model)
    if plan.full_logits or head is None:
        output = _call(model, inputs, layout, ExitStack())
        plain = replace(options, transform=replace(plan.transform, scale=1.0, softcap=None, temperature=temperature))
        packed = logit_scores(inputs.pick(output.logits), tree.target_ids, plain)
    else:
        targets = tree.target_ids
        with ExitStack() as stack:
            neutralise = stack.enter_context(restored(plan.neutralised))

            def answer(redirect: Redirect, states: Tensor) -> Tensor:
                neutralise()
                hidden = inputs.pick(states)
                if redirect.is_linear:
                    weight, bias = redirect.module.weight, redirect.module.bias
                    return linear_scores(hidden, weight, bias, targets, options)[None]  # pyright: ignore
                return generic_scores(redirect.original, hidden, targets, options)[None]

            stack.enter_context(redirected(head, answer))
            output = _call(model, inputs, layout, stack)
        packed = output.logits[0]
    columns = packed.unbind(1)
    extra = {name: column.detach() for name, column in zip(names, columns[1:], strict=True)}
    return TokenScores(columns[0], tree.branch_index, tree.num_branches, aux_loss=output.get("aux_loss"), **extra)


def branch_values(model: nn.Module, tree: PromptTree, *, layout: Layout) -> Tensor:
    """`[B]` float32 value of each branch from a scalar head (a sequence classification model with one label).

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
    inputs = pooling_inputs(tree, layout, structure.pad_token_id(model))
    rows = inputs.keywords["input_ids"].shape[0]

    def answer(redirect: Redirect, states: Tensor) -> Tensor:
        values = redirect.original(inputs.pick(states)).float()
        # The model now picks one position of each row, which one does not matter: every one holds the answer.
        spread = values.view(1, 1, -1) if layout == "tree" else values.view(rows, 1, 1)
        return spread.expand(rows, states.shape[1], -1)

    with ExitStack() as stack:
        if structure.pad_token_id(model) is None:
            stack.enter_context(structure.pad_token(model, 0))
        stack.enter_context(redirected(head, answer))
        output = _call(model, inputs, layout, stack)
    return output.logits.reshape(-1)


def _call(model: nn.Module, inputs: ModelInputs, layout: Layout, stack: ExitStack) -> Any:
    with stack:
        if layout == "tree" and not is_active(model, TREE_ATTENTION):
            if torch.is_grad_enabled() and structure.recomputes(model):
                raise RuntimeError(
                    "gradient checkpointing runs layers again in backward: hold `scoring(model, layout)` around "
                    "token_scores and backward"
                )
            stack.enter_context(scoring(model, layout))
        return model(**inputs.keywords)
