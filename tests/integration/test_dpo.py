"""DPO from rows to weights: where the loss starts, what changes nothing, what must move, and honest metrics."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from preftune import BEMACallback, DPOConfig, DPOTrainer
from preftune.errors import ConfigError, DataFormatError
from tests.support.runs import digest, logged, options

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


def build(tmp_path, model, tokenizer, rows, **changes):
    extra = {
        k: changes.pop(k) for k in ("peft_config", "ref_model", "callbacks", "eval_dataset", "loss") if k in changes
    }
    return DPOTrainer(
        model=model,
        args=DPOConfig(**options(tmp_path, **changes)),
        train_dataset=rows if isinstance(rows, Dataset) else Dataset.from_list(rows),
        processing_class=tokenizer,
        **extra,
    )


def starting_adapter(model):
    """A PeftModel whose adapter already does something."""
    model = get_peft_model(model, copy.deepcopy(LORA))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return model


FORMS = {
    "frozen_copy": {}, "given": {"ref_model": True}, "disabled_adapter": {"peft_config": LORA},
    "ready_adapter": {"ready": True}, "moving_adapter": {"peft_config": LORA, "sync_ref_model": True},
    "stored": {"precompute_ref_log_probs": True},
    "stored_lora": {"precompute_ref_log_probs": True, "peft_config": LORA},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_first_loss_is_log_two(tmp_path, tiny_model, tokenizer, preference_rows, form):
    changes = dict(FORMS[form])
    model = starting_adapter(tiny_model()) if changes.pop("ready", False) else tiny_model()
    if changes.get("ref_model"):
        changes["ref_model"] = tiny_model()
    trainer = build(tmp_path, model, tokenizer, preference_rows["text"], max_steps=1, **changes)
    trainer.train()
    assert logged(trainer, "loss") == [pytest.approx(math.log(2), abs=1e-6)]
    assert logged(trainer, "rewards/margins") == [pytest.approx(0, abs=1e-5)]


def test_reference_is_the_live_policy(tmp_path, tiny_model, tokenizer, preference_rows):
    """R019, W2: a policy changed in memory, with no valid name, is its own reference."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.config._name_or_path = "nowhere/at-all"
    trainer = build(tmp_path, model, tokenizer, preference_rows["text"])
    assert torch.equal(trainer.ref_model.lm_head.weight, model.lm_head.weight)
    assert trainer.ref_model.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()


def weights_after(tmp_path, tiny_model, tokenizer, rows, steps=3, **changes):
    trainer = build(
        tmp_path, tiny_model(), tokenizer, rows, max_steps=steps, train_sampling_strategy="sequential", **changes
    )
    trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), trainer


@pytest.mark.parametrize("loss", [["sigmoid"], ["ipo", "sft"], ["aot"], ["aot_unpaired"]], ids="+".join)
def test_how_a_step_is_cut_changes_nothing(tmp_path, tiny_model, tokenizer, preference_rows, loss):
    """Batch 4, 2 x 2, 4 x 1, and a token budget give the same weights, for losses that couple rows as well."""
    rows, common = preference_rows["text"], {"loss_type": loss, "optim": "sgd", "learning_rate": 0.5}
    whole, _ = weights_after(tmp_path, tiny_model, tokenizer, rows, per_device_train_batch_size=4, **common)
    start = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    assert (whole - start).abs().max() > 1e-3
    cuts = [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 4, "max_tokens_per_micro_batch": 40},
    ]
    for cut in cuts:
        other, _ = weights_after(tmp_path, tiny_model, tokenizer, rows, **common, **cut)
        assert (other - whole).abs().max() < 1e-5, cut


