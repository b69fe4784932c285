"""What a model says of scored tokens beyond the drawn one: its most probable tokens, those asked for, all of them.

Siblings of `token_scores` on the same narrow waist: a distribution over the vocabulary exists for a chunk of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from preftune.models import structure
from preftune.models.attention import Layout
from preftune.models.head import in_chunks, sizes_for
from preftune.models.logprobs import head_answers, logit_transform
from preftune.models.redirect import Redirect
from preftune.types import PromptTree, TokenScores

# A comparison holds some four times as many numbers as a score.
_SMALLER = 4


@dataclass(frozen=True)
class TopScores:
    """Scores of a tree, and its most probable tokens.

    Attributes:
        scores: With entropy.
        ids_Tk: `[T, k]` ids, the most probable first.
        logps_Tk: `[T, k]` their log-probabilities in the whole vocabulary, with gradient where grad mode is on.
    """

    scores: TokenScores
    ids_Tk: Tensor
    logps_Tk: Tensor


@dataclass(frozen=True)
class Recall:
    """Distributions of a model whose forward is over, from the hidden states that it left; without gradient.

    Attributes:
        hidden_TH: What its head was given at each scored token.
        head: From those to logits at the temperature.
    """

    hidden_TH: Tensor
    head: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def logps(self, tokens: Int[Tensor, " t"]) -> Float[Tensor, "t V"]:
        """Log-probabilities of all tokens where the scored tokens numbered `tokens` stand."""
        return torch.log_softmax(self.head(self.hidden_TH[tokens]), dim=-1)


def top_scores(model: nn.Module, tree: PromptTree, k: int, *, layout: Layout, temperature: float = 1.0) -> TopScores:
    """Scores and the `k` most probable tokens at each scored token (all of them where the vocabulary has fewer)."""
    targets = tree.target_ids

    def columns(logps_tV: Tensor, at: slice) -> Tensor:
        own = _at(logps_tV, targets[at].to(logps_tV.device)[:, None])
        top = logps_tV.topk(min(k, logps_tV.shape[1]), dim=-1)
        return torch.cat([own, _entropy(logps_tV), top.values, top.indices.float()], dim=1)

    packed, aux_loss = _over_distributions(model, tree, columns, layout=layout, temperature=temperature)
    kept = (packed.shape[1] - 2) // 2
    scores = TokenScores(
        packed[:, 0], tree.branch_index, tree.num_branches, entropy=packed[:, 1].detach(), aux_loss=aux_loss
    )
    return TopScores(scores, packed[:, 2 + kept :].detach().long(), packed[:, 2 : 2 + kept])


def logps_at(
    model: nn.Module, tree: PromptTree, ids_Tk: Int[Tensor, "T k"], *, layout: Layout, temperature: float = 1.0
) -> Float[Tensor, "T k"]:
    """Log-probabilities of the tokens `ids_Tk` where each scored token stands."""

    def columns(logps_tV: Tensor, at: slice) -> Tensor:
        return _at(logps_tV, ids_Tk[at].to(logps_tV.device))

    return _over_distributions(model, tree, columns, layout=layout, temperature=temperature)[0]


def compared_scores(
    model: nn.Module,
    tree: PromptTree,
    compare: Callable[[Tensor, slice], Tensor],
    *,
    layout: Layout,
    temperature: float = 1.0,
) -> tuple[TokenScores, Float[Tensor, " T"]]:
    """Scores with entropy, and one value a scored token that `compare` makes of the distribution it was drawn from.

    Args:
        compare: `(log-probabilities [t, V], which scored tokens) -> [t]`. Called again in the backward, where gradients
            flow into the log-probabilities; it must not draw random numbers.
    """
    targets = tree.target_ids

    def columns(logps_tV: Tensor, at: slice) -> Tensor:
        own = _at(logps_tV, targets[at].to(logps_tV.device)[:, None])
        return torch.cat([own, _entropy(logps_tV), compare(logps_tV, at)[:, None]], dim=1)

    packed, aux_loss = _over_distributions(model, tree, columns, layout=layout, temperature=temperature)
    logps, entropy, values = packed.unbind(1)
    scores = TokenScores(logps, tree.branch_index, tree.num_branches, entropy=entropy.detach(), aux_loss=aux_loss)
    return scores, values


@torch.no_grad()
def recalled(model: nn.Module, tree: PromptTree, *, layout: Layout, temperature: float = 1.0) -> Recall:
    """One forward of the model, kept as hidden states of the scored tokens.

    The head must be there afterwards too: not under FSDP and ZeRO-3, which take its weights away after the forward.
    """
    transform = logit_transform(model, temperature)
    kept: list[Recall] = []

    def compute(head: Redirect | None, hidden: Tensor) -> Tensor:
        original = head.original if head is not None else lambda z: z
        kept.append(Recall(hidden.detach(), lambda h: transform(original(h).float())))
        return torch.zeros(len(hidden), 1, device=hidden.device)

    head_answers(model, tree, compute, layout=layout)
    return kept[0]


def _over_distributions(
    model: nn.Module,
    tree: PromptTree,
    columns: Callable[[Tensor, slice], Tensor],
    *,
    layout: Layout,
    temperature: float,
) -> tuple[Float[Tensor, "T k"], Tensor | None]:
    """`columns(log-probabilities [t, V], which tokens)` of each chunk of scored tokens, and `aux_loss`."""
    transform = logit_transform(model, temperature)
    vocabulary = structure.vocabulary_size(model)

    def compute(head: Redirect | None, hidden: Tensor) -> Tensor:
        original = head.original if head is not None else lambda z: z

        def one(states: Tensor, at: slice) -> Tensor:
            return columns(torch.log_softmax(transform(original(states).float()), dim=-1), at)

        sizes = sizes_for(hidden.device.type)
        return in_chunks(one, hidden, vocabulary, replace(sizes, chunk_bytes=sizes.chunk_bytes // _SMALLER))

    return head_answers(model, tree, compute, layout=layout)


def _at(logps_tV: Tensor, ids_tk: Tensor) -> Tensor:
    return logps_tV.gather(1, ids_tk)


def _entropy(logps_tV: Tensor) -> Tensor:
    detached = logps_tV.detach()
    return -torch.linalg.vecdot(detached.exp(), detached)[:, None]
