"""Attention over a tree by torch's CPU flash kernels, forward and backward, with short segments computed in batches.

Always in float32: their bfloat16 backward takes twice the time, and under autocast RoPE hands over float32 anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from preftune.models.kernels import Group, TreeTable

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Multiplications (queries x keys x heads x width) below which the call of a kernel costs more than its work.
_SMALL = 2**19

Span = tuple[int, int]


def cpu_attention(query: Tensor, key: Tensor, value: Tensor, table: TreeTable, scale: float) -> Tensor:
    """q `[1, H, N, D]`, k and v `[1, K, N, D]` -> `[1, N, H, D]`, in autocast's dtype or the query's."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    plan = _plan(table.layout, query.shape[1] * query.shape[3])
    out: Any = _CpuTreeAttention.apply(query, key, value, plan, scale, dtype)
    return out


# --- what is computed by which call -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Batch:
    """Short segments side by side: queries and the keys they see (bottom-right causal), padded with copies of the last.

    Attributes:
        queries: `[B, Q]` flat index.
        keys: `[B, L]` flat index.
        mask: `[B, 1, Q, L]`, 0 where seen, else minus infinity.
        real: `[B, Q]` False for padding.
        tokens: `[R]` flat index of the real queries, in order.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor
    real: Tensor
    tokens: Tensor


@dataclass(eq=False)
class _Plan:
    """The kernel calls for a tree: batches of short segments, long causal segments, and prompts seen by their others.

    The first two cover each query once; `shared` adds `(queries, keys)` that are seen beside the own segment.
    """

    batches: list[_Batch]
    causal: list[Span]
    shared: list[tuple[Span, Span]]


@lru_cache(maxsize=8)  # policy and reference score the same tree
def _plan(layout: tuple[tuple[int, tuple[int, ...]], ...], size: int) -> _Plan:
    """`size` is heads times width."""
    short: list[tuple[Span, Span]] = []
    causal: list[Span] = []
    shared: list[tuple[Span, Span]] = []

    def is_short(span: Span, before: int) -> bool:
        length = span[1] - span[0]
        return length * (length + before) * size <= _SMALL

    for group in TreeTable(layout).groups:
        prompts = _prompts(group)
        if all(is_short(span, b - a) for span, (a, b) in zip(group.causal, prompts, strict=True)):
            short += zip(group.causal, prompts, strict=True)
            continue
        for span in group.causal:
            if is_short(span, 0):
                short.append((span, (0, 0)))
            else:
                causal.append(span)
        if group.shares_prompt:
            shared.append((group.others, (group.start, group.start + group.prompt)))
    return _Plan([_batch(rows) for rows in _buckets(short, size)], causal, shared)


def _prompts(group: Group) -> list[Span]:
    """What each causal segment sees beside itself: the prompt, or nothing for the one that begins with it."""
    prompt = (group.start, group.start + group.prompt)
    return [(0, 0) if lo == group.start else prompt for lo, _ in group.causal]


def _buckets(rows: list[tuple[Span, Span]], size: int) -> list[list[tuple[Span, Span]]]:
    """Rows of like size together: padding costs at most half of the real work, or as much as another call would."""

    def lengths(row: tuple[Span, Span]) -> tuple[int, int]:
        (lo, hi), (a, b) = row
        return b - a + hi - lo, hi - lo

    buckets: list[list[tuple[Span, Span]]] = []
    area = widest = 0
    for row in sorted(rows, key=lambda r: (lengths(r), r)):
        keys, queries = lengths(row)
        area, widest = area + keys * queries, max(widest, queries)
        padded = (len(buckets[-1]) + 1) * keys * widest if buckets else 0
        if not buckets or (padded - 1.5 * area) * size > _SMALL:
            buckets.append([])
            area, widest = keys * queries, queries
        buckets[-1].append(row)
    return buckets


def _batch(rows: list[tuple[Span, Span]]) -> _Batch:
    lo, hi, a, b = np.array([(*own, *prompt) for own, prompt in rows]).T[:, :, None]
    queries, prompts = hi - lo, b - a
    i, j = np.arange(queries.max())[None], np.arange((prompts + queries).max())[None]
    row, column = np.minimum(i, queries - 1), np.minimum(j, prompts + queries - 1)
    index = torch.from_numpy(lo + row)
    keys = torch.from_numpy(np.where(column < prompts, a + column, lo + column - prompts))
    hidden = torch.from_numpy(j[:, None] > (prompts + row)[:, :, None]).unsqueeze(1)
    real = torch.from_numpy(i < queries)
    return _Batch(index, keys, torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")), real, index[real])


# --- the function -----------------------------------------------------------------------------------------------------


class _CpuTreeAttention(torch.autograd.Function):
    """Each query's own segment first; what it sees of a prompt beside it is joined by log-sum-exp.

    A kernel's backward needs only the joined output and log-sum-exp to give its own share of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, query, key, value, plan, scale, dtype):
        q, k, v = (_tokens_first(x) for x in (query, key, value))
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[1], q.shape[0])
        for batch in plan.batches:
            inputs = _gathered(batch, q, k, v)
            o, log_sum = _flash(*inputs, 0.0, False, attn_mask=batch.mask.to(q.dtype), scale=scale)
            out[batch.tokens] = o.transpose(1, 2)[batch.real]
            lse[:, batch.tokens] = log_sum.transpose(1, 2)[batch.real].T
        heads = _Heads(q, k, v, out, lse)
        for lo, hi in plan.causal:
            heads.out[:, :, lo:hi], heads.lse[:, :, lo:hi] = _flash(
                *(heads.q[:, :, lo:hi], heads.k[:, :, lo:hi], heads.v[:, :, lo:hi], 0.0, True), scale=scale
            )
        for (lo, hi), (a, b) in plan.shared:
            more, more_lse = _flash(heads.q[:, :, lo:hi], heads.k[:, :, a:b], heads.v[:, :, a:b], scale=scale)
            own, own_lse = heads.out[:, :, lo:hi], heads.lse[:, :, lo:hi]
            joined = torch.logaddexp(own_lse, more_lse)
            own.mul_((own_lse - joined).exp_().unsqueeze(-1)).addcmul_(more, (more_lse - joined).exp_().unsqueeze(-1))
            own_lse.copy_(joined)
        result = out.to(dtype).unsqueeze(0)
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(query, key, value, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):
        query, key, value, result, lse = ctx.saved_tensors
        q, k, v = (_tokens_first(x) for x in (query, key, value))
        g, out = (x[0].to(q.dtype) for x in (grad, result))
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for batch in ctx.plan.batches:
            _batch_backward(batch, ctx.scale, (g, q, k, v, out, lse), (dq, dk, dv))
        heads, above, down = _Heads(q, k, v, out, lse), _by_head(g, k), _Heads(dq, dk, dv, dq, lse)
        spans = [(span, span, True) for span in ctx.plan.causal] + [(at, of, False) for at, of in ctx.plan.shared]
        for (lo, hi), (a, b), causal in spans:
            gq, gk, gv = _flash_backward(
                *(above[:, :, lo:hi], heads.q[:, :, lo:hi], heads.k[:, :, a:b], heads.v[:, :, a:b]),
                *(heads.out[:, :, lo:hi], heads.lse[:, :, lo:hi], 0.0, causal),
                scale=ctx.scale,
            )
            down.q[:, :, lo:hi] += gq
            down.k[0, :, a:b] += gk.sum(0)
            down.v[0, :, a:b] += gv.sum(0)
        grads = zip((dq, dk, dv), (query, key, value), strict=True)
        return *(d.transpose(0, 1).unsqueeze(0).to(x.dtype) for d, x in grads), None, None, None