def test_on_a_cpu_a_batch_goes_in_small_pieces(tmp_path, tiny_model, tokenizer, preference_rows, monkeypatch):
    """Unset: pieces of so many tokens, or as many as the longest row has; a budget that is set is the budget."""

    def sizes(**changes):
        trainer = build(tmp_path, tiny_model(), tokenizer, preference_rows["text"], **changes)
        [batch] = trainer.begin_step([trainer._own(next(iter(trainer.get_train_dataloader())), 4)], 1)
        longest = max(prompt + sum(branches) for prompt, branches in batch["tree"].layout)
        return longest, [part["tree"].num_tokens for part in trainer.micro_batches(batch)], trainer, batch

    batched = {"per_device_train_batch_size": 4}
    longest, whole, trainer, batch = sizes(**batched)
    assert whole == [batch["tree"].num_tokens] and trainer.is_one_forward([batch])
    monkeypatch.setattr("preftune.trainers.step._CPU_TOKENS", 1)
    _, parts, trainer, batch = sizes(**batched)
    assert len(parts) > 1 and sum(parts) == sum(whole) and max(parts) == longest
    assert not trainer.is_one_forward([batch])
    assert sizes(**batched, max_tokens_per_micro_batch=sum(whole))[1] == whole


def test_layouts_agree(tmp_path, tiny_model, tokenizer, preference_rows):
    common = {"optim": "sgd", "learning_rate": 0.5}
    tree, a = weights_after(tmp_path, tiny_model, tokenizer, preference_rows["text"], attention_layout="tree", **common)
    padded, b = weights_after(
        tmp_path, tiny_model, tokenizer, preference_rows["text"], attention_layout="padded", **common
    )
    assert (a.layout, b.layout) == ("tree", "padded")
    assert (tree - padded).abs().max() < 1e-5


