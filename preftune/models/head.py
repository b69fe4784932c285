"""Per-token log-probabilities from hidden states, in chunks of tokens: no float32 (tokens, vocabulary) tensor is kept.

A score's gradient is linear in what comes from above, so softmax minus one-hot, times the weight, is made in the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

OUTPUTS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")

# Tokens at once and bytes of probabilities kept for the backward, by device type. Constants, never timing or free memory:
# chunk borders change the order of sums. On CPU a chunk should live in cache; on GPU small ones starve the matrix product.
_CHUNK_TOKENS = {"cpu": 128}
_CHUNK_TOKENS_OTHER = 2048
_KEEP_BYTES = 256 * 2**20


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
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits / self.temperature if self.temperature != 1.0 else logits


@dataclass(frozen=True)
class HeadOptions:
    """How the head computes.

    Attributes:
        outputs: Which of `OUTPUTS` to compute beside log-probabilities, in the order of the packed columns.
        transform: What happens to the logits before softmax.
        chunk_tokens: Tokens at once; None takes the device's constant.
        keep_bytes: Probabilities up to this size are kept for the weight gradient instead of being recomputed.
    """

    outputs: tuple[str, ...] = ()
    transform: LogitTransform = LogitTransform()
    chunk_tokens: int | None = None
    keep_bytes: int = _KEEP_BYTES

    def chunk(self, device: torch.device) -> int:
        return self.chunk_tokens or _CHUNK_TOKENS.get(device.type, _CHUNK_TOKENS_OTHER)


def scores_from_logits(logits_TV: Tensor, targets_T: Tensor, options: HeadOptions) -> Tensor:
    """`[T, 1 + outputs]` float32 columns (log-probability first), differentiable by autograd in the first one.

    The plain way, for heads that are not a bare linear layer and as the fallback from full logits.
    """
    z = options.transform(logits_TV.float())
    logps_TV = torch.log_softmax(z, dim=-1)
    columns = [logps_TV.gather(1, targets_T[:, None]).squeeze(1)]
    with torch.no_grad():
        for name in options.outputs:
            columns.append(_extra(name, z.detach(), logps_TV.detach(), targets_T))
    return torch.stack(columns, dim=1)


def _extra(name: str, z: Tensor, logps_TV: Tensor, targets_T: Tensor) -> Tensor:
    if name == "entropy":
        return -(logps_TV.exp() * logps_TV).sum(-1)
    if name == "mean_logits":
        return z.mean(-1)
    if name == "is_top1":
        return (z.argmax(-1) == targets_T).float()
    if name == "log_sum_sq_probs":
        return torch.logsumexp(2 * logps_TV, dim=-1)
    raise ValueError(f"unknown output {name!r}; known are {', '.join(OUTPUTS)}")


def generic_scores(
    logits_of: Callable[[Tensor], Tensor], hidden_TH: Tensor, targets_T: Tensor, options: HeadOptions
) -> Tensor:
    """Packed scores through any head module, chunk by chunk, each recomputed in the backward."""

    def one(hidden: Tensor, targets: Tensor) -> Tensor:
        return scores_from_logits(logits_of(hidden), targets, options)

    size = options.chunk(hidden_TH.device)
    chunks = zip(hidden_TH.split(size), targets_T.split(size), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(one, h, y, use_reentrant=False) for h, y in chunks]
    else:
        parts = [one(h, y) for h, y in chunks]
    return torch.cat(parts)  # pyright: ignore


def logit_scores(logits_TV: Tensor, targets_T: Tensor, options: HeadOptions) -> Tensor:
    """Packed scores from logits that already went through the family's own transform."""
    return generic_scores(lambda z: z, logits_TV, targets_T, options)


def linear_scores(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_T: Tensor, options: HeadOptions
) -> Tensor:
    """Packed scores `[T, 1 + outputs]` in float32 of `hidden @ weight.T + bias`; the matrix product respects autocast."""
    device_type = hidden_TH.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight_VH.dtype
    with torch.autocast(device_type, enabled=False):
        packed: Any = _LinearScores.apply(
            hidden_TH, weight_VH, bias_V, targets_T, options, dtype, torch.is_grad_enabled()
        )
    return packed


