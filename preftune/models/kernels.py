"""The segments of a tree, and attention over them on any device: SDPA, and plain matrices for soft-caps and sinks.

Autograd does the backward here; tensors are cut by one `split`, so that no full-size zero gradient is ever filled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


class Group:
    """A prompt and its branches in flat token indices.

    Attributes:
        start: First token.
        prompt: Tokens of the prompt.
        branches: Tokens of each branch.
        segments: `(first, end)` of what is causal in itself: the prompt with its first branch, then each other branch.
        causal: The segments that are not empty.
        others: `(first, end)` of all branches but the first together.
        shares_prompt: Branches other than the first have tokens, and a prompt to attend to.
    """

    def __init__(self, start: int, prompt: int, branches: tuple[int, ...]) -> None:
        self.start, self.prompt, self.branches = start, prompt, branches
        ends = list(itertools.accumulate((prompt, *branches), initial=start))[2:] or [start + prompt]
        self.segments = list(zip([start, *ends], ends))
        self.causal = [(lo, hi) for lo, hi in self.segments if hi > lo]
        self.others = (ends[0], ends[-1])
        self.shares_prompt = prompt > 0 and ends[-1] > ends[0]


class TreeTable:
    """The segments of a tree as attention needs them: plain integers, with masks made once per forward and backward.

    No dataclass: FSDP2 takes those apart on their way into a model, to cast the tensors in them.

    Attributes:
        layout: `PromptTree.layout`.
        groups: One for each prompt.
        masks: Of segments, by size and window.
    """

    def __init__(self, layout: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        self.layout = layout
        self.groups: list[Group] = []
        self.masks: dict[tuple, Tensor] = {}
        start = 0
        for prompt, branches in self.layout:
            self.groups.append(Group(start, prompt, tuple(branches)))
            start += prompt + sum(branches)

    @property
    def longest(self) -> int:
        """Length of the longest prompt + branch."""
        return max((g.prompt + max(g.branches, default=0) for g in self.groups), default=0)

    def mask(self, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
        """`[queries, keys]` boolean, bottom-right causal: the last query sees the last key, at most `window` back."""
        key = (queries, keys, window, device)
        if key not in self.masks:
            distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self.masks[key] = seen.to(device)
        return self.masks[key]


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, table: TreeTable, scale: float, *, window: int | None, dropout: float
) -> Tensor:
    """`[1, N, H, D]` by `scaled_dot_product_attention`, one call a segment; not tested on GPU yet."""
    repeats = query.shape[1] // key.shape[1]
    outs = []
    for q, k, v in _pieces(query, key, value, table):
        causal = window is None and q.shape[2] == k.shape[2]
        mask = None if causal else table.mask(q.shape[2], k.shape[2], window, q.device)
        if mask is not None and repeats > 1:
            # With a mask, grouped heads would fall back to full matrices on GPU.
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        outs.append(
            F.scaled_dot_product_attention(
                *(q, k, v, mask),
                dropout_p=dropout,
                is_causal=causal,
                scale=scale,
                enable_gqa=mask is None and repeats > 1,
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2)


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: TreeTable,
    scale: float,
    *,
    window: int | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`[1, N, H, D]` with weights as matrices. A sink is a logit that takes weight and gives nothing."""
    repeats = query.shape[1] // key.shape[1]
    outs = []
    for q, k, v in _pieces(query, key, value, table):
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        scores = ((q @ k.transpose(2, 3)) * scale).float()
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~table.mask(q.shape[2], k.shape[2], window, q.device), float("-inf"))
        if sinks is not None:
            column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        outs.append(F.dropout(weights.to(v.dtype), dropout, training=dropout > 0) @ v)
    return torch.cat(outs, dim=2).transpose(1, 2)


def _pieces(query: Tensor, key: Tensor, value: Tensor, table: TreeTable) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries of each segment in flat order, with the keys and values they see (bottom-right causal).

    One `split` a tensor, whose backward is one `cat`; a slice would fill a full-size zero gradient for each segment.
    """
    lengths = [n for group in table.groups for n in (group.prompt, *group.branches)]
    queries = iter(query.split([hi - lo for group in table.groups for lo, hi in group.causal], dim=2))
    keys, values = iter(key.split(lengths, dim=2)), iter(value.split(lengths, dim=2))
    for group in table.groups:
        prompt_k, prompt_v = next(keys), next(values)
        own = [(next(keys), next(values)) for _ in group.branches] or [(prompt_k[:, :, :0], prompt_v[:, :, :0])]
        for (k, v), (lo, hi) in zip(own, group.segments, strict=True):
            if hi > lo:
                yield next(queries), torch.cat([prompt_k, k], dim=2), torch.cat([prompt_v, v], dim=2)
