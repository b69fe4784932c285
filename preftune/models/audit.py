"""Compares the mask that a model makes for each attention layer with the window it hands to its attention function.

Windows and chunks are longer than any probe, so masks are compared as rules, evaluated far out, not by their effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from preftune.data.tree import build_tree
from preftune.models import structure
from preftune.models.attention import attention_function

_AUDIT = "preftune_audit"

# What an attention function may be given beside q, k, v and mask without a change of who sees whom.
_HARMLESS = {
    *("dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "cache_position", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "deterministic", "is_causal"),
    *("labels", "past_key_values", "cache", "logits_to_keep", "position_embeddings"),
}


class _Audit:
    """Attention and mask function of one model call."""

    def __init__(self) -> None:
        self.rules: dict[int, tuple[Tensor, Callable]] = {}
        self.calls = 0
        self.obstacle: str | None = None

    def make_mask(self, *args: Any, **keywords: Any) -> Tensor | None:
        keywords["allow_is_causal_skip"] = False
        mask = sdpa_mask(*args, **keywords)
        if mask is not None:
            self.rules[id(mask)] = (mask, keywords["mask_function"])
        return mask

    def attend(self, module: nn.Module, query, key, value, attention_mask, **keywords: Any) -> Any:
        self.calls += 1
        self.obstacle = self.obstacle or self._check(attention_mask, keywords)
        known = {k: v for k, v in keywords.items() if k in ("dropout", "scaling")}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **known)

    def _check(self, mask: Tensor | None, keywords: dict[str, Any]) -> str | None:
        odd = sorted(k for k, v in keywords.items() if v is not None and k not in _HARMLESS)
        if odd or keywords.get("is_causal") is False:
            return f"its attention also depends on {', '.join(odd) or 'is_causal=False'}"
        window = keywords.get("sliding_window")
        if mask is None:
            return None if window is None else "it has a sliding window but makes no mask for it"
        rule = self.rules.get(id(mask), (None, None))[1]
        if rule is None or not _is_causal_window(rule, window, mask.device):
            return f"its mask is not causal with the window it names ({window}): chunked or other attention"
        return None


def _is_causal_window(rule: Callable, window: int | None, device: torch.device) -> bool:
    """Evaluates a mask rule far beyond any sequence: windows and chunks of any size show."""
    near = {w for w in (1, 2, 64, 1000, window or 7) for w in (w - 1, w, w + 1)}
    q = torch.tensor(sorted({*near, 4095, 4096, 4097, 8191, 8192, 16384, 10**5, 10**6}), device=device)
    back = torch.tensor(sorted({*near, 0, 4095, 4096, 8192, 10**5}), device=device)
    q, back = q[:, None], back[None, :]
    k = (q - back).clamp_min(0)
    k = torch.cat([k, q + 1], dim=1)
    expected = (k <= q) & (q - k < (window or 2**62))
    zero = torch.zeros((), dtype=torch.long, device=device)
    seen = rule(zero, zero, q, k)
    return torch.equal(torch.as_tensor(seen, device=device).expand_as(expected), expected)


_audits: list[_Audit] = []


def _audit_attention(*args: Any, **keywords: Any) -> Any:
    return _audits[-1].attend(*args, **keywords)


def _audit_mask(*args: Any, **keywords: Any) -> Tensor | None:
    return _audits[-1].make_mask(*args, **keywords)


AttentionInterface.register(_AUDIT, _audit_attention)
AttentionMaskInterface.register(_AUDIT, _audit_mask)


def mask_obstacle(model: nn.Module) -> str | None:
    """Why the tree layout would not see what the model's own masks let it see, or None."""
    audit = _Audit()
    tree = build_tree([[0, 0]], [[[0, 0]]]).to(structure.input_device(model))
    _audits.append(audit)
    try:
        with attention_function(model, _AUDIT):
            model(input_ids=tree.input_ids[None], use_cache=False)
    finally:
        _audits.remove(audit)
    if not audit.calls:
        return "its attention layers do not call the function set on its config"
    return audit.obstacle
