"""Three ways to compute attention over a prompt tree: CPU flash kernels, SDPA, plain matrices for soft-caps and sinks.

All give the same numbers; each cuts the flat tokens into few segments and never fills a full-size zero gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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


@dataclass(eq=False)
class TreeTable:
    """The segments of a tree as attention needs them: plain integers, with masks made once per forward and backward.

    Attributes:
        layout: `PromptTree.layout`.
    """

    layout: tuple[tuple[int, tuple[int, ...]], ...]
    groups: list[Group] = field(init=False, repr=False)
    masks: dict[tuple, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.groups, start = [], 0
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


# --- CPU --------------------------------------------------------------------------------------------------------------


def cpu_attention(query: Tensor, key: Tensor, value: Tensor, table: TreeTable, scale: float) -> Tensor:
    """`[1, N, H, D]` by torch's CPU flash kernels, in float32 whatever the inputs.

    Their bfloat16 backward takes twice the time of the float32 one, and RoPE hands over float32 under autocast anyway.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    out: Any = _CpuTreeAttention.apply(query, key, value, table, scale, dtype)
    return out


class _CpuTreeAttention(torch.autograd.Function):
    """A branch other than the first sees its prompt (full) and itself (causal): two kernels joined by log-sum-exp.

    A kernel's backward needs only the joined output and log-sum-exp to give its own share of the gradient. Query heads
    that share keys lie in the batch dimension G, where the K key heads are expanded without a copy.
    """

    @staticmethod
    def forward(ctx: Any, query, key, value, table, scale, dtype):
        q, k, v = _grouped(query, key, value)
        out, lse = _buffer(q), q.new_empty(q.shape[:3])
        for group in table.groups:
            for lo, hi in group.causal:
                out[:, :, lo:hi], lse[:, :, lo:hi] = _flash(
                    q[:, :, lo:hi], k[:, :, lo:hi], v[:, :, lo:hi], 0.0, True, scale=scale
                )
            if group.shares_prompt:
                a, b, (lo, hi) = group.start, group.start + group.prompt, group.others
                shared, shared_lse = _flash(q[:, :, lo:hi], k[:, :, a:b], v[:, :, a:b], 0.0, False, scale=scale)
                own, own_lse = out[:, :, lo:hi], lse[:, :, lo:hi]
                joined = torch.logaddexp(own_lse, shared_lse)
                own.mul_((own_lse - joined).exp_().unsqueeze(-1))
                own.addcmul_(shared, (shared_lse - joined).exp_().unsqueeze(-1))
                own_lse.copy_(joined)
        result = _ungrouped(out).to(dtype)
        ctx.table, ctx.scale = table, scale
        ctx.save_for_backward(query, key, value, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):
        query, key, value, result, lse = ctx.saved_tensors
        q, k, v = _grouped(query, key, value)
        (g, _, _), (out, _, _) = (
            _grouped(grad.transpose(1, 2), key, value),
            _grouped(result.transpose(1, 2), key, value),
        )
        dq, dk, dv = _buffer(q), _buffer(k[:1]), _buffer(v[:1])

        def part(queries: tuple[int, int], keys: tuple[int, int], causal: bool) -> Any:
            at, of = slice(*queries), slice(*keys)
            return _flash_backward(
                *(g[:, :, at], q[:, :, at], k[:, :, of], v[:, :, of], out[:, :, at], lse[:, :, at]),
                *(0.0, causal),
                scale=ctx.scale,
            )

        for group in ctx.table.groups:
            for lo, hi in group.causal:
                gq, gk, gv = part((lo, hi), (lo, hi), True)
                dq[:, :, lo:hi] = gq
                torch.sum(gk, 0, keepdim=True, out=dk[:, :, lo:hi])
                torch.sum(gv, 0, keepdim=True, out=dv[:, :, lo:hi])
            if group.shares_prompt:
                a, b, (lo, hi) = group.start, group.start + group.prompt, group.others
                gq, gk, gv = part((lo, hi), (a, b), False)
                dq[:, :, lo:hi] += gq
                dk[:, :, a:b] += gk.sum(0, keepdim=True)
                dv[:, :, a:b] += gv.sum(0, keepdim=True)
        grads = (_ungrouped(dq), _ungrouped(dk), _ungrouped(dv))
        return (
            *(d.transpose(1, 2).to(x.dtype) for d, x in zip(grads, (query, key, value), strict=True)),
            None,
            None,
            None,
        )


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views `[G, K, T, D]` in float32 (float64 stays): query head k * G + g uses key head k."""
    kv_heads, shared = key.shape[1], query.shape[1] // key.shape[1]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    q = query[0].to(dtype).unflatten(0, (kv_heads, shared)).transpose(0, 1)
    return q, key.to(dtype).expand(shared, -1, -1, -1), value.to(dtype).expand(shared, -1, -1, -1)


def _buffer(like: Tensor) -> Tensor:
    """An empty `[G, K, T, D]` whose memory is `[T, K, G, D]`, as linear layers read it without a copy."""
    shared, kv_heads, tokens, width = like.shape
    return like.new_empty(tokens, kv_heads, shared, width).permute(2, 1, 0, 3)


def _ungrouped(x: Tensor) -> Tensor:
    """`[1, T, K * G, D]`."""
    return x.permute(2, 1, 0, 3).flatten(1, 2).unsqueeze(0)


# --- any device -------------------------------------------------------------------------------------------------------


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