def test_metrics_against_a_plain_forward(tmp_path, tiny_model, tokenizer, preference_rows):
    """logps/* are the sums of answer tokens of an ordinary forward in float64, means over all rows of the window."""
    rows = preference_rows["text"][:3]
    trainer = build(tmp_path, tiny_model(), tokenizer, rows, max_steps=1, per_device_train_batch_size=3)
    trainer.train()
    model, sums = tiny_model().double().eval(), {"chosen": [], "rejected": []}
    for row in rows:
        for side in sums:
            prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            answer = tokenizer(row[side], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            logps = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            sums[side].append(sum(logps[len(prompt) - 1 + i, t].item() for i, t in enumerate(answer)))
    for side, values in sums.items():
        assert logged(trainer, f"logps/{side}") == [pytest.approx(sum(values) / 3, rel=1e-5)]


def test_callbacks_change_nothing(tmp_path, tiny_model, tokenizer, preference_rows):
    class Noise(TrainerCallback):
        """Reads what it gets; must not disturb."""

        def on_step_end(self, args, state, control, **kwargs):
            assert kwargs["ref_model"] is not None and kwargs["reference"] is not None

    def run(folder, callbacks):
        trainer = build(
            tmp_path / folder, tiny_model(attention_dropout=0.1), tokenizer, preference_rows["text"],
            callbacks=callbacks, disable_dropout=False, gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer.train()
        return digest(trainer)

    assert run("a", []) == run("b", [Noise()])


def test_evaluation_returns_its_metrics_and_leaves_no_trace(tmp_path, tiny_model, tokenizer, preference_rows):
    rows = Dataset.from_list(preference_rows["text"])
    sets = {"a": rows.select(range(3)), "b": rows.select(range(3, 8))}
    quiet = build(tmp_path, tiny_model(), tokenizer, rows)
    quiet.train()
    trainer = build(
        tmp_path, tiny_model(), tokenizer, rows, eval_dataset=sets, eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=2,
    )  # fmt: skip
    trainer.train()
    assert digest(trainer) == digest(quiet)
    metrics = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss", "eval_a_rewards/margins", "eval_b_rewards/accuracies"} <= set(metrics)
    again = trainer.evaluate({"x": sets["b"]})
    assert again["eval_x_loss"] == pytest.approx(metrics["eval_b_loss"], rel=1e-6)


def test_both_ways_of_moving_are_refused(tmp_path, tiny_model, tokenizer, preference_rows):
    with pytest.raises(ConfigError, match=r"sync_ref_model.*bema_ref_model"):
        DPOConfig(**options(tmp_path), sync_ref_model=True, bema_ref_model=True)
    with pytest.raises(ConfigError, match=r"sync_ref_model"):
        build(
            tmp_path, tiny_model(), tokenizer, preference_rows["text"], sync_ref_model=True,
            callbacks=[BEMACallback(update_ref_model=True)],
        )  # fmt: skip


def test_lora_moves_the_reference_adapter_alone(tmp_path, tiny_model, tokenizer, preference_rows):
    """R002: alpha 1 every step makes the reference adapter the policy's, bit for bit; base weights stay."""
    trainer = build(
        tmp_path, tiny_model(), tokenizer, preference_rows["text"], peft_config=LORA, sync_ref_model=True,
        ref_model_sync_steps=1, ref_model_mixup_alpha=1.0, max_steps=2,
    )  # fmt: skip
    base = {n: p.clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    trainer.train()
    parameters = dict(trainer.model.named_parameters())
    pairs = [(p, parameters[n.replace(".default.", ".ref.")]) for n, p in parameters.items() if ".default." in n]
    assert pairs and all(torch.equal(policy, ref) for policy, ref in pairs)
    assert any(policy.abs().sum() > 0 for policy, _ in pairs)
    assert all(torch.equal(parameters[n], p) for n, p in base.items())


@pytest.mark.parametrize(
    "rows,words",
    [
        ([], "no rows|empty"),
        ([{"prompt": "a", "choosen": "b", "rejected": "c"}], "chosen"),
        ([{"prompt": "a", "completion": "b", "label": True}], "chosen"),
        ([{"prompt": "hello " * 200, "chosen": "b", "rejected": "c"}], "max_length"),
    ],
)
def test_bad_data_is_named(tmp_path, tiny_model, tokenizer, rows, words):
    with pytest.raises(DataFormatError, match=words):
        build(tmp_path, tiny_model(), tokenizer, rows, max_length=32)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, tiny_model, tokenizer, preference_rows):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="step 1"):
        build(tmp_path, model, tokenizer, preference_rows["text"]).train()


def test_pair_table(tmp_path, tiny_model, tokenizer, preference_rows):
    rows = Dataset.from_list(preference_rows["text"])
    trainer = build(tmp_path, tiny_model(), tokenizer, rows, max_steps=12, per_device_train_batch_size=8)
    before = trainer.score_pairs(rows)
    trainer.train()
    after = trainer.score_pairs(rows)
    assert before.summed.n == after.summed.n == 8
    assert after.summed.value > before.summed.value


def test_experts_are_balanced_as_the_model_asks(tmp_path, tiny_model, tokenizer, preference_rows):
    """The loss with the router's term is the plain loss plus coefficient times the logged `aux_loss`."""
    rows = preference_rows["text"][:2]
    plain = build(tmp_path, tiny_model("qwen3_moe"), tokenizer, rows, max_steps=1, router_aux_loss_coef=0.0)
    plain.train()
    balanced = build(tmp_path, tiny_model("qwen3_moe"), tokenizer, rows, max_steps=1, router_aux_loss_coef=0.1)
    balanced.train()
    (aux,) = logged(balanced, "aux_loss")
    assert aux > 0.5 and not logged(plain, "aux_loss")
    assert logged(balanced, "loss")[0] == pytest.approx(logged(plain, "loss")[0] + 0.1 * aux, rel=1e-5)
    with pytest.raises(ConfigError, match="no experts"):
        build(tmp_path, tiny_model(), tokenizer, rows, router_aux_loss_coef=0.1)


def test_offloading_and_recomputing_activations_change_nothing(tmp_path, tiny_model, tokenizer, preference_rows):
    common = {"optim": "sgd", "learning_rate": 0.5}
    plain, _ = weights_after(tmp_path, tiny_model, tokenizer, preference_rows["text"], **common)
    for option in ("activation_offloading", "gradient_checkpointing"):
        other, trainer = weights_after(
            tmp_path, tiny_model, tokenizer, preference_rows["text"], **common, **{option: True}
        )
        assert (other - plain).abs().max() < 1e-6, option
        assert logged(trainer, "loss")[0] == pytest.approx(math.log(2), abs=1e-6)
