"""Every kind of adapter through DPO, in one table: where it starts, what must not move, what can, saving and resuming.

A form is a PEFT config (and a model where it needs another); what is asserted is the same for all.
"""

from __future__ import annotations

import copy
import hashlib
import math
import types
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)

from preftune import BEMACallback, DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from preftune.configs.model import ModelConfig, get_quantization_config
from preftune.data.tree import build_tree
from preftune.errors import CheckpointError, ConfigError, ReferenceError
from preftune.models.load import wrap_peft
from preftune.models.logprobs import token_scores
from tests.support.models import tiny_model
from tests.support.runs import digest, logged, options

QV = ["q_proj", "v_proj"]
CAUSAL = {"task_type": "CAUSAL_LM"}
LORA = LoraConfig(r=2, target_modules=QV, **CAUSAL)
TIED = {"tie_word_embeddings": True}
LAYER_FORMS = {
    "lora": (LoraConfig(r=2, target_modules=QV, lora_dropout=0.2, **CAUSAL), {}),
    "rslora": (LoraConfig(r=2, target_modules=QV, use_rslora=True, **CAUSAL), {}),
    "dora": (LoraConfig(r=2, target_modules=QV, use_dora=True, **CAUSAL), {}),
    "ia3": (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL), {}),
    "loha": (LoHaConfig(r=2, target_modules=QV, **CAUSAL), {}),
    "vera": (VeraConfig(r=2, target_modules=QV, **CAUSAL), {}),
    "saved_head": (LoraConfig(r=2, target_modules=QV, modules_to_save=["lm_head"], **CAUSAL), {}),
    "saved_head_tied": (LoraConfig(r=2, target_modules=QV, modules_to_save=["lm_head"], **CAUSAL), TIED),
    "head": (LoraConfig(r=2, target_modules=["q_proj", "lm_head"], **CAUSAL), {}),
    "embedding_tied": (LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], **CAUSAL), TIED),
    "some_tokens": (LoraConfig(r=2, target_modules=QV, trainable_token_indices=[5, 6, 7], **CAUSAL), {}),
    "experts": (
        LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], **CAUSAL),
        {"family": "qwen3_moe", "router_aux_loss_coef": 0.0},
    ),
    "bfloat16": (LoraConfig(r=2, target_modules=QV, **CAUSAL), {"dtype": torch.bfloat16}),
}  # fmt: skip
VIRTUAL_FORMS = {
    "prompt": (PromptTuningConfig(num_virtual_tokens=3, **CAUSAL), {}),
    "p_tuning": (PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **CAUSAL), {}),
    "prefix": (PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL), {}),
    "prefix_projected": (
        PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8, **CAUSAL), {},
    ),
}  # fmt: skip
FORMS = LAYER_FORMS | VIRTUAL_FORMS
RARE = ("rslora", "loha", "vera", "saved_head_tied")
RESUMED = ("lora", "ia3", "saved_head", "p_tuning", "loha", "vera")  # with a reference that follows
SAVING = {"save_strategy": "steps", "save_steps": 2}
TREE = build_tree([[5, 6, 7], [9, 10]], [[[11, 12], [14, 15, 16]], [[17], [18, 19]]])


def all_forms(slow: tuple[str, ...]) -> list:
    return [pytest.param(form, marks=pytest.mark.slow if form in slow else ()) for form in FORMS]


def base_model(form):
    return tiny_model(num_hidden_layers=1, **FORMS[form][1])


def build(tmp_path, form, tokenizer, rows, *, model=None, **changes):
    given = {k: changes.pop(k) for k in ("callbacks", "ref_model", "peft_config", "eval_dataset") if k in changes}
    given.setdefault("peft_config", copy.deepcopy(FORMS[form][0]) if model is None else None)
    args = options(tmp_path, **{"max_steps": 3, "learning_rate": 5e-2} | changes)
    return DPOTrainer(
        model=base_model(form) if model is None else model,
        args=DPOConfig(**args),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **given,
    )