def _tokens_first(x: Tensor) -> Tensor:
    """`[1, H, T, D]` -> `[T, H, D]` in float32 (float64 stays); no copy where linear layers and RoPE made it so."""
    return x[0].transpose(0, 1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _by_head(x: Tensor, k: Tensor) -> Tensor:
    """`[T, K * G, D]` -> `[G, K, T, D]`: query heads that share keys lie in the batch dimension."""
    return x.unflatten(1, (k.shape[1], -1)).permute(2, 1, 0, 3)


class _Heads:
    """Views `[G, K, T, D]` (and `[G, K, T]`); keys and values are expanded over G without a copy."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        self.q, self.out = _by_head(q, k), _by_head(out, k)
        self.k, self.v = (x.transpose(0, 1).expand(len(self.q), -1, -1, -1) for x in (k, v))
        self.lse = lse.unflatten(0, (k.shape[1], -1)).transpose(0, 1)


def _gathered(batch: _Batch, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[B, H, Q, D]` and twice `[B, H, L, D]` of a batch, shared heads repeated."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x[batch.keys].repeat_interleave(shared, dim=2) if shared > 1 else x[batch.keys] for x in (k, v))
    return q[batch.queries].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _batch_backward(batch: _Batch, scale: float, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
    """Adds a batch's share to the gradients `[T, H, D]` and twice `[T, K, D]`."""
    g, q, k, v, out, lse = saved
    dq, dk, dv = grads
    above = (g[batch.queries] * batch.real[..., None, None]).transpose(1, 2)
    gq, gk, gv = _flash_backward(
        *(above, *_gathered(batch, q, k, v), out[batch.queries].transpose(1, 2)),
        *(lse[:, batch.queries].transpose(0, 1), 0.0, False),
        attn_mask=batch.mask.to(q.dtype),
        scale=scale,
    )
    dq[batch.tokens] = gq.transpose(1, 2)[batch.real]
    for d, part in ((dk, gk), (dv, gv)):
        by_key = part.transpose(1, 2).unflatten(2, (k.shape[1], -1)).sum(3)
        d.index_add_(0, batch.keys.flatten(), by_key.flatten(0, 1))
