"""Both layouts against the slow float64 loop, for every family: log-probabilities and gradients.

Each feature of attention that a layout could lose is also taken away, to show that losing it would be seen.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from preftune.models import attention
from preftune.models.logprobs import choose_layout, scoring, token_scores
from tests.unit.models.scoring_helpers import (
    double_copy,
    gradients,
    random_tree,
    slow_logps,
    weights_for,
    worst,
)

WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
TREE_FAMILIES = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("mistral", {}, id="mistral-window"),
    pytest.param("qwen2", {}, id="qwen2"),
    pytest.param("qwen2", WINDOWED, id="qwen2-window"),
    pytest.param("qwen3", {}, id="qwen3"),
    pytest.param("gemma2", {}, id="gemma2"),
    pytest.param("gemma3", {}, id="gemma3"),
    pytest.param("gpt2", {}, id="gpt2"),
    pytest.param("qwen3_moe", {}, id="qwen3-moe"),
    pytest.param("gpt_oss", {}, id="gpt-oss"),
]
PADDED_FAMILIES = [
    ("lfm2", "changing one branch changes the scores of another"),
    ("mamba", "takes no position_ids"),
]


def check(model, layout):
    tree = random_tree(model.config.vocab_size, masked=True)
    weights = weights_for(tree)
    scores = token_scores(model, tree, layout=layout)
    got = gradients(model, (scores.logps * weights).sum())
    twin = double_copy(model)
    expected = slow_logps(twin, tree)
    wanted = gradients(twin, (expected * weights).sum())
    assert (scores.logps.double() - expected).abs().max() < 1e-4
    assert worst(got, wanted) < 1e-4


@pytest.mark.parametrize(("family", "fields"), TREE_FAMILIES)
def test_tree_equals_slow_loop(tiny_model, family, fields):
    model = tiny_model(family, **fields)
    choice = choose_layout(model, "auto")
    assert choice.layout == "tree", choice.reason
    check(model, "tree")


@pytest.mark.parametrize(("family", "fields"), TREE_FAMILIES)
def test_padded_equals_slow_loop(tiny_model, family, fields):
    check(tiny_model(family, attn_implementation="eager", **fields), "padded")


@pytest.mark.parametrize(("family", "reason"), PADDED_FAMILIES)
def test_falls_back_to_padded(tiny_model, family, reason):
    model = tiny_model(family)
    choice = choose_layout(model, "auto")
    assert choice.layout == "padded"
    assert reason in choice.reason
    check(model, "padded")


def test_unions_of_trees_do_not_interact(tiny_model):
    """A tree of four prompts gives each the scores that it has alone."""
    model = tiny_model("llama")
    together = random_tree(model.config.vocab_size)
    with torch.no_grad():
        whole = token_scores(model, together, layout="tree").branch_logps
        swapped = dataclasses.replace(together, input_ids=together.input_ids.clone())
        swapped.input_ids[:21] = 5
        other = token_scores(model, swapped, layout="tree").branch_logps
    assert torch.allclose(whole[2:], other[2:], atol=1e-5)
    assert (whole[:2] - other[:2]).abs().min() > 1e-2


# --- that a loss would be seen ----------------------------------------------------------------------------------------


def scores_without(monkeypatch, model, tree, name, **lost):
    """Scores in the tree layout with arguments of one attention path replaced."""
    path = getattr(attention, name)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(attention, name, lambda *args, **keywords: path(*args, **{**keywords, **lost}))
        return token_scores(model, tree, layout="tree").logps


@pytest.mark.parametrize(
    ("family", "path", "lost"),
    [
        ("gemma2", "eager_attention", {"softcap": None}),
        ("gemma2", "eager_attention", {"window": None}),
        ("gpt_oss", "eager_attention", {"sinks": None}),
        ("gpt_oss", "eager_attention", {"window": None}),
        ("gemma3", "sdpa_attention", {"window": None}),
        ("mistral", "sdpa_attention", {"window": None}),
    ],
)
def test_losing_a_feature_would_be_seen(tiny_model, monkeypatch, family, path, lost):
    model = tiny_model(family)
    tree = random_tree(model.config.vocab_size)
    with torch.no_grad():
        right = token_scores(model, tree, layout="tree").logps
    wrong = scores_without(monkeypatch, model, tree, path, **lost)
    assert (right - wrong).abs().max() > 1e-2


def test_losing_the_final_softcap_would_be_seen(tiny_model):
    model = tiny_model("gemma2")
    tree = random_tree(model.config.vocab_size)
    with torch.no_grad():
        right = token_scores(model, tree, layout="tree").logps
        model.config.final_logit_softcapping = 1e6
        wrong = token_scores(tiny_model("gemma2", final_logit_softcapping=1e6), tree, layout="tree").logps
    assert (right - wrong).abs().max() > 1e-2


@pytest.mark.parametrize(("family", "fields"), TREE_FAMILIES)
def test_losing_the_prompt_would_be_seen(tiny_model, family, fields):
    model = tiny_model(family, **fields)
    tree = random_tree(model.config.vocab_size, [(9, (7, 5))])
    cut = dataclasses.replace(tree, layout=((9, (7,)), (0, (5,))))
    with torch.no_grad(), scoring(model, "tree"):
        right = token_scores(model, tree, layout="tree").logps
        wrong = token_scores(model, cut, layout="tree").logps
    assert torch.allclose(right[:7], wrong[:7], atol=1e-5)
    assert (right[8:] - wrong[8:]).abs().max() > 1e-2
