"""Finds out, once per model and by numbers, whether it can take the tree layout, and what follows its head.

Runs on a few tokens, in eval mode and without gradients; leaves modes and random state as found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from preftune.data.tree import build_tree
from preftune.errors import ConfigError
from preftune.models import structure
from preftune.models.attention import Layout, scoring
from preftune.models.audit import mask_obstacle
from preftune.models.distributed import callable_alone
from preftune.models.head import LogitTransform
from preftune.models.inputs import ModelInputs, every_position, scoring_inputs
from preftune.models.redirect import Redirect, redirected, restored
from preftune.models.structure import PostHeadField, PostHeadKind
from preftune.types import PromptTree

# Relative change of a hidden state that counts as none: rounding of a deep model, by dtype.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 3e-4}
_TOLERANCE_LOW = 6e-2
_CANNOT = (
    TypeError,
    ValueError,
    RuntimeError,
    KeyError,
    IndexError,
    AttributeError,
    NotImplementedError,
    AssertionError,
)


@dataclass(frozen=True)
class LayoutChoice:
    """The layout a model is scored in, and why, in one sentence."""

    layout: Layout
    reason: str


@dataclass(frozen=True)
class HeadPlan:
    """How scores are computed from a model's hidden states.

    Attributes:
        transform: What the family does to its logits, done by our head instead.
        neutralised: Fields that switch the family's own transform off for the call.
        full_logits: The model's plain logits must be used, because `reason`.
    """

    transform: LogitTransform = LogitTransform()
    neutralised: tuple[PostHeadField, ...] = ()
    full_logits: bool = False
    reason: str = ""


_layouts: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_plans: WeakKeyDictionary[nn.Module, HeadPlan] = WeakKeyDictionary()


def choose_layout(
    model: nn.Module, requested: Literal["auto", "tree", "padded"] = "auto", *, images: bool = False
) -> LayoutChoice:
    """The layout for `model`; `auto` takes the tree where a probe shows that it gives the numbers of `padded`.

    Args:
        images: The rows have images, which the tree has no place for.

    Raises:
        ConfigError: `tree` was requested and this model cannot take it, or `requested` is no layout.
    """
    if requested not in ("auto", "tree", "padded"):
        raise ConfigError(f"attention_layout is {requested!r}; it is 'auto', 'tree' or 'padded'")
    if requested == "padded":
        return LayoutChoice("padded", "asked for by attention_layout='padded'" + _head_note(model))
    inner = structure.unwrap(model)
    obstacle = "the rows have images" if images else structure_obstacle(inner)
    if obstacle is None:
        if inner not in _layouts:
            _layouts[inner] = _numeric_obstacle(inner) or ""
        obstacle = _layouts[inner] or None
    if obstacle is None:
        return LayoutChoice(
            "tree", "branches do not see each other and the scores equal those of 'padded'" + _head_note(model)
        )
    if requested == "tree":
        raise ConfigError(
            f"attention_layout='tree' is impossible for {type(inner).__name__}: {obstacle}; use 'auto' or 'padded'"
        )
    return LayoutChoice("padded", f"the tree layout is impossible: {obstacle}" + _head_note(model))


def _head_note(model: nn.Module) -> str:
    if structure.output_head(model) is None:
        return ""
    plan = head_plan(model)
    return f"; scores come from full logits, because {plan.reason}" if plan.full_logits else ""


def structure_obstacle(model: nn.Module) -> str | None:
    """Why the tree is known to be impossible before any number is computed."""
    if structure.is_prompt_learning(model):
        return "PEFT prompt learning puts virtual tokens before every row"
    if not structure.supports_attention_switch(model):
        return "its attention does not go through transformers' AttentionInterface"
    if not structure.takes_extra_keywords(model):
        return "its forward takes no position_ids or drops extra keyword arguments"
    return None


# --- the layout -------------------------------------------------------------------------------------------------------


def _numeric_obstacle(model: nn.Module) -> str | None:
    with _quietly(model):
        try:
            return mask_obstacle(model) or _tree_obstacle(model)
        except _CANNOT as error:
            return f"calling it with a prompt tree fails ({type(error).__name__}: {str(error)[:200]})"


def _tree_obstacle(model: nn.Module) -> str | None:
    generator = torch.Generator().manual_seed(0)
    vocabulary = structure.vocabulary_size(model)
    device = structure.input_device(model)

    def ids(n: int) -> list[int]:
        return torch.randint(vocabulary, (n,), generator=generator).tolist()

    prompts = [ids(5), [], ids(3)]
    branches = [[ids(4), ids(6), ids(3)], [ids(5), ids(4)], [ids(1), ids(4)]]
    tree = build_tree(prompts, branches).to(device)
    states = _hidden_states(model, tree, "tree")
    padded = _hidden_states(model, tree, "padded")
    tolerance = _TOLERANCE.get(states.dtype, _TOLERANCE_LOW)
    states, padded = states.float(), padded.float()
    for prompt, branch in ((0, 0), (0, 1), (1, 0), (2, 0)):
        changed = [[list(b) for b in group] for group in branches]
        changed[prompt][branch] = [(t + 1) % vocabulary for t in changed[prompt][branch]]
        moved = _hidden_states(model, build_tree(prompts, changed).to(device), "tree").float()
        others = torch.from_numpy(_outside(tree, prompt, branch)).to(device)
        if not _relative(moved, states)[others].max() <= tolerance:
            return "changing one branch changes the scores of another (recurrent or convolutional layers do that)"
    difference = _relative(states, padded).max().item()
    if not difference <= tolerance:
        return (
            f"its hidden states differ from those of 'padded' by {difference:.1e} (relative; allowed {tolerance:.0e})"
        )
    return None


def _outside(tree: PromptTree, prompt: int, branch: int) -> Any:
    import numpy as np

    start = (
        sum(n + sum(b) for n, b in tree.layout[:prompt]) + tree.layout[prompt][0] + sum(tree.layout[prompt][1][:branch])
    )
    keep = np.ones(tree.num_tokens, bool)
    keep[start : start + tree.layout[prompt][1][branch]] = False
    return keep


def _relative(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-12)


def _hidden_states(model: nn.Module, tree: PromptTree, layout: Layout) -> Tensor:
    """`[N, H]` what the head is given for each flat token (or, where the head is not called, the logits)."""
    inputs = every_position(tree, layout)
    head = structure.output_head(model)
    head = structure.value_head(model) if head is None else head
    caught: list[Tensor] = []

    def answer(redirect: Redirect, states: Tensor) -> Tensor:
        caught.append(states)
        return states.new_zeros(*states.shape[:2], 1)

    with scoring(model, layout):
        if head is None:
            return inputs.pick(model(**inputs.keywords).logits)
        with redirected(head, answer):
            output = model(**inputs.keywords)
    return inputs.pick(caught[0] if caught else output.logits)


# --- the head ---------------------------------------------------------------------------------------------------------


def head_plan(model: nn.Module) -> HeadPlan:
    """What `token_scores` must do about this model's head; probed on the first call."""
    inner = structure.unwrap(model)
    if inner not in _plans:
        with _quietly(inner):
            _plans[inner] = _find_head_plan(inner)
    return _plans[inner]


