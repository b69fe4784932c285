"""The live forms of the reference: fixed where they must be, moved exactly by the formula, the policy undisturbed."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from torch import nn

from preftune.errors import CheckpointError, ConfigError, ReferenceError
from preftune.models.reference import (
    DisabledAdapter,
    FrozenCopy,
    MovableReference,
    ReferenceAdapter,
    create_reference_model,
    drift_norm,
    make_reference,
)
from preftune.trainers.state import load_extras, save_extras
from tests.support.models import tiny_model
from tests.unit.models.reference_helpers import (
    TREE,
    changed,
    logps,
    lora,
    lora_policy,
    position,
    snapshot,
    train,
)


def full_policy():
    return tiny_model(attention_dropout=0.5)


def dropping_lora(*, nonzero: bool = False):
    return lora_policy(lora(lora_dropout=0.5), nonzero=nonzero, attention_dropout=0.5)


FORMS = {
    "frozen_copy": (full_policy, {}),
    "frozen_copy given": (full_policy, {"given": True}),
    "disabled_adapter": (dropping_lora, {"peft_is_fresh": True}),
    "reference_adapter": (lambda: dropping_lora(nonzero=True), {}),
    "reference_adapter fresh": (dropping_lora, {"peft_is_fresh": True, "will_move": True}),
}


def build(form: str):
    policy, options = FORMS[form][0](), dict(FORMS[form][1])
    if options.pop("given", False):
        options["ref_model"] = tiny_model(attention_dropout=0.5)
    return policy, make_reference(policy, **options)


@pytest.mark.parametrize("form", FORMS)
def test_form_is_chosen_for_the_policy(form):
    _, reference = build(form)
    assert reference.form == form.split()[0]
    assert (reference.module is None) == (reference.form != "frozen_copy")


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("form", FORMS)
def test_reference_starts_at_the_policy(form, layout):
    policy, reference = build(form)
    got = reference.branch_logps(policy, TREE, layout=layout)
    torch.testing.assert_close(got, logps(policy), rtol=0, atol=1e-4)
    assert not got.requires_grad


@pytest.mark.parametrize("form", FORMS)
def test_reference_never_moves_by_itself_while_the_policy_trains(form):
    """R005: the same bits before and after training with dropout, from a policy that has gone elsewhere."""
    policy, reference = build(form)
    before, start = reference.branch_logps(policy, TREE, layout="tree"), logps(policy)
    train(policy)
    assert (logps(policy) - start).abs().min() > 1e-3
    assert torch.equal(reference.branch_logps(policy, TREE, layout="tree"), before)


@pytest.mark.parametrize("form", FORMS)
def test_reference_has_no_dropout_whatever_happened_to_the_modes(form):
    """R007: someone calls train() on everything; two passes still agree exactly."""
    policy, reference = build(form)
    calm = reference.branch_logps(policy, TREE, layout="padded")
    for module in (policy, reference.module):
        if module is not None:
            module.train()
    for _ in range(2):
        assert torch.equal(reference.branch_logps(policy, TREE, layout="padded"), calm)


@pytest.mark.parametrize("form", FORMS)
def test_a_pass_leaves_the_policy_as_it_was(form):
    policy, reference = build(form)
    policy.train()
    # a mixture that no single train() or requires_grad_() would restore
    for module in list(policy.modules())[::3]:
        module.training = False
    for p in list(policy.parameters())[::3]:
        p.requires_grad_(False)
    before, state, weights = position(policy), torch.random.get_rng_state(), snapshot(policy)
    reference.token_scores(policy, TREE, layout="tree")
    assert position(policy) == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not changed(weights, policy)


@pytest.mark.parametrize("form", ["disabled_adapter", "reference_adapter"])
def test_an_error_in_a_pass_leaves_the_policy_as_it_was(form):
    policy, reference = build(form)
    policy.train()
    before = position(policy)
    broken = copy.copy(TREE)
    object.__setattr__(broken, "input_ids", TREE.input_ids + 10_000)
    with pytest.raises(IndexError):
        reference.token_scores(policy, broken, layout="padded")
    assert position(policy) == before


@pytest.mark.parametrize("form", ["frozen_copy", "disabled_adapter", "reference_adapter"])
def test_token_scores_and_ld_alpha_agree_with_branch_sums(form):
    policy, reference = build(form)
    scores = reference.token_scores(policy, TREE, layout="tree")
    torch.testing.assert_close(scores.branch_logps, reference.branch_logps(policy, TREE, layout="tree"))
    # lengths 3, 2 and 2, 4: with alpha 0 the tails past 2 tokens do not count
    per_token = scores.logps.tolist()
    expected = [sum(per_token[0:2]), sum(per_token[3:5]), sum(per_token[5:7]), sum(per_token[7:9])]
    got = reference.branch_logps(policy, TREE, layout="tree", ld_alpha=0.0)
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


# The copy


def test_a_copy_is_of_the_live_weights_and_shares_nothing():
    policy = tiny_model()
    with torch.no_grad():
        policy.lm_head.weight.mul_(2.0)  # not what any name on a hub would give
    reference = FrozenCopy.of(policy)
    ours, theirs = dict(policy.named_parameters()), dict(reference.module.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) and ours[n].data_ptr() != theirs[n].data_ptr() for n in ours)
    assert not any(p.requires_grad for p in theirs.values())
    assert not any(m.training for m in reference.module.modules())
    assert all(p.requires_grad for p in ours.values())


def test_tied_weights_stay_tied_in_the_copy():
    policy = tiny_model(tie_word_embeddings=True)
    module = FrozenCopy.of(policy).module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert module.lm_head.weight is not policy.lm_head.weight


def test_impossible_references_are_refused_with_the_remedy():
    policy = tiny_model()
    with pytest.raises(ReferenceError, match="the policy itself.*Leave ref_model out"):
        make_reference(policy, ref_model=policy)
    inner = tiny_model()
    wrapped = get_peft_model(inner, lora())
    with pytest.raises(ReferenceError, match="shares .* trained parameters"):
        make_reference(wrapped, ref_model=inner)
    with pytest.raises(ReferenceError, match="leave it out|Leave ref_model out"):
        make_reference(lora_policy(), ref_model=tiny_model(), will_move=True)
    with pytest.raises(ConfigError, match="precompute_ref_log_probs.*sync_ref_model"):
        make_reference(policy, will_move=True, precompute=True)
    with pytest.raises(ReferenceError, match="'absent'.*'default'"):
        make_reference(lora_policy(), ref_adapter_name="absent")


@pytest.mark.parametrize("fact", [{"is_quantized": True}, {"hf_device_map": {"a": 0, "b": 1}}])
def test_a_policy_that_cannot_be_copied_names_the_disabled_adapter(fact):
    policy = tiny_model()
    vars(policy).update(fact)
    with pytest.raises(ReferenceError, match="disabled adapter"):
        make_reference(policy)


def test_a_reference_that_cannot_follow_is_refused_at_construction():
    with pytest.raises(ReferenceError, match="shape"):
        make_reference(tiny_model(), ref_model=tiny_model(intermediate_size=48), will_move=True)
    with pytest.raises(ReferenceError, match=r"only in the reference.*lm_head"):
        make_reference(tiny_model(tie_word_embeddings=True), ref_model=tiny_model(), will_move=True)
    # a fixed one may be another model
    make_reference(tiny_model(), ref_model=tiny_model(intermediate_size=48))


def test_a_given_reference_of_another_kind_uses_the_layout_it_can_take():
    reference = make_reference(tiny_model(), ref_model=tiny_model(family="mamba"))
    assert reference.branch_logps(tiny_model(), TREE, layout="tree").shape == (4,)


def test_shared_layers_share_storage_and_are_frozen():
    """R020."""
    policy = tiny_model()
    module = create_reference_model(policy, num_shared_layers=1)
    ours, theirs = dict(policy.named_parameters()), dict(module.named_parameters())
    for name in ours:
        shared = name.startswith(("model.embed_tokens", "model.layers.0."))
        assert (ours[name].data_ptr() == theirs[name].data_ptr()) == shared, name
        assert ours[name].requires_grad == (not shared)
        assert not theirs[name].requires_grad
    # frozen layers may be shared with a reference, also one that moves
    make_reference(policy, ref_model=module, will_move=True)


def test_shared_layers_take_a_pattern_and_check_it():
    policy = tiny_model(num_hidden_layers=12)
    module = create_reference_model(policy, num_shared_layers=1, pattern="model.layers.{layer}")
    own = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert any(n.startswith("model.layers.1.") for n in own)
    assert any(n.startswith("model.layers.11.") for n in own)
    assert not any(p.requires_grad for p in module.parameters())
    for wrong in ({"num_shared_layers": 12}, {"num_shared_layers": 1, "pattern": "blocks.{layer}"}):
        with pytest.raises(ConfigError, match="no parameter belongs to"):
            create_reference_model(tiny_model(num_hidden_layers=12), **wrong)
    whole = create_reference_model(tiny_model())
    assert not whole.training
    assert not any(p.requires_grad for p in whole.parameters())


# Adapters


@pytest.mark.parametrize("careless", [False, True])
def test_adding_the_reference_adapter_disturbs_nothing(careless, monkeypatch):
    """`careless` is what PEFT versions did: mark everything anew when an adapter is added."""
    add = PeftModel.add_adapter
    if careless:
        monkeypatch.setattr(PeftModel, "add_adapter", lambda self, *a: add(self, *a) or self.requires_grad_(False))
    policy = lora_policy(lora(modules_to_save=["lm_head"]), nonzero=True)
    policy.train()
    frozen = next(n for n, p in policy.named_parameters() if "lora_A" in n)
    policy.get_parameter(frozen).requires_grad_(False)
    policy.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    flags, weights = {n: p.requires_grad for n, p in policy.named_parameters()}, snapshot(policy)
    state, active = torch.random.get_rng_state(), list(policy.active_adapters)
    reference = ReferenceAdapter(policy)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert policy.active_adapters == active
    assert not changed(weights, policy)
    after = {n: p.requires_grad for n, p in policy.named_parameters()}
    assert {n: after[n] for n in flags} == flags
    assert not any(after[n] for n in after if n not in flags)
    own, ours = reference.own_parameters(), reference.policy_parameters(policy)
    assert own.keys() == ours.keys()
    assert len(own) == 2 * 2 * 2 + 1  # layers x modules x (A, B), and the saved head
    assert all(torch.equal(own[n], ours[n]) and own[n].data_ptr() != ours[n].data_ptr() for n in own)


@pytest.mark.parametrize("init", ["pissa", "olora", False])
def test_an_adapter_whose_start_is_not_the_base_is_copied(init):
    """PiSSA and OLoRA take their start out of the base weights: the disabled adapter would be neither model."""
    policy = lora_policy(lora(init_lora_weights=init))
    start, weights = logps(policy), snapshot(policy)
    reference = make_reference(policy, peft_is_fresh=True)
    assert reference.form == "reference_adapter"
    assert not changed(weights, policy)
    torch.testing.assert_close(reference.branch_logps(policy, TREE, layout="padded"), start, rtol=0, atol=1e-4)


def test_a_ready_adapter_is_copied_and_never_the_bare_base():
    policy = lora_policy(nonzero=True)
    reference = make_reference(policy)
    base = logps(_without_adapter(policy))
    assert (reference.branch_logps(policy, TREE, layout="padded") - base).abs().max() > 1e-2


def _without_adapter(policy):
    return copy.deepcopy(policy).unload()


def test_an_adapter_that_is_there_can_be_the_reference():
    policy = lora_policy(nonzero=True)
    policy.add_adapter("sft", lora(r=2))
    before = snapshot(policy)
    reference = make_reference(policy, ref_adapter_name="sft")
    assert reference.adapter_name == "sft"
    assert not changed(before, policy)
    # a fresh adapter adds nothing, so this reference is the base
    expected = logps(_without_adapter(policy))
    torch.testing.assert_close(reference.branch_logps(policy, TREE, layout="padded"), expected, rtol=0, atol=1e-4)
    with pytest.raises(ReferenceError, match="cannot follow|shape"):
        make_reference(policy, ref_adapter_name="sft", will_move=True)
    with pytest.raises(ReferenceError, match="cannot also be the reference"):
        make_reference(policy, ref_adapter_name="default")


def test_a_second_trainer_on_the_same_policy_gets_a_fresh_copy():
    policy = lora_policy(nonzero=True)
    make_reference(policy)
    train(policy)
    reference = make_reference(policy)
    torch.testing.assert_close(reference.branch_logps(policy, TREE, layout="padded"), logps(policy), rtol=0, atol=1e-4)
    policy.delete_adapter("ref")
    policy.add_adapter("ref", lora())
    with pytest.raises(ReferenceError, match="already has an adapter 'ref'"):
        make_reference(policy)


def test_weights_that_train_outside_the_adapter_are_refused():
    with pytest.raises(ReferenceError, match=r"modules_to_save"):
        make_reference(lora_policy(lora(bias="all"), attention_bias=True), peft_is_fresh=True)


def test_adapters_on_bare_parameters():
    """R017: expert weights are parameters without a module of their own."""
    config = lora(target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    policy = lora_policy(config, family="qwen3_moe", nonzero=True)
    start = logps(policy)
    reference = make_reference(policy, will_move=True)
    train(policy, lr=1.0)
    torch.testing.assert_close(reference.branch_logps(policy, TREE, layout="padded"), start, rtol=0, atol=1e-4)
    reference.blend_(None, 1.0, policy=policy)
    got = reference.branch_logps(policy, TREE, layout="padded")
    torch.testing.assert_close(got, logps(policy), rtol=0, atol=1e-4)


def test_virtual_tokens_have_the_model_without_them_as_reference_or_a_copy():
    with torch.random.fork_rng(devices=[]):
        policy = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    base = logps(tiny_model())
    fixed = make_reference(policy, peft_is_fresh=True)
    assert fixed.form == "disabled_adapter"
    torch.testing.assert_close(fixed.branch_logps(policy, TREE, layout="padded"), base, rtol=0, atol=1e-4)
    start = logps(policy)
    moving = make_reference(policy, will_move=True)
    train(policy, lr=1.0)
    torch.testing.assert_close(moving.branch_logps(policy, TREE, layout="padded"), start, rtol=0, atol=1e-4)
    moving.blend_(None, 1.0, policy=policy)
    got = moving.branch_logps(policy, TREE, layout="padded")
    torch.testing.assert_close(got, logps(policy), rtol=0, atol=1e-4)


def test_a_merged_adapter_is_refused_and_not_unmerged():
    policy = lora_policy(nonzero=True)
    reference = make_reference(policy)
    policy.merge_adapter()
    weights = snapshot(policy)
    with pytest.raises(ReferenceError, match="merged"):
        reference.branch_logps(policy, TREE, layout="padded")
    assert not changed(weights, policy)


# Movement


def move_by_hand(old: torch.Tensor, new: torch.Tensor, alpha: float) -> torch.Tensor:
    return (1 - alpha) * old.double() + alpha * new.double()


@pytest.mark.parametrize("form", ["frozen_copy", "frozen_copy given", "reference_adapter", "reference_adapter fresh"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 1.0])
def test_moving_forms_move_exactly_by_the_formula(form, alpha):
    policy, reference = build(form)
    assert isinstance(reference, MovableReference)
    train(policy)
    expected = {
        name: move_by_hand(p, reference.policy_parameters(policy)[name], alpha)
        for name, p in reference.own_parameters().items()
    }
    weights = snapshot(policy)
    owned = {id(p) for p in reference.own_parameters().values()}
    mine = {name for name, p in policy.named_parameters() if id(p) in owned}
    reference.blend_(None, alpha, policy=policy, step=7)
    for name, p in reference.own_parameters().items():
        torch.testing.assert_close(p.double(), expected[name], rtol=1e-6, atol=1e-7)
        if alpha in (0.0, 1.0):
            assert torch.equal(p, expected[name].to(p.dtype))
    assert changed(weights, policy) <= mine  # base weights and the policy's adapter are never written
    assert (reference.moves, reference.last_move_step) == (1, 7)


def test_a_source_names_some_parameters_and_the_policy_gives_the_rest():
    policy = tiny_model()
    reference = FrozenCopy.of(policy)
    train(policy)
    source = {"lm_head.weight": torch.full_like(policy.lm_head.weight, 2.0)}
    reference.blend_(source, 1.0, policy=policy)
    for name, p in reference.module.named_parameters():
        assert torch.equal(p, source[name] if name in source else policy.get_parameter(name))
    with pytest.raises(ReferenceError, match="only in the reference"):
        reference.blend_(source, 0.5)
    with pytest.raises(ReferenceError, match="not in the reference, such as 'no.such.weight'"):
        reference.blend_({"no.such.weight": torch.zeros(1)}, 0.5, policy=policy)
    with pytest.raises(ReferenceError, match="shape"):
        reference.blend_({"lm_head.weight": torch.zeros(1)}, 0.5, policy=policy)
    with pytest.raises(ValueError, match="share in"):
        reference.blend_(None, 1.5, policy=policy)


def test_buffers_follow_the_policy():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    policy, target = Counting(), Counting()
    policy.seen += 5
    FrozenCopy(target).blend_(None, 0.5, policy=policy)
    assert target.seen.item() == 5


def test_a_bfloat16_average_with_a_small_alpha_does_not_stall():
    """From 1 towards 2 with alpha 0.001: added to a bfloat16 1, 0.001 rounds to nothing (the spacing there is 0.0078).

    In float32 the value after n moves is 2 - 0.999^n, which is 1.632 for n = 1000.
    """
    policy, target = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).bfloat16()
    reference = FrozenCopy(target)
    with torch.no_grad():
        for model, value in ((policy, 2.0), (target, 1.0)):
            for p in model.parameters():
                p.fill_(value)
    for _ in range(1000):
        reference.blend_(None, 0.001, policy=policy)
    expected = 2 - 0.999**1000
    assert target.weight.dtype == torch.bfloat16
    assert target.weight[0, 0].item() == pytest.approx(expected, abs=0.004)
    assert reference.drift(policy).item() == pytest.approx((2 - expected) * math.sqrt(20), rel=1e-3)


def test_drift_is_the_norm_of_the_difference():
    policy = tiny_model()
    reference = FrozenCopy.of(policy)
    assert drift_norm(policy, reference).item() == 0.0
    with torch.no_grad():
        policy.lm_head.weight[0, 0] += 3.0
        policy.model.norm.weight[0] += 4.0
    assert drift_norm(policy, reference).item() == pytest.approx(5.0, rel=1e-5)
    assert reference.drift_metrics(policy) == {"reference/drift": pytest.approx(5.0, rel=1e-5), "reference/moves": 0.0}
    reference.blend_(None, 0.5, policy=policy, step=3)
    metrics = reference.drift_metrics(policy)
    assert metrics["reference/drift"] == pytest.approx(2.5, rel=1e-5)
    assert (metrics["reference/moves"], metrics["reference/last_move_step"]) == (1.0, 3.0)


def bits(reference: MovableReference) -> dict:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in reference.state_dict().items()}


def same_bits(one: dict, two: dict) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(v, two[k]) and v.dtype == two[k].dtype if isinstance(v, torch.Tensor) else v == two[k]
        for k, v in one.items()
    )


@pytest.mark.parametrize("form", ["float32 copy", "bfloat16 copy", "adapter"])
def test_state_comes_back_bit_for_bit_and_goes_on_alike(form, tmp_path):
    dtype = torch.bfloat16 if form == "bfloat16 copy" else torch.float32
    make = lora_policy if form == "adapter" else tiny_model
    policy = make(dtype=dtype)
    reference = make_reference(policy, will_move=True)
    train(policy)
    reference.blend_(None, 0.01, policy=policy, step=4)
    save_extras(str(tmp_path), {"reference": reference.state_dict()})
    saved = bits(reference)
    other = make_reference(make(dtype=dtype), will_move=True)
    other.load_state_dict(load_extras(str(tmp_path))["reference"])
    assert same_bits(bits(other), saved)
    for moved in (reference, other):
        moved.blend_(None, 0.01, policy=policy, step=5)
    assert same_bits(bits(other), bits(reference))
    assert not same_bits(bits(other), saved)
    if form == "bfloat16 copy":
        assert any(key.startswith("master.") for key in saved)


def test_state_of_another_model_is_refused():
    state = FrozenCopy.of(tiny_model()).state_dict()
    with pytest.raises(CheckpointError, match="does not fit"):
        FrozenCopy.of(tiny_model(num_hidden_layers=1)).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"torch.float32.*torch.bfloat16"):
        FrozenCopy.of(tiny_model(dtype=torch.bfloat16)).load_state_dict(state)


def test_a_disabled_adapter_cannot_move():
    assert not isinstance(DisabledAdapter(), MovableReference)