def base_digest(model) -> str:
    """sha256 of every weight that belongs to no adapter, wherever PEFT has put it."""
    peft = model.base_model
    kept = {
        name.replace("base_layer.", "").replace("original_module.", ""): p
        for name, p in peft.named_parameters()
        if not any(part in name for part in ADAPTER_PARTS)
    }
    sha = hashlib.sha256()
    for name in sorted(kept):
        sha.update(name.encode() + kept[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


ADAPTER_PARTS = ("lora_", "ia3_", "hada_", "vera_", "modules_to_save", "trainable_tokens", "prompt_encoder")


@torch.no_grad()
def scores(model) -> torch.Tensor:
    return token_scores(copy.deepcopy(model).eval(), TREE, layout="padded").branch_logps


def saved_weights(folder: Path, form):
    return scores(PeftModel.from_pretrained(base_model(form), folder))


@pytest.mark.parametrize("form", all_forms(slow=(*RARE, "some_tokens", "bfloat16")))
def test_a_fixed_reference(tmp_path, tokenizer, preference_rows, form):
    """Loss from log 2, base weights untouched, saved scores equal, resume to the bit."""
    rows = preference_rows["text"][:4]
    straight = build(tmp_path / "a", form, tokenizer, rows, **SAVING)
    assert straight.reference.form == "disabled_adapter"
    before, start = base_digest(straight.model), scores(straight.model)
    reference = straight.reference.branch_logps(straight.model, TREE, layout="padded")
    torch.testing.assert_close(reference, scores(base_model(form)), rtol=0, atol=1e-4 if form != "bfloat16" else 0.3)
    straight.train()
    if form in LAYER_FORMS:
        assert logged(straight, "loss")[0] == pytest.approx(math.log(2), abs=1e-5 if form != "bfloat16" else 1e-2)
    moved = (scores(straight.model) - start).abs().max()
    assert moved > 1e-3
    assert base_digest(straight.model) == before
    after = straight.reference.branch_logps(straight.model, TREE, layout="padded")
    assert torch.equal(after, reference)

    straight.save_model(str(tmp_path / "saved"))
    torch.testing.assert_close(saved_weights(tmp_path / "saved", form), scores(straight.model), rtol=0, atol=1e-4)

    resumed = build(tmp_path / "b", form, tokenizer, rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert digest(resumed) == digest(straight)


@pytest.mark.parametrize(
    "form",
    all_forms(
        slow=("rslora", "loha", "vera", "saved_head_tied", "head", "embedding_tied", "prefix", "prefix_projected")
    ),
)
def test_a_reference_that_follows(tmp_path, tokenizer, preference_rows, form):
    """Alpha 1 at each step makes the reference adapter the policy's; an average is saved that PEFT loads."""
    rows = preference_rows["text"][:4]
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    average = BEMACallback(update_freq=1, ema_power=0.3)
    trainer = build(tmp_path / "a", form, tokenizer, rows, callbacks=[average], **sync, **SAVING)
    assert trainer.reference.form == "reference_adapter"
    before, start = base_digest(trainer.model), scores(trainer.model)
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(math.log(2), abs=1e-5 if form != "bfloat16" else 1e-2)
    own, ours = trainer.reference.own_parameters(), trainer.reference.policy_parameters(trainer.model)
    assert own and all(torch.equal(own[name], ours[name]) for name in ours)
    assert base_digest(trainer.model) == before
    assert (scores(trainer.model) - start).abs().max() > 1e-3

    averaged = copy.deepcopy(trainer.model)
    with torch.no_grad():
        for name, value in average.average.items():
            averaged.get_parameter(name).copy_(value)
    tolerance = 1e-4 if form != "bfloat16" else 0.3
    torch.testing.assert_close(saved_weights(tmp_path / "a" / "bema", form), scores(averaged), rtol=0, atol=tolerance)
    assert (scores(averaged) - scores(trainer.model)).abs().max() > 1e-4

    resumed = build(
        tmp_path / "b", form, tokenizer, rows, callbacks=[BEMACallback(update_freq=1, ema_power=0.3)], **sync
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert digest(resumed) == digest(trainer)


@pytest.mark.parametrize("form", ["lora", "ia3", "saved_head", "prompt"])
def test_bema_is_the_reference(tmp_path, tokenizer, preference_rows, form):
    """With `ema_power=0` and no correction the average is the policy of the step: so must be the reference."""
    bema = {"bema_ref_model": True, "bema_update_freq": 1, "ref_model_update_freq": 1, "bema_ema_power": 0.0}
    trainer = build(tmp_path, form, tokenizer, preference_rows["text"][:4], bema_bias_power=-1.0, **bema)
    trainer.train()
    own, ours = trainer.reference.own_parameters(), trainer.reference.policy_parameters(trainer.model)
    assert all(torch.equal(own[name], ours[name]) for name in ours)
    assert trainer.reference.moves == 3


# Adapters that were there before


def adapted(model=None, **named):
    """A PeftModel whose adapters (by name: seed of their values) already do something; the first one is active."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        names = named or {"default": 1}
        first = next(iter(names))
        model = get_peft_model(model or tiny_model(num_hidden_layers=1), copy.deepcopy(LORA), adapter_name=first)
        for name in list(names)[1:]:
            model.add_adapter(name, copy.deepcopy(LORA))
        for name, seed in names.items():
            torch.manual_seed(seed)
            for key, p in model.named_parameters():
                if f"lora_B.{name}" in key:
                    p.data.normal_(std=0.3)
    return model


def test_a_ready_adapter_trains_on_and_its_start_is_the_reference(tmp_path, tokenizer, preference_rows):
    """R150: with gradient checkpointing or without, all of the adapter trains; the base alone is not the reference."""
    rows = preference_rows["text"][:4]
    for checkpointing in (False, True):
        model = adapted()
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        start = scores(model)
        trainer = build(
            tmp_path / str(checkpointing), "lora", tokenizer, rows, model=model, gradient_checkpointing=checkpointing
        )
        assert [n for n, p in trainer.model.named_parameters() if p.requires_grad] == trained
        assert trainer.reference.form == "reference_adapter"
        before = {n: p.detach().clone() for n, p in model.named_parameters() if n in trained}
        trainer.train()
        assert logged(trainer, "loss")[0] == pytest.approx(math.log(2), abs=1e-5)
        assert all(not torch.equal(before[n], model.get_parameter(n)) for n in trained)
        reference = trainer.reference.branch_logps(model, TREE, layout="padded")
        torch.testing.assert_close(reference, start, rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="both a PeftModel and a peft_config"):
        build(tmp_path, "lora", tokenizer, rows, model=adapted(), peft_config=LORA)


def test_a_named_adapter_is_the_reference(tmp_path, tokenizer, preference_rows):
    rows, model = preference_rows["text"][:4], adapted(policy=1, sft=2)
    model.set_adapter("sft")
    expected = scores(model)
    model.set_adapter("policy")
    trainer = build(tmp_path, "lora", tokenizer, rows, model=model, ref_adapter_name="sft")
    trainer.train()
    got = trainer.reference.branch_logps(model, TREE, layout="padded")
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert logged(trainer, "loss")[0] != pytest.approx(math.log(2), abs=1e-3)
    trainer.save_model(str(tmp_path / "saved"))
    assert sorted(p.name for p in (tmp_path / "saved").iterdir() if p.is_dir()) == ["policy", "sft"]
    with pytest.raises(ReferenceError, match=r"no adapter 'absent'; the policy has \['policy'.*'sft'\]"):
        build(tmp_path, "lora", tokenizer, rows, model=adapted(policy=1, sft=2), ref_adapter_name="absent")
    with pytest.raises(ReferenceError, match="has no adapters"):
        build(
            tmp_path, "lora", tokenizer, rows, model=base_model("lora"), ref_adapter_name="sft", peft_config=None
        )  # fmt: skip


def test_a_saved_adapter_is_the_reference(tmp_path, tokenizer, preference_rows):
    """It is loaded beside the policy's adapter, frozen; it is not saved with the policy, and it can be made to move."""
    rows, other = preference_rows["text"][:4], adapted(default=3)
    other.save_pretrained(tmp_path / "sft")
    expected, folder = scores(other), str(tmp_path / "sft")
    for number, changes in enumerate(({}, {"sync_ref_model": True, "ref_model_sync_steps": 10})):
        trainer = build(tmp_path / str(number), "lora", tokenizer, rows, ref_model=folder, **changes, **SAVING)
        assert trainer.ref_model is None
        trainer.train()
        got = trainer.reference.branch_logps(trainer.model, TREE, layout="padded")
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        if changes:
            continue
        resumed = build(tmp_path / f"{number}b", "lora", tokenizer, rows, ref_model=folder, **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / str(number) / "checkpoint-2"))
        assert digest(resumed) == digest(trainer)
        assert not (tmp_path / str(number) / "checkpoint-2" / "ref").exists()
    # without an adapter on the policy it is a model like any other: its base with the adapter
    whole = build(tmp_path / "c", "lora", tokenizer, rows, model=base_model("lora"), ref_model=adapted(default=3))
    torch.testing.assert_close(
        whole.reference.branch_logps(whole.model, TREE, layout="padded"), expected, rtol=0, atol=1e-4
    )


def test_a_saved_adapter_that_does_not_fit_is_refused(tmp_path, tokenizer, preference_rows):
    rows = preference_rows["text"][:4]
    adapted().save_pretrained(tmp_path / "lora")
    with pytest.raises(ReferenceError, match=r"LORA adapter and the policy has a .*IA3"):
        build(tmp_path, "ia3", tokenizer, rows, ref_model=str(tmp_path / "lora"))
    adapted(tiny_model(num_hidden_layers=2)).save_pretrained(tmp_path / "deeper")
    with pytest.raises(ReferenceError, match="does not fit the policy"):
        build(tmp_path, "lora", tokenizer, rows, ref_model=str(tmp_path / "deeper"))
    with pytest.raises(ConfigError, match="ref_adapter_name='sft' another"):
        build(tmp_path, "lora", tokenizer, rows, ref_model=str(tmp_path / "lora"), ref_adapter_name="sft")


def test_a_saved_adapter_is_a_model_to_train(tmp_path, tokenizer, preference_rows):
    """transformers alone would load its base to train, with the adapter frozen inside."""
    base, rows = tmp_path / "base", preference_rows["text"][:4]
    tiny_model(num_hidden_layers=1).save_pretrained(base)
    tokenizer.save_pretrained(base)
    start = adapted(type(tiny_model()).from_pretrained(base))
    start.save_pretrained(tmp_path / "sft")
    trainer = build(tmp_path / "out", "lora", None, rows, model=str(tmp_path / "sft"))
    assert isinstance(trainer.model, PeftModel)
    assert {n for n, p in trainer.model.named_parameters() if p.requires_grad} == {
        n for n, p in start.named_parameters() if "lora_" in n
    }
    reference = trainer.reference.branch_logps(trainer.model, TREE, layout="padded")
    torch.testing.assert_close(reference, scores(start), rtol=0, atol=1e-4)
    get_peft_model(type(tiny_model()).from_pretrained(base), copy.deepcopy(FORMS["prompt"][0])).save_pretrained(
        tmp_path / "prompt"
    )
    with pytest.raises(ConfigError, match="cannot go on training saved ones"):
        build(tmp_path / "out", "prompt", tokenizer, rows, model=str(tmp_path / "prompt"))


def test_adapter_weights_are_float32_unless_the_user_made_them_otherwise(tmp_path, tokenizer, preference_rows):
    """PEFT's `autocast_adapter_dtype`; the reference adapter has the types of the policy's."""
    rows = preference_rows["text"][:4]
    fresh = build(tmp_path, "bfloat16", tokenizer, rows, sync_ref_model=True)
    model = get_peft_model(base_model("bfloat16"), copy.deepcopy(LORA), autocast_adapter_dtype=False)
    given = build(tmp_path, "bfloat16", tokenizer, rows, model=model, sync_ref_model=True)
    for trainer, dtype in ((fresh, torch.float32), (given, torch.bfloat16)):
        own, ours = trainer.reference.own_parameters(), trainer.reference.policy_parameters(trainer.model)
        assert {p.dtype for p in [*own.values(), *ours.values()]} == {dtype}


def test_virtual_tokens_of_another_run_are_refused(tmp_path, tokenizer, preference_rows):
    rows = preference_rows["text"][:4]
    build(tmp_path / "a", "prompt", tokenizer, rows, **SAVING).train()
    other = build(tmp_path / "b", "prefix", tokenizer, rows)
    with pytest.raises(CheckpointError, match="virtual tokens|differ"):
        other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))


def test_the_best_virtual_tokens_are_loaded_at_the_end(tmp_path, tokenizer, preference_rows):
    rows = preference_rows["text"][:4]
    trainer = build(
        tmp_path, "p_tuning", tokenizer, rows, eval_dataset=Dataset.from_list(rows), eval_strategy="steps",
        eval_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss", **SAVING,
    )  # fmt: skip
    trainer.train()
    best = build(tmp_path / "b", "p_tuning", tokenizer, rows)
    from preftune.trainers.extras import load_virtual_tokens

    load_virtual_tokens(best, trainer.state.best_model_checkpoint)
    assert torch.equal(scores(best.model), scores(trainer.model))


# Recomputed activations


@pytest.mark.parametrize(
    "form,layout",
    [
        ("lora", "tree"),
        ("experts", "tree"),
        ("prompt", "padded"),
        *(pytest.param(form, "tree", marks=pytest.mark.slow) for form in ("saved_head", "dora")),
        *(pytest.param(form, "padded", marks=pytest.mark.slow) for form in ("lora", "experts")),
    ],
)
def test_recomputed_activations_give_the_same_gradients(tmp_path, tokenizer, preference_rows, form, layout):
    """With re-entrance and without it: the same bits."""
    rows, results = preference_rows["text"][:4], []
    common = {"attention_layout": layout, "optim": "sgd", "max_steps": 1}
    for number, changes in enumerate(
        (
            {},
            {"gradient_checkpointing": True},
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        )
    ):
        trainer = build(tmp_path / str(number), form, tokenizer, rows, **common, **changes)
        for module in trainer.model.modules():  # a recomputed LoRA dropout is the same, but not without recomputing
            if "lora_dropout" in vars(module).get("_modules", {}):
                for part in module.lora_dropout.values():
                    vars(part)["p"] = 0.0
        trainer.train()
        results.append(digest(trainer))
    assert results[0] == results[1] == results[2]


def test_the_balancing_loss_counts_the_tokens_of_a_forward():
    """With one branch a prompt both layouts have the same tokens; a shared prompt counts once or twice."""
    model = base_model("experts")
    model.config.output_router_logits = True
    aux = {}
    for name, branches in (("alone", [[[11, 12]], [[14, 15]]]), ("shared", [[[11, 12], [14, 15]]])):
        tree = build_tree([[5, 6, 7]] * len(branches), branches)
        for layout in ("tree", "padded"):
            aux[name, layout] = token_scores(model, tree, layout=layout).aux_loss.item()
    assert aux["alone", "tree"] == pytest.approx(aux["alone", "padded"], rel=1e-5)
    assert aux["shared", "padded"] == pytest.approx(aux["alone", "padded"], rel=1e-5)
    assert aux["shared", "tree"] != pytest.approx(aux["shared", "padded"], rel=1e-3)


def test_a_prefix_cannot_be_recomputed(tmp_path, tokenizer, preference_rows):
    with pytest.raises(ConfigError, match="prefix would have no effect"):
        build(tmp_path, "prefix", tokenizer, preference_rows["text"][:4], gradient_checkpointing=True)


def test_selective_checkpointing_says_what_to_use_instead(tmp_path):
    with pytest.raises(ConfigError, match="every_n_layers"):
        SFTConfig(**options(tmp_path), gradient_checkpointing=True, gradient_checkpointing_kwargs={"selective": True})


def test_bitsandbytes_is_asked_for_before_anything_is_loaded(tmp_path, tokenizer, sft_rows, monkeypatch):
    from preftune.models import load

    monkeypatch.setattr(load, "is_bitsandbytes_available", lambda: False)
    config = get_quantization_config(ModelConfig(load_in_4bit=True))
    in_args = {"model_init_kwargs": {"quantization_config": {"load_in_8bit": True, "quant_method": "bitsandbytes"}}}
    for quantization_config, changes in ((config, {}), (None, in_args)):
        with pytest.raises(ConfigError, match="pip install bitsandbytes"):
            SFTTrainer(
                model="no/such-model",
                args=SFTConfig(**options(tmp_path), **changes),
                train_dataset=Dataset.from_list(sft_rows["text"]),
                processing_class=tokenizer,
                quantization_config=quantization_config,
            )


@pytest.mark.parametrize("ready", [False, True])
def test_four_bits(tmp_path, tokenizer, preference_rows, ready):
    """QLoRA: gradients pass through 4-bit layers after the passes in eval mode, and the quantised weights stay."""
    pytest.importorskip("bitsandbytes")
    config = get_quantization_config(ModelConfig(load_in_4bit=True))
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    load = {"dtype": "float32"} if not ready else None
    model = str(tmp_path / "base")
    if ready:
        loaded = type(tiny_model()).from_pretrained(model, quantization_config=config, dtype=torch.float32)
        model = get_peft_model(loaded, copy.deepcopy(LORA))
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(**options(tmp_path, max_steps=3), model_init_kwargs=load),
        train_dataset=Dataset.from_list(preference_rows["text"][:4]),
        processing_class=tokenizer,
        quantization_config=None if ready else config,
        peft_config=None if ready else LORA,
    )
    assert trainer.reference.form == ("reference_adapter" if ready else "disabled_adapter")
    before = base_digest(trainer.model)
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    assert min(logged(trainer, "grad_norm")) > 1e-4
    assert base_digest(trainer.model) == before


def test_four_bit_layers_are_kept_from_packing():
    """What bitsandbytes has on such a CPU, as far as we touch it."""
    model = tiny_model()
    layer = model.model.layers[0].mlp.down_proj
    vars(layer)["support_avx512bf16_for_cpu"] = True
    state = types.SimpleNamespace()
    vars(layer.weight)["quant_state"] = state
    wrap_peft(model, None, seed=0, gradient_checkpointing=False)
    assert layer.support_avx512bf16_for_cpu is False
    state.packing_format_for_cpu = True
    with pytest.raises(ConfigError, match="layers.0.mlp.down_proj.*Load the model anew"):
        wrap_peft(model, None, seed=0, gradient_checkpointing=False)
