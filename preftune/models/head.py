"""Per-token log-probabilities from hidden states, in chunks of tokens: no float32 (tokens, vocabulary) tensor is kept.

The gradient of a log-probability is linear in what comes from above: most of it is made while the logits are at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

OUTPUTS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
_NEED_PROBS = {"entropy", "log_sum_sq_probs"}


@dataclass(frozen=True)
class HeadSizes:
    """Constants by device type, never timing or free memory: chunk borders change the order of sums.

    Attributes:
        chunk_bytes: Logits of one matrix product; small ones starve it, on GPU above all.
        block_bytes: Float32 logits that go through softmax at once; on CPU they should stay in the second-level cache.
        keep_bytes: Probabilities up to this size are kept for the weight's gradient instead of being made again.
    """

    chunk_bytes: int = 2**30
    block_bytes: int = 2**30
    keep_bytes: int = 2**29

    def chunk(self, vocabulary: int, dtype: torch.dtype) -> int:
        """Tokens of one matrix product."""
        return max(64, self.chunk_bytes // (vocabulary * dtype.itemsize) // 64 * 64)

    def block(self, vocabulary: int) -> int:
        """Tokens that go through softmax at once."""
        return max(1, self.block_bytes // (vocabulary * 4))


_SIZES = {"cpu": HeadSizes(chunk_bytes=2**26, block_bytes=3 * 2**19)}


def sizes_for(device_type: str) -> HeadSizes:
    return _SIZES.get(device_type, HeadSizes())


@dataclass(frozen=True)
class LogitTransform:
    """What happens to the head's output before softmax: `cap * tanh(scale * z / cap) / temperature`.

    Attributes:
        scale: Factor of the family (Cohere, Granite and others).
        softcap: Final soft-cap of the family (Gemma), or None.
        temperature: Sampling temperature; divides last.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        if self.softcap is not None:
            return torch.tanh(logits * (self.scale / self.softcap)) * (self.softcap / self.temperature)
        return logits * self.slope if self.slope != 1.0 else logits

    @property
    def slope(self) -> float:
        """Derivative at zero; with no soft-cap, everywhere."""
        return self.scale / self.temperature


@dataclass(frozen=True)
class HeadOptions:
    """What the head computes.

    Attributes:
        outputs: Which of `OUTPUTS` to compute beside log-probabilities, in the order of the packed columns.
        transform: What happens to the logits before softmax.
        sizes: None takes the constants of the device.
        entropy_has_grad: Whether the entropy carries a gradient too; any head but not the linear one does that.
        float32_head: The product of hidden states and weight is float32, whatever their types and autocast.
    """

    outputs: tuple[str, ...] = ()
    transform: LogitTransform = LogitTransform()
    sizes: HeadSizes | None = None
    entropy_has_grad: bool = False
    float32_head: bool = False

    def sizes_on(self, device: torch.device) -> HeadSizes:
        return self.sizes or sizes_for(device.type)


# --- any head ---------------------------------------------------------------------------------------------------------


def scores_from_logits(
    logits_TV: Float[Tensor, "T V"], targets_T: Int[Tensor, " T"], options: HeadOptions
) -> Float[Tensor, "T k"]:
    """Packed float32 columns: log-probability (with gradient), then `options.outputs` (without, as `options` say)."""
    z = options.transform(logits_TV.float())
    logps_TV = torch.log_softmax(z, dim=-1)
    columns = [logps_TV.gather(1, targets_T[:, None]).squeeze(1)]
    with torch.no_grad():
        probs_TV = logps_TV.exp() if _NEED_PROBS & set(options.outputs) else None
        for name in options.outputs:
            columns.append(_output(name, z.detach(), logps_TV.detach(), probs_TV, targets_T))
    if options.entropy_has_grad and "entropy" in options.outputs:
        columns[1 + options.outputs.index("entropy")] = -(logps_TV.exp() * logps_TV).sum(-1)
    return torch.stack(columns, dim=1)


def generic_scores(
    logits_of: Callable[[Tensor], Tensor],
    hidden_TH: Float[Tensor, "T H"],
    targets_T: Int[Tensor, " T"],
    vocabulary: int,
    options: HeadOptions,
) -> Float[Tensor, "T k"]:
    """Packed scores through any head, chunk by chunk, each run again in the backward (adapters, quantised heads)."""

    def one(hidden: Tensor, at: slice) -> Tensor:
        return scores_from_logits(logits_of(hidden), targets_T[at], options)

    return in_chunks(one, hidden_TH, vocabulary, options.sizes_on(hidden_TH.device))


