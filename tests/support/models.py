"""Random models of two layers, one per family, small enough for a unit test and sharp enough to prove something.

Weights are drawn with a standard deviation of 0.25, so that attention is far from uniform and leaving out a window, a
sink or a soft-cap moves log-probabilities visibly; the library's default of 0.02 would hide all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from tests.support.tokenizers import VOCAB_SIZE

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ONE_WINDOWED_LAYER = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "use_sliding_window": False},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
        **_ONE_WINDOWED_LAYER,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
        **_ONE_WINDOWED_LAYER,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_inner": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, **_EXPERTS},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "max_position_embeddings": 131072,  # YaRN stretches an original length of 4096
        **_EXPERTS,
        **_ONE_WINDOWED_LAYER,
    },
    "mamba": {"model_type": "mamba", "state_size": 8, "expand": 2, "conv_kernel": 4, "time_step_rank": 4},
    # Attention through the common interface beside a short convolution: flags say "tree", only a probe says no.
    "lfm2": {
        "model_type": "lfm2",
        "conv_L_cache": 3,
        "block_multiple_of": 16,
        "layer_types": ["conv", "full_attention"],
    },
}
_NO_GROUPED_HEADS = frozenset({"num_key_value_heads", "attention_dropout"})
_FOREIGN: dict[str, frozenset[str]] = {
    "gpt2": _NO_GROUPED_HEADS | {"intermediate_size"},
    "mamba": _NO_GROUPED_HEADS | {"intermediate_size", "num_attention_heads", "max_position_embeddings"},
    "lfm2": frozenset({"attention_dropout"}),
}
_AUTO_CLASSES = {"causal": AutoModelForCausalLM, "value": AutoModelForSequenceClassification}


def tiny_config(family: str = "llama", **overrides: Any):
    """The config of a tiny model; `overrides` are fields of that family's config."""
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}; wanted one of {sorted(FAMILIES)}")
    common = {k: v for k, v in _COMMON.items() if k not in _FOREIGN.get(family, frozenset())}
    return AutoConfig.for_model(**{**common, **FAMILIES[family], **overrides})


def tiny_model(
    family: str = "llama",
    *,
    seed: int = 0,
    head: str = "causal",
    attn_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """A fresh random model in eval mode; the global random state stays as it was.

    Args:
        family: A key of `FAMILIES`.
        seed: Equal seeds give equal weights, whatever ran before.
        head: "causal" (logits over the vocabulary) or "value" (a scalar: sequence classification with one label).
        attn_implementation: "sdpa", "eager", ...; None takes what transformers prefers.
        dtype: Of all weights.
        **overrides: Fields of the family's config, such as `num_hidden_layers=1`.
    """
    if head == "value":
        overrides = {"num_labels": 1, **overrides}
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _AUTO_CLASSES[head].from_config(config, attn_implementation=attn_implementation, dtype=dtype)
        _randomise_constants(model)
    return model.eval()


@torch.no_grad()
def _randomise_constants(model: PreTrainedModel) -> None:
    """Norm weights and biases start at 0 or 1; noise makes a mix-up of two of them visible."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter.dtype))
