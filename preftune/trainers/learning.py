"""From the groups of a round to what a loss sees: log-probabilities, rows, and which groups need a backward pass.

One forward a micro-batch; old and reference log-probabilities are computed once a round and travel with the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from preftune.models.attention import Layout
from preftune.models.logprobs import token_scores
from preftune.models.reference import LiveReference, ReferenceModel
from preftune.models.reference_base import evaluating
from preftune.trainers.groups import Group, by_number, cut_into, row_index, stored_values, tree_of, within_budget
from preftune.trainers.metrics import RunningMetrics
from preftune.types import LossOutput, PolicyTokens, PromptTree, TokenScores

AGREEMENT = 1e-4
"""Largest gap at which the sampler's log-probabilities stand for the policy's own."""


@torch.no_grad()
def score_groups(
    groups: Sequence[Group],
    policy: nn.Module,
    *,
    reference: ReferenceModel | None = None,
    layout: Layout,
    temperature: float,
    float32_head: bool = False,
    rows: int,
    max_tokens: int | None,
    device: Any,
) -> dict[int, np.ndarray]:
    """Log-probabilities of every completion by its number, under `reference` or else the policy as it is now.

    Without dropout, in parts of `rows` completions and at most `max_tokens` tokens.
    """
    how: Any = {"layout": layout, "temperature": temperature, "float32_head": float32_head}
    known: dict[int, np.ndarray] = {}
    for part in cut_into(groups, rows):
        for few in within_budget(part, max_tokens):
            tree = tree_of(few).to(device)
            with evaluating(policy):
                if reference is None:
                    scores = token_scores(policy, tree, **how)
                else:
                    scores = cast(LiveReference, reference).token_scores(policy, tree, **how)
            known |= by_number(few, scores.logps)
    return known


def with_logps(
    groups: list[Group],
    score: Callable[[list[Group], ReferenceModel | None], dict[int, np.ndarray]],
    *,
    old: bool,
    reference: ReferenceModel | None,
    trusts_sampler: bool,
    everywhere: Callable[[bool], bool] = bool,
) -> list[Group]:
    """Groups with the "old" log-probabilities, where asked, and those of the reference ("ref"), where there is one.

    Args:
        score: Log-probabilities of groups under a reference, or (None) the policy.
        trusts_sampler: Whether the sampler's own may serve as the old ones; they do where those of the first group
            agree with the policy's to `AGREEMENT`.
        everywhere: Whether something holds on all ranks. They decide together, for ranks score a sharded policy
            together or not at all.
    """
    trusts_sampler = old and trusts_sampler and everywhere(all("sampler" in group.logps for group in groups))
    if trusts_sampler and everywhere(_agree(groups[:1], score)):
        groups = [g.with_logps("old", dict(zip(g.numbers, g.logps["sampler"], strict=True))) for g in groups]
    elif old:
        known = score(groups, None)
        groups = [group.with_logps("old", known) for group in groups]
    if reference is not None:
        known = score(groups, reference)
        groups = [group.with_logps("ref", known) for group in groups]
    return groups


def _agree(groups: list[Group], score: Callable[[list[Group], None], dict[int, np.ndarray]]) -> bool:
    known = score(groups, None)
    drawn = {n: values for group in groups for n, values in zip(group.numbers, group.logps["sampler"], strict=True)}
    return all(np.allclose(known[n], values, rtol=0, atol=AGREEMENT) for n, values in drawn.items())


def summed_gaps(groups: Sequence[Group], name: str, other: str) -> np.ndarray:
    """`[rows]` by number: the sum over tokens of one kind of log-probabilities less another; 0 where `other` is not."""
    sums = np.zeros(sum(group.rows for group in groups))
    for group in groups:
        if other in group.logps:
            for number, values, less in zip(group.numbers, group.logps[name], group.logps[other], strict=True):
                sums[number] = (values.astype(np.float64) - less).sum()
    return sums


def with_tokens(groups: Sequence[Group]) -> list[Group]:
    """The completions that have tokens to score."""
    scored = [group.select([i for i, mask in enumerate(group.masks) if mask.any()]) for group in groups]
    return [group for group in scored if group.rows]


def stand_in(groups: Sequence[Group]) -> Group:
    """One completion with one token to score, for a batch that has none: its loss is to be multiplied by 0."""
    some = (group.select([i]) for group in groups for i, ids in enumerate(group.completion_ids) if len(ids))
    first = next(some, None)
    if first is None:  # not one completion has a token
        group = groups[0].select([0])
        first = replace(group, completion_ids=[list(group.prompt_ids[-1:])])
    mask = np.arange(len(first.completion_ids[0])) == 0
    return replace(first, masks=[mask], logps={name: [np.zeros(1, np.float32)] for name in first.logps})


def learning_parts(
    groups: Sequence[Group], *, has_gradient: Callable[[Group], bool], max_tokens: int | None
) -> list[tuple[list[Group], bool]]:
    """Micro-batches within the budget, and whether each has a gradient; those without one come first.

    One part at least has a backward pass, so that optimizer and ranks take their step: where no group has a gradient,
    that of one completion.
    """
    learning = [group for group in groups if has_gradient(group)]
    flat = [group for group in groups if not has_gradient(group)]
    if not learning:
        smallest = min(range(len(flat)), key=lambda i: flat[i].flat_tokens)
        whole = flat.pop(smallest)
        learning = [whole.select([0])]
        flat += [whole.select(range(1, whole.rows))] if whole.rows > 1 else []
    looked_at = [(few, False) for few in within_budget(flat, max_tokens)] if flat else []
    return looked_at + [(few, True) for few in within_budget(learning, max_tokens)]


def policy_tokens(
    groups: Sequence[Group],
    model: nn.Module,
    *,
    layout: Layout,
    temperature: float,
    on_policy: bool,
    entropy_has_grad: bool,
    float32_head: bool = False,
    device: Any,
) -> tuple[PolicyTokens, TokenScores]:
    """What a loss sees of the groups, in one forward; gradients flow into `logps`, and `entropy` where asked."""
    tree = tree_of(groups).to(device)
    scores = token_scores(
        model,
        tree,
        layout=layout,
        temperature=temperature,
        outputs=frozenset({"entropy"}),
        entropy_has_grad=entropy_has_grad,
        float32_head=float32_head,
    )
    return as_rows(groups, tree, scores, on_policy=on_policy), scores


def as_rows(
    groups: Sequence[Group], tree: PromptTree, scores: TokenScores, *, on_policy: bool, divergence: Tensor | None = None
) -> PolicyTokens:
    """Scores of the groups' tree, with what is stored of its tokens, as rows.

    Args:
        divergence: `[T]` of each scored token.
    """
    index, device = row_index(groups, tree), scores.logps.device

    def stored(name: str) -> Tensor | None:
        values = stored_values(groups, name, device)
        return None if values is None else index.rows(values)

    assert scores.entropy is not None
    advantages = torch.from_numpy(np.concatenate([group.advantages for group in groups])).float()
    return PolicyTokens(
        logps=index.rows(scores.logps),
        old_logps=None if on_policy else stored("old"),
        advantages=advantages.to(device),
        mask=index.rows(torch.ones_like(scores.entropy)),
        ref_logps=stored("ref"),
        sampler_logps=stored("sampler"),
        entropy=index.rows(scores.entropy),
        divergence=None if divergence is None else index.rows(divergence),
    )


def record_tokens(metrics: RunningMetrics, tokens: PolicyTokens, output: LossOutput) -> None:
    """Adds what a loss reports, the entropy, and how far the sampler's log-probabilities are from the trainer's.

    `[B, T]` values are averaged over scored tokens. A name that ends in min or max asks for that extreme.
    """
    assert tokens.entropy is not None
    values = {**output.metrics, "entropy": tokens.entropy}
    if tokens.sampler_logps is not None:
        gap = (tokens.logps.detach() if tokens.old_logps is None else tokens.old_logps) - tokens.sampler_logps
        values |= {f"sampling/sampling_logp_difference/{kind}": gap.abs() for kind in ("mean", "max")}
    is_scored = tokens.mask > 0
    for name, value in values.items():
        is_per_token = value.shape == is_scored.shape
        kind = name.replace("/", "_").rpartition("_")[2]
        # weights and fillings instead of picked tokens: picking would wait for the device
        if kind == "min" or kind == "max":
            least = torch.inf if kind == "min" else -torch.inf
            metrics.add_extreme(name, value.where(is_scored, least) if is_per_token else value, kind)
        elif is_per_token:
            metrics.add(name, value.where(is_scored, 0.0), is_scored)
        else:
            metrics.add(name, value)