def in_chunks(
    columns_of: Callable[[Tensor, slice], Tensor],
    hidden_TH: Float[Tensor, "T H"],
    vocabulary: int,
    sizes: HeadSizes | None = None,
) -> Float[Tensor, "T k"]:
    """`columns_of(hidden states, which tokens they are of)` chunk by chunk, each run again in the backward."""
    sizes = sizes or sizes_for(hidden_TH.device.type)
    size = sizes.chunk(vocabulary, torch.float32)
    chunks = [(h, slice(n * size, n * size + len(h))) for n, h in enumerate(hidden_TH.split(size))]
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(columns_of, h, at, use_reentrant=False) for h, at in chunks])  # pyright: ignore
    return torch.cat([columns_of(h, at) for h, at in chunks])


def _output(name: str, z: Tensor, logps_TV: Tensor, probs_TV: Tensor | None, targets_T: Tensor) -> Tensor:
    if name == "mean_logits":
        return z.mean(-1)
    if name == "is_top1":
        return _is_top1(logps_TV, targets_T)
    assert probs_TV is not None, name
    if name == "entropy":
        return -torch.linalg.vecdot(probs_TV, logps_TV)
    assert name == "log_sum_sq_probs", name
    return torch.linalg.vecdot(probs_TV, probs_TV).log()


def _is_top1(logps_TV: Tensor, targets_T: Tensor) -> Tensor:
    """1.0 where the target is the first argmax. On CPU argmax costs ten times a maximum, so only ties pay for it."""
    if logps_TV.device.type != "cpu":
        return (logps_TV.argmax(-1) == targets_T).float()
    column = targets_T[:, None]
    own = logps_TV.gather(1, column)
    logps_TV.scatter_(1, column, float("-inf"))
    others = logps_TV.amax(-1, keepdim=True)
    logps_TV.scatter_(1, column, own)
    top = (own > others).squeeze(1)
    ties = (own == others).squeeze(1).nonzero().squeeze(1)
    if len(ties):
        top[ties] = logps_TV[ties].argmax(-1) == targets_T[ties]
    return top.float()


# --- a linear head ----------------------------------------------------------------------------------------------------


def linear_scores(
    hidden_TH: Float[Tensor, "T H"],
    weight_VH: Float[Tensor, "V H"],
    bias_V: Float[Tensor, " V"] | None,
    targets_T: Int[Tensor, " T"],
    options: HeadOptions,
) -> Float[Tensor, "T k"]:
    """Packed scores of `hidden @ weight.T + bias`; the matrix products respect autocast, softmax is float32.

    With `options.float32_head` a weight of another type is copied in float32 for the time of this call (and once more
    in the backward, where residuals are made again): every chunk of tokens needs all of it.
    """
    device_type = hidden_TH.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight_VH.dtype
    if options.float32_head:
        dtype = torch.promote_types(weight_VH.dtype, torch.float32)
    with torch.autocast(device_type, enabled=False):
        packed: Any = _LinearScores.apply(
            hidden_TH, weight_VH, bias_V, targets_T, options, dtype, torch.is_grad_enabled()
        )
    return packed


def float32_linear(
    hidden: Float[Tensor, "... H"], weight_VH: Float[Tensor, "V H"], bias_V: Float[Tensor, " V"] | None
) -> Float[Tensor, "... V"]:
    """`hidden @ weight.T + bias` in float32 (float64 stays), whatever their types and autocast."""
    with torch.autocast(hidden.device.type, enabled=False):
        dtype = torch.promote_types(weight_VH.dtype, torch.float32)
        return F.linear(hidden.to(dtype), weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype))


class _LinearScores(torch.autograd.Function):
    """With r = (softmax - one-hot) * slope of the transform, d logp / d hidden = -r @ W and d logp / d W = -r^T hidden.

    The first is made in the forward. For the second, r is kept where it is small, else made again.
    """

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, options, dtype, grad):
        linear = _Linear(hidden, weight, bias, targets, options, dtype)
        need_hidden, need_weight, need_bias = (grad and need for need in ctx.needs_input_grad[:3])
        need_weight = need_weight or need_bias
        keep = need_weight and linear.rows * linear.vocabulary * dtype.itemsize <= linear.sizes.keep_bytes
        kept = linear.logit_buffer(linear.rows) if keep else None
        packed = linear.h.new_empty(linear.rows, 1 + len(options.outputs), dtype=torch.float32)
        d_hidden = torch.empty_like(linear.h) if need_hidden else None
        for at, r in linear.chunks(packed, kept, residual=need_hidden or keep):
            if d_hidden is not None:
                torch.mm(r, linear.w, out=d_hidden[at])
        ctx.options, ctx.dtype = options, dtype
        ctx.save_for_backward(hidden, weight, bias, targets, d_hidden, kept)
        ctx.need_weight = need_weight
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):
        hidden, weight, bias, targets, d_hidden, kept = ctx.saved_tensors
        minus_g = -grad[:, :1]
        d_h = None if d_hidden is None else (d_hidden * minus_g).to(hidden.dtype)
        if not ctx.need_weight:
            return d_h, None, None, None, None, None, None
        need_weight, need_bias = ctx.needs_input_grad[1:3]
        scaled = (hidden.detach() * minus_g).to(ctx.dtype)
        if kept is not None:
            parts: Iterator[tuple[slice, Tensor]] = iter([(slice(0, len(kept)), kept)])
        else:
            parts = _Linear(hidden, weight, bias, targets, ctx.options, ctx.dtype).chunks(None, None, residual=True)
        d_w = d_b = None
        for at, r in parts:
            if need_weight:
                d_w = _accumulate(d_w, r, scaled[at])
            if need_bias:
                part = r.T.float() @ minus_g[at, 0]
                d_b = part if d_b is None else d_b + part
        d_w = d_w.to(weight.dtype) if d_w is not None else torch.zeros_like(weight) if need_weight else None
        d_b = d_b.to(bias.dtype) if d_b is not None else torch.zeros_like(bias) if need_bias else None
        return d_h, d_w, d_b, None, None, None, None