def _find_head_plan(model: nn.Module) -> HeadPlan:
    head = structure.output_head(model)
    if head is None:
        return HeadPlan(full_logits=True, reason="the model names no output embeddings")
    fields = structure.post_head_fields(model)
    logits, after = _after_head(model, head, ())
    if after is None:
        return HeadPlan(full_logits=True, reason="its logits do not come from one call of its output embeddings")
    if _close(after, logits, 1e-6):
        return HeadPlan()
    for chosen in _choices(fields):
        if not _close(after, _transform(chosen)(logits), 1e-2):
            continue
        owners = tuple(field for field, _ in chosen)
        neutral = _after_head(model, head, owners)[1]
        if neutral is not None and _close(neutral, logits, 1e-6):
            return HeadPlan(_transform(chosen), owners)
    return HeadPlan(
        full_logits=True, reason="it changes its logits after the head in a way that no known field explains"
    )


_Use = tuple[PostHeadField, PostHeadKind]


def _choices(fields: list[PostHeadField]) -> Iterator[tuple[_Use, ...]]:
    single: list[_Use] = [(field, kind) for field in fields for kind in field.kinds]
    yield from ((one,) for one in single)
    for a, b in itertools.permutations(single, 2):
        if a[1] != "softcap" and b[1] == "softcap":
            yield (a, b)


def _transform(chosen: tuple[_Use, ...]) -> LogitTransform:
    scale, softcap = 1.0, None
    for field, kind in chosen:
        if kind == "softcap":
            softcap = field.value
        else:
            scale *= field.value if kind == "multiply" else 1 / field.value
    return LogitTransform(scale, softcap)


def _after_head(
    model: nn.Module, head: nn.Module, neutralised: tuple[PostHeadField, ...]
) -> tuple[Tensor, Tensor | None]:
    """Known logits that the head is made to return, and what the model makes of them."""
    given: list[Tensor] = []

    with restored(model, neutralised) as neutralise:

        def answer(redirect: Redirect, states: Tensor) -> Tensor:
            neutralise()
            shape = (*states.shape[:-1], redirect.original(states[:, :1]).shape[-1])
            given.append(torch.linspace(-40, 40, shape[-1], device=states.device).expand(shape))
            return given[-1]

        with redirected(head, answer):
            output = model(**_few_tokens(model).keywords)
    if len(given) != 1 or output.logits.shape != given[0].shape:
        return output.logits, None
    return given[0], output.logits.float()


def _few_tokens(model: nn.Module) -> ModelInputs:
    return scoring_inputs(build_tree([[0]], [[[0, 0]]]).to(structure.input_device(model)), "padded")


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool(((a - b).abs() <= tolerance * b.abs() + 1e-6).all())


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Eval mode, plain attention, no gradients, no autocast; modes and the global random state are put back."""
    flags = [(module, module.training) for module in model.modules()]
    device = structure.input_device(model)
    devices = [device] if device.type == "cuda" else []
    try:
        for module, _ in flags:
            module.training = False
        # Without a padding token a classifier refuses more than one row, and the probe has several.
        pad = structure.pad_token(model, 0) if structure.pad_token_id(model) is None else nullcontext()
        with (
            pad,
            scoring(model, "padded"),
            torch.random.fork_rng(devices),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
            callable_alone(model),
        ):
            yield
    finally:
        for module, training in flags:
            module.training = training
