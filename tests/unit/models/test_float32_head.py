"""The head's product in float32 under bfloat16 weights and autocast, against a float64 product of the same inputs.

Without the option the same numbers are off by more than 1e-3: each test shows that too, so that it could fail.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from preftune.data.tree import build_tree
from preftune.errors import ConfigError
from preftune.models.float32_head import check_float32_head, head_in_float32
from preftune.models.head import HeadOptions, LogitTransform, linear_scores
from preftune.models.logprobs import token_scores
from preftune.models.reference import DisabledAdapter, FrozenCopy, ReferenceAdapter
from preftune.rollouts.local import LocalBackend
from preftune.types import Sampling
from tests.unit.models.reference_helpers import lora_policy
from tests.unit.models.scoring_helpers import random_tree, weights_for
from tests.unit.models.test_head import KEPT, RECOMPUTED, case, grads, slow
from tests.unit.models.test_probe import with_forward

FEW_BITS = [torch.bfloat16, torch.float16]


def off_by(got: Tensor, wanted: Tensor) -> float:
    return (got.detach().double() - wanted.detach().double()).abs().max().item()


def rounded_alike(got: Tensor, exact: Tensor) -> bool:
    """Whether a gradient is the exact one rounded to its type; seldom off, and then by the last place."""
    if got.dtype == torch.float32:
        return torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-5)
    wanted = exact.to(got.dtype)
    near = torch.allclose(got.double(), wanted.double(), rtol=2 * torch.finfo(got.dtype).eps, atol=1e-6)
    return near and (got == wanted).double().mean().item() > 0.9


# --- the product ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FEW_BITS)
@pytest.mark.parametrize("sizes", [KEPT, RECOMPUTED], ids=["kept", "recomputed"])
def test_weights_of_few_bits(dtype, sizes):
    hidden, weight, bias, targets, above = case(dtype)
    transform = LogitTransform(scale=0.5, softcap=4.0, temperature=0.5)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    wanted = slow(*exact, targets, transform)
    exact_grads = grads((wanted["logps"] * above).sum(), *exact)

    def run(float32_head: bool):
        options = HeadOptions(("entropy", "mean_logits"), transform, sizes, float32_head=float32_head)
        packed = linear_scores(hidden, weight, bias, targets, options)
        return packed, grads((packed[:, 0] * above).sum(), hidden, weight, bias)

    packed, got = run(True)
    for column, name in zip(packed.unbind(1), ("logps", "entropy", "mean_logits"), strict=True):
        assert off_by(column, wanted[name]) < 1e-5, name
    assert all(g.dtype == dtype and rounded_alike(g, w) for g, w in zip(got, exact_grads, strict=True))
    plain, coarse = run(False)
    assert off_by(plain[:, 0], wanted["logps"]) > (1e-3 if dtype == torch.bfloat16 else 1e-4)
    assert not any(rounded_alike(g, w) for g, w in zip(coarse[:2], exact_grads[:2], strict=True))


@pytest.mark.parametrize("sizes", [KEPT, RECOMPUTED], ids=["kept", "recomputed"])
def test_autocast_is_passed_by(sizes):
    hidden, weight, bias, targets, above = case()
    wanted = slow(hidden, weight, bias, targets, LogitTransform())
    exact = grads((wanted["logps"] * above).sum(), hidden, weight, bias)
    for float32_head in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            packed = linear_scores(hidden, weight, bias, targets, HeadOptions(sizes=sizes, float32_head=float32_head))
        error = off_by(packed[:, 0], wanted["logps"])
        assert error < 1e-5 if float32_head else error > 1e-3
    got = grads((packed[:, 0] * above).sum(), hidden, weight, bias)
    assert max(off_by(g, w) for g, w in zip(got, exact, strict=True)) > 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        packed = linear_scores(hidden, weight, bias, targets, HeadOptions(sizes=sizes, float32_head=True))
    got = grads((packed[:, 0] * above).sum(), hidden, weight, bias)
    assert max(off_by(g, w) for g, w in zip(got, exact, strict=True)) < 1e-5


def test_float64_stays():
    hidden, weight, bias, targets, above = case(torch.float64)
    packed = linear_scores(hidden, weight, bias, targets, HeadOptions(float32_head=True))
    wanted = slow(hidden, weight, bias, targets, LogitTransform())
    got = grads((packed[:, 0] * above).sum(), hidden, weight)
    exact = grads((wanted["logps"] * above).sum(), hidden, weight)
    assert max(off_by(g, w) for g, w in zip(got, exact, strict=True)) < 1e-12


# --- whole models -----------------------------------------------------------------------------------------------------


def with_exact(model, score):
    """`score(model)`, and log-probs and entropy in float64 of the hidden states that the head was given and its weight.

    The hidden states are those of the tree layout; they and the weight are leaves of the exact numbers' graph.
    """
    head, seen = model.get_output_embeddings(), []
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        scores = score()
    finally:
        handle.remove()
    states = seen[-1]  # before it the model may have been probed
    hidden = states.detach()[0].double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    return scores, states, hidden, weight


def exact_scores(model, tree, hidden, weight, temperature):
    logits = hidden[tree.predict_index] @ weight.T
    cap = model.config.get_text_config().to_dict().get("final_logit_softcapping")
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
    logps = torch.log_softmax(logits, -1)
    return logps.gather(1, tree.target_ids[:, None]).squeeze(1), -(logps.exp() * logps).sum(-1)


SETTINGS = {
    "bfloat16": (torch.bfloat16, nullcontext),
    "bfloat16 under autocast": (torch.bfloat16, lambda: torch.autocast("cpu", torch.bfloat16)),
    "float32 under autocast": (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("entropy_has_grad", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scores_and_gradients(tiny_model, family, setting, entropy_has_grad):
    """Untied and tied weights, with a soft-cap; with a gradient in the entropy the other path through the head."""
    dtype, casting = SETTINGS[setting]
    model = tiny_model(family, dtype=dtype)
    # one branch a prompt: gradients of hidden states that predict several tokens are added up in their own type
    tree = random_tree(model.config.vocab_size, [(9, (7,)), (0, (6,)), (3, (12,))])
    above = weights_for(tree).float()

    def score(float32_head):
        options = {"temperature": 0.8, "outputs": {"entropy"}, "entropy_has_grad": entropy_has_grad}
        with casting():
            return token_scores(model, tree, layout="tree", float32_head=float32_head, **options)

    def objective(logps, entropy):
        return ((logps + entropy * entropy_has_grad) * above).sum()

    scores, states, hidden, weight = with_exact(model, lambda: score(True))
    wanted = exact_scores(model, tree, hidden, weight, 0.8)
    assert off_by(scores.logps, wanted[0]) < 1e-5
    assert off_by(scores.entropy, wanted[1]) < 1e-5
    exact = torch.autograd.grad(objective(*wanted), [hidden, weight])
    got = torch.autograd.grad(
        objective(scores.logps, scores.entropy), [states] + [model.lm_head.weight] * (family == "llama")
    )
    assert got[0].dtype == states.dtype
    assert rounded_alike(got[0][0], exact[0])
    if family == "llama":  # else the embedding's part is in it
        assert got[1].dtype == dtype
        assert rounded_alike(got[1], exact[1])
    plain, _, hidden, weight = with_exact(model, lambda: score(False))
    assert off_by(plain.logps, exact_scores(model, tree, hidden, weight, 0.8)[0]) > 1e-3


@pytest.mark.parametrize("form", ["frozen copy", "disabled adapter", "reference adapter"])
def test_references(tiny_model, form):
    if form == "frozen copy":
        policy = tiny_model(dtype=torch.bfloat16)
        reference = FrozenCopy.of(policy)
        scored = reference.module
    else:
        policy = scored = lora_policy(nonzero=True, dtype=torch.bfloat16)
        reference = DisabledAdapter() if form == "disabled adapter" else ReferenceAdapter(policy)
    tree = random_tree(policy.config.vocab_size)
    for float32_head in (True, False):
        score = partial(reference.token_scores, policy, tree, layout="tree", float32_head=float32_head)
        scores, _, hidden, weight = with_exact(scored, score)
        assert not scores.logps.requires_grad
        error = off_by(scores.logps, exact_scores(scored, tree, hidden, weight, 1.0)[0])
        assert error < 1e-5 if float32_head else error > 1e-3


# --- the policy's own forward -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_own_forward(tiny_model, family):
    """The logits are the float64 product of the head's inputs, and everything is as before afterwards."""
    model = tiny_model(family, dtype=torch.bfloat16)
    ids = torch.arange(3, 40)[None]
    seen = []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        before = model(ids).logits
        with head_in_float32(model):
            logits = model(ids).logits
            twin = copy.deepcopy(model)
        after, copied = model(ids).logits, twin(ids).logits
    wanted = seen[1].double() @ model.lm_head.weight.double().T
    wanted = wanted if family == "llama" else 3.0 * torch.tanh(wanted / 3.0)
    assert off_by(logits, wanted) < 1e-5
    assert off_by(before, wanted) > 1e-3
    assert torch.equal(before, after) and torch.equal(before, copied)
    assert "forward" not in vars(model.lm_head)