def _accumulate(total: Tensor | None, r: Tensor, hidden: Tensor) -> Tensor:
    """`total + r.T @ hidden` in float32 (float64 stays)."""
    if total is None:
        product = r.T @ hidden
        return product.float() if product.dtype.itemsize < 4 else product
    return total.addmm_(r.T, hidden) if total.dtype == r.dtype else total.add_(r.T @ hidden)


class _Linear:
    """The chunk loop of a linear head, the same in forward and recomputation."""

    def __init__(self, hidden, weight, bias, targets, options: HeadOptions, dtype: torch.dtype) -> None:
        self.h, self.w = hidden.detach().to(dtype), weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().float()
        self.targets, self.options = targets, options
        self.rows, self.vocabulary = self.h.shape[0], self.w.shape[0]
        self.sizes = options.sizes_on(self.h.device)
        self.soft_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def logit_buffer(self, rows: int) -> Tensor:
        return self.h.new_empty(rows, self.vocabulary)

    def chunks(self, packed: Tensor | None, kept: Tensor | None, *, residual: bool) -> Iterator[tuple[slice, Tensor]]:
        """Fills `packed` and yields each chunk and, in the memory of its logits, its residual r if asked for."""
        size = self.sizes.chunk(self.vocabulary, self.h.dtype)
        buffer = self.logit_buffer(min(size, self.rows)) if kept is None else kept
        block = self.sizes.block(self.vocabulary)
        soft = None
        if buffer.dtype != self.soft_dtype:
            soft = buffer.new_empty(block, self.vocabulary, dtype=self.soft_dtype)
        for lo in range(0, self.rows, size):
            hi = min(lo + size, self.rows)
            z = buffer[: hi - lo] if kept is None else kept[lo:hi]
            torch.mm(self.h[lo:hi], self.w.T, out=z)
            for a in range(lo, hi, block):
                b = min(a + block, hi)
                rows = z[a - lo : b - lo]
                f = rows if soft is None else soft[: b - a].copy_(rows)
                self._block(f, self.targets[a:b], None if packed is None else packed[a:b], residual)
                if residual and soft is not None:
                    rows.copy_(f)
            yield slice(lo, hi), z

    def _block(self, f: Tensor, targets: Tensor, packed: Tensor | None, residual: bool) -> None:
        """Logits in `f` become log-probabilities, then residuals, in place."""
        transform, outputs = self.options.transform, () if packed is None else self.options.outputs
        if self.bias is not None:
            f += self.bias
        bend = None
        if transform.softcap is not None:
            f.mul_(transform.scale / transform.softcap).tanh_()
            bend = 1 - f.square() if residual else None
            f.mul_(transform.softcap / transform.temperature)
        elif transform.slope != 1.0:
            f.mul_(transform.slope)
        mean = f.mean(-1) if "mean_logits" in outputs else None
        torch.log_softmax(f, dim=-1, out=f)
        column = targets[:, None]
        if packed is not None:
            packed[:, 0] = f.gather(1, column).squeeze(1)
        probs = f.exp() if _NEED_PROBS & set(outputs) else None
        for i, name in enumerate(outputs, start=1):
            assert packed is not None
            value = mean if name == "mean_logits" else _output(name, f, f, probs, targets)
            packed[:, i] = value  # pyright: ignore - filled above where it is asked for
        if residual:
            f = torch.exp(f, out=f) if probs is None else f.copy_(probs)
            f.scatter_add_(1, column, f.new_full(column.shape, -1.0))
            if bend is not None:
                f.mul_(bend)
            if transform.slope != 1.0:
                f.mul_(transform.slope)