class _LinearScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, options, dtype, grad):  # noqa: ANN001
        h, w = hidden.detach().to(dtype), weight.detach().to(dtype)
        b = None if bias is None else bias.detach()
        rows, vocabulary = h.shape[0], w.shape[0]
        need_hidden = grad and ctx.needs_input_grad[0]
        need_weight = grad and (ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        kept = None
        if need_weight and rows * vocabulary * h.element_size() <= options.keep_bytes:
            kept = h.new_empty(rows, vocabulary)
        d_hidden = torch.empty_like(h) if need_hidden else None
        packed = h.new_empty(rows, 1 + len(options.outputs), dtype=torch.float32)
        step = options.chunk(h.device)
        for lo in range(0, rows, step):
            hi = min(lo + step, rows)
            z = _logits(h[lo:hi], w, b)
            y = targets[lo:hi, None]
            final = options.transform(z)
            logps = torch.log_softmax(final, dim=-1)
            packed[lo:hi, 0] = logps.gather(1, y).squeeze(1)
            for i, name in enumerate(options.outputs):
                packed[lo:hi, 1 + i] = _extra(name, final, logps, targets[lo:hi])
            if need_hidden or kept is not None:
                q = _residual(z, logps, y, options.transform).to(dtype)
                if d_hidden is not None:
                    torch.mm(q, w, out=d_hidden[lo:hi])
                if kept is not None:
                    kept[lo:hi] = q
        ctx.options, ctx.dtype, ctx.need_weight = options, dtype, need_weight
        ctx.save_for_backward(hidden, weight, bias, targets, d_hidden, kept)
        return packed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, targets, d_hidden, kept = ctx.saved_tensors
        g = grads[0][:, :1]
        options, dtype = ctx.options, ctx.dtype
        d_h = (d_hidden * -g).to(hidden.dtype) if ctx.needs_input_grad[0] else None
        d_w = d_b = None
        if ctx.needs_input_grad[1]:
            d_w = torch.zeros_like(weight, dtype=torch.float32)
        if ctx.needs_input_grad[2]:
            d_b = torch.zeros_like(bias, dtype=torch.float32)
        if ctx.need_weight:
            h = hidden.detach().to(dtype)
            w = None if kept is not None else weight.detach().to(dtype)
            b = None if bias is None else bias.detach()
            step = options.chunk(h.device) if kept is None else max(h.shape[0], 1)
            for lo in range(0, h.shape[0], step):
                hi = min(lo + step, h.shape[0])
                if kept is not None:
                    q = kept[lo:hi]
                else:
                    z = _logits(h[lo:hi], w, b)
                    logps = torch.log_softmax(options.transform(z), dim=-1)
                    q = _residual(z, logps, targets[lo:hi, None], options.transform).to(dtype)
                if d_w is not None:
                    d_w -= q.T @ (h[lo:hi] * g[lo:hi]).to(dtype)
                if d_b is not None:
                    d_b -= (q.float() * g[lo:hi]).sum(0)
        d_w = None if d_w is None else d_w.to(weight.dtype)
        d_b = None if d_b is None else d_b.to(bias.dtype)
        return d_h, d_w, d_b, None, None, None, None


def _logits(h: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    z = (h @ w.T).float()
    return z if bias is None else z + bias.float()


def _residual(z: Tensor, logps: Tensor, y: Tensor, transform: LogitTransform) -> Tensor:
    """Softmax minus one-hot, times the slope of the transform: minus the gradient of the log-probability to the logits."""
    q = logps.exp()
    q.scatter_add_(1, y, torch.full_like(y, -1, dtype=q.dtype))
    if transform.softcap is not None:
        q *= 1 - torch.tanh(z * (transform.scale / transform.softcap)) ** 2
    slope = transform.scale / transform.temperature
    return q * slope if slope != 1.0 else q