def test_sampler_and_trainer_agree(tiny_model):
    """Behind layers in float32 a head in bfloat16 is all that they could differ in."""
    model = tiny_model()
    check_float32_head(model)  # probes it while its own forward still runs
    model.lm_head.to(torch.bfloat16)
    prompts, sampling = [[5, 6, 7], [8, 9]], Sampling(max_new_tokens=12, seed=1)
    with head_in_float32(model):
        drawn = LocalBackend(model).generate(prompts, 3, sampling, stream=[(0, 0, 0, 0), (0, 0, 1, 0)])
    tree = build_tree(prompts, [drawn.completion_ids[:3], drawn.completion_ids[3:]])
    sampler = torch.tensor([logp for row in drawn.logps for logp in row])
    with torch.no_grad():
        assert off_by(token_scores(model, tree, layout="tree", float32_head=True).logps, sampler) < 1e-4
        assert off_by(token_scores(model, tree, layout="tree").logps, sampler) > 1e-3


def test_own_forward_in_float32_is_left_alone(tiny_model):
    model = tiny_model()
    with head_in_float32(model):
        assert "forward" not in vars(model.lm_head)


# --- refusals ---------------------------------------------------------------------------------------------------------


def adapted_head(model, **where):
    return get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", **where))


def odd(model):
    def change(model, output):
        output.logits = output.logits + 0.1 * output.logits.sin()
        return output

    return with_forward(model, change)


def hooked(model):
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: plain(x)
    return model


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: adapted_head(m, target_modules=["q_proj", "lm_head"]), "peft.tuners.lora.*target_modules"),
        (lambda m: adapted_head(m, target_modules=["q_proj"], modules_to_save=["lm_head"]), "ModulesToSaveWrapper"),
        (odd, "no known field explains"),
        (hooked, "Linear or hooked"),
    ],
    ids=["adapter", "saved module", "own logits", "hook"],
)
def test_heads_that_cannot_be_cast_are_refused(tiny_model, change, match):
    model = change(tiny_model())
    tree = build_tree([[5, 6]], [[[7, 8]]])
    with pytest.raises(ConfigError, match=match):
        check_float32_head(model)
    with pytest.raises(ConfigError, match="cast_lm_head_to_fp32=False"):
        token_scores(model, tree, layout="padded", float32_head=True)
    token_scores(model, tree, layout="padded")


def test_an_adapter_elsewhere_is_welcome(tiny_model):
    check_float32_head(adapted_head(tiny_model(), target_modules=["q_proj"]))
