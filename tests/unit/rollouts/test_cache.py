"""The growing cache shows the model what transformers' own dynamic cache shows it, also after growing and dropping.

Both caches run side by side on the same model; the buffers are made to grow every two tokens.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from preftune.rollouts import cache as cache_module
from preftune.rollouts.cache import LayerStates, Prefilled, cache_obstacle, keep_rows, shared_cache, taken


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("length", [3, 5, 6, 11])  # the window is 6
def test_same_logits_as_a_dynamic_cache(tiny_model, family, length, monkeypatch):
    monkeypatch.setattr(cache_module, "_CHUNK", 2)
    model = tiny_model(family)
    prompts = torch.randint(3, 320, (2, length), generator=torch.Generator().manual_seed(length))
    steps = torch.randint(3, 320, (4, 9), generator=torch.Generator().manual_seed(1))
    theirs, prefill = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompts.repeat_interleave(2, 0), cache=theirs, use_cache=True)
        model(prompts, cache=prefill, use_cache=True)
        ours = shared_cache([Prefilled(taken(prefill), [(0, 2), (2, 4)], [length] * 2)], width=length, limit=length + 9)
        for step, tokens in enumerate(steps.T):
            if step == 4:
                rows = torch.tensor([0, 3])
                keep_rows(ours, rows)
                theirs.batch_select_indices(rows)
            if step >= 4:
                tokens = tokens[[0, 3]]
            a = model(tokens[:, None], cache=ours, use_cache=True).logits
            b = model(tokens[:, None], cache=theirs, use_cache=True).logits
            assert (a - b).abs().max() < 1e-5
            assert ours.get_seq_length() == theirs.get_seq_length() == length + step + 1
            for x, y in zip(ours.layers, theirs.layers, strict=True):
                assert x.get_mask_sizes(1) == y.get_mask_sizes(1)


def test_rows_of_a_prompt_are_written_once_and_padding_is_zero():
    def prefilled(lengths, rows, value):
        states = torch.full((len(lengths), 1, max(lengths), 2), float(value))
        return Prefilled([LayerStates(states, states, None)], rows, lengths)

    groups = [prefilled([1, 2], [(0, 2), (2, 3)], 1), prefilled([4], [(3, 6)], 2)]
    (layer,) = shared_cache(groups, width=4, limit=6).layers
    assert layer.keys.shape == (6, 1, 6, 2)
    assert layer.values[:, 0, :4, 0].tolist() == [[0, 0, 0, 1]] * 2 + [[0, 0, 1, 1]] + [[2, 2, 2, 2]] * 3
    assert groups[0].layers == []


@pytest.mark.parametrize(("family", "shared"), [("llama", True), ("gemma3", True), ("lfm2", False)])
def test_obstacle(tiny_model, family, shared):
    reason = cache_obstacle(tiny_model(family).config)
    assert (reason is None) == shared
