"""Evaluation: every kind of set, honest means, the user's own metrics, and not a trace of it in training."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from preftune import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from preftune.errors import ConfigError, DataFormatError
from tests.support.runs import digest, logged, options

EXTRA = ("eval_dataset", "compute_metrics", "preprocess_logits_for_metrics", "callbacks", "ref_model")
KINDS = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig)}
KINDS |= {"reward": (RewardTrainer, RewardConfig)}


def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.fixture
def build(tmp_path, tiny_model, tokenizer, sft_rows, preference_rows):
    """`build(kind, rows=None, model=None, **options)`: a trainer on eight rows, evaluated by twos."""
    pairs = preference_rows["text"]
    labelled = [
        {"prompt": row["prompt"], "completion": row["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
        for i, row in enumerate(pairs)
    ]
    raw = {"sft": sft_rows["prompt_completion"], "dpo": pairs, "kto": labelled, "reward": pairs}

    def make(kind, rows=None, model=None, folder="run", **changes):
        trainer_class, config_class = KINDS[kind]
        extra = {k: changes.pop(k) for k in EXTRA if k in changes}
        changes = {"per_device_eval_batch_size": 2, "max_steps": 1} | changes
        rows = raw[kind] if rows is None else rows
        return trainer_class(
            model if model is not None else tiny_model(head="value" if kind == "reward" else "causal"),
            args=config_class(**options(tmp_path / folder, **changes)),
            train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
            processing_class=tokenizer,
            **extra,
        )

    make.raw = raw
    return make


def slow_nll(model, prompt, answer):
    """-log p of each token of the answer, one ordinary forward in float64."""
    logps = model.double().eval()(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return [-logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]


def slow_token_mean(model, tokenizer, rows, column):
    values = []
    for row in rows:
        prompt, answer = (tokenizer(row[c], add_special_tokens=False)["input_ids"] for c in ("prompt", column))
        values += slow_nll(model, prompt, [*answer, tokenizer.eos_token_id])
    return sum(values) / len(values)


# ---- no trace -------------------------------------------------------------------------------------------------------


class EvaluateInTheMiddle(TrainerCallback):
    """Between two micro-batches of a step: evaluates, under the name of training as well, and predicts."""

    def __init__(self, rows):
        self.rows, self.trainer, self.seen = rows, None, 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.trainer.evaluate()
        self.trainer.evaluate(self.rows, metric_key_prefix="train")
        self.trainer.predict(self.rows)
        self.seen += 1


def traces(trainer):
    """Everything that evaluating could have moved."""
    states = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
    curves = {k: logged(trainer, k) for k in ("loss", "grad_norm", "entropy", "rewards/margins", "num_tokens")}
    modes = [module.training for module in trainer.model.modules()]
    return {"digest": digest(trainer), "random": states, "curves": curves, "modes": modes}


CASES = {
    "sft": ("sft", False, {}),
    "dpo_bema": ("dpo", False, {"bema_ref_model": True, "bema_update_freq": 1, "ref_model_update_freq": 2}),
    "dpo_streamed": ("dpo", True, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_evaluating_leaves_no_trace(build, tiny_model, case):
    kind, streamed, changes = CASES[case]
    rows = build.raw[kind]
    common = {"gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 2, "disable_dropout": False} | changes

    def run(folder, **changes):
        data = stream(rows * 2) if streamed else rows * 2
        return build(kind, data, tiny_model(attention_dropout=0.2), folder, **common, **changes)

    quiet = run("quiet")
    quiet.train()
    held_out = rows[:3]
    middle = EvaluateInTheMiddle(Dataset.from_list(held_out))
    watched = run(
        "watched", eval_dataset=stream(held_out) if streamed else Dataset.from_list(held_out), eval_strategy="steps",
        eval_steps=1, eval_on_start=True, callbacks=[middle],
    )  # fmt: skip
    middle.trainer = watched
    watched.train()
    assert middle.seen == 4
    assert len(logged(watched, "eval_loss")) == 5 + 4
    found = traces(watched)
    for part, expected in traces(quiet).items():
        assert found[part] == expected, part


def test_the_reference_stays_in_eval_mode(build, tiny_model):
    """R007: whatever evaluate() switches, reference and loss have no dropout in them."""
    trainer = build("dpo", model=tiny_model(attention_dropout=0.5), disable_dropout=False)
    rows = Dataset.from_list(build.raw["dpo"])
    trainer.train()
    before = trainer.evaluate(rows)
    assert not trainer.ref_model.training and trainer.model.training
    assert trainer.evaluate(rows)["eval_loss"] == before["eval_loss"]


def test_tokens_evaluated_are_not_tokens_seen(build):
    trainer = build("sft", eval_dataset=Dataset.from_list(build.raw["sft"]), eval_strategy="steps", eval_steps=1)
    trainer.train()
    (seen,) = set(logged(trainer, "num_tokens"))
    assert trainer.evaluate()["eval_num_tokens"] == seen > 0


# ---- what can be evaluated ------------------------------------------------------------------------------------------


def numbers(metrics):
    return {k: v for k, v in metrics.items() if not k.endswith(("runtime", "_per_second", "_time"))}


SETS = {
    "dict": lambda a, b: {"a": Dataset.from_list(a), "b": Dataset.from_list(b)},
    "DatasetDict": lambda a, b: DatasetDict({"a": Dataset.from_list(a), "b": Dataset.from_list(b)}),
    "IterableDatasetDict": lambda a, b: IterableDatasetDict({"a": stream(a), "b": stream(b)}),
    "mixed": lambda a, b: {"a": stream(a), "b": Dataset.from_list(b)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_set(build, kind):
    """R082, R084, R015: at construction and later, raw and prepared; each set is prepared once."""
    a, b = build.raw[kind][:3], build.raw[kind][3:8]
    trainer = build(kind, eval_dataset=SETS["DatasetDict"](a, b))
    expected = numbers(trainer.evaluate())
    metric = "accuracy" if kind == "reward" else "entropy"
    assert {f"eval_{name}_{key}" for name in "ab" for key in ("loss", metric)} <= set(expected)
    prepared = []
    prepare = trainer.prepare_dataset
    trainer.prepare_dataset = lambda rows, split: prepared.append(split) or prepare(rows, split)
    for form, make in SETS.items():
        prepared.clear()
        assert numbers(trainer.evaluate(make(a, b))) == pytest.approx(expected, rel=1e-6), form
        assert prepared == ["eval_a", "eval_b"]
    assert numbers(trainer.evaluate(trainer.eval_dataset)) == pytest.approx(expected, rel=1e-6)
    for rows in (Dataset.from_list(b), stream(b), trainer.eval_dataset["b"], "b"):
        single = trainer.evaluate(rows)
        assert single["eval_loss"] == pytest.approx(expected["eval_b_loss"], rel=1e-6)
    streams = build(kind, eval_dataset=SETS["IterableDatasetDict"](a, b))
    assert numbers(streams.evaluate()) == pytest.approx(expected, rel=1e-6)


def test_packed_sets_are_not_packed_again(build, sft_rows):
    """Joined a second time, documents would see one another."""
    rows = sft_rows["text"]
    packed = build("sft", rows, eval_dataset=Dataset.from_list(rows), packing=True, max_length=64)
    plain = build("sft", rows, eval_dataset=Dataset.from_list(rows), max_length=64)
    assert len(packed.eval_dataset) < len(rows)
    expected = plain.evaluate()["eval_loss"]
    for given in (None, packed.eval_dataset, {"x": packed.eval_dataset}, {"x": Dataset.from_list(rows)}):
        metrics = packed.evaluate(given)
        key = "eval_x_loss" if isinstance(given, dict) else "eval_loss"
        assert metrics[key] == pytest.approx(expected, rel=1e-5)


def test_sets_that_are_not_there(build):
    rows = Dataset.from_list(build.raw["sft"])
    named = build("sft", eval_dataset={"a": rows})
    with pytest.raises(ConfigError, match="no eval set 'b'.*'a'"):
        named.evaluate("b")
    with pytest.raises(ConfigError, match=r"evaluate\('prompt'\) asks for an eval set by name.*one set without a name"):
        build("sft", eval_dataset=rows).evaluate("prompt")
    with pytest.raises(TypeError, match="predict got a dict"):
        named.predict({"a": rows})
    with pytest.raises(TypeError, match="eval dataset is a list"):
        named.evaluate([{"text": "a"}])


def test_sets_without_rows(build):
    rows = build.raw["dpo"]
    nothing = Dataset.from_list(rows).select([])
    with pytest.raises(DataFormatError, match="eval_b dataset has no rows"):
        build("dpo", eval_dataset={"a": Dataset.from_list(rows), "b": nothing})
    trainer = build("dpo", max_length=16)
    with pytest.raises(DataFormatError, match="eval dataset has no rows"):
        trainer.evaluate(nothing)
    too_long = [row | {"prompt": "and so on " * 20} for row in rows]
    with pytest.raises(DataFormatError, match="eval_a set gave no row that could be evaluated"):
        trainer.evaluate({"a": stream(too_long)})
    with pytest.raises(DataFormatError, match="fills max_length"):
        trainer.evaluate({"a": Dataset.from_list(too_long)})


# ---- honest means ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
def test_sft_loss_is_the_mean_over_tokens(build, tiny_model, tokenizer, drop_last):
    """Five rows by twos; also where training drops what does not fill a batch, no row escapes evaluation."""
    rows = build.raw["sft"][:5]
    trainer = build("sft", eval_dataset=Dataset.from_list(rows), dataloader_drop_last=drop_last)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(slow_token_mean(tiny_model(), tokenizer, rows, "completion"), rel=1e-5)
    assert trainer.args.dataloader_drop_last is drop_last


LOSSES = {"sigmoid": {}, "rpo": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}}
LOSSES |= {"aot": {"loss_type": "aot"}, "aot_unpaired": {"loss_type": "aot_unpaired"}, "wpo": {"use_weighting": True}}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_size_of_eval_batches_changes_no_metric(build, tiny_model, loss):
    """Losses that look at several rows see the whole set, as they see all rows of a step in training."""
    trainer = build("dpo", ref_model=tiny_model(seed=1), **LOSSES[loss])
    rows = Dataset.from_list(build.raw["dpo"])
    trainer.args.per_device_eval_batch_size = 8
    whole = numbers(trainer.evaluate(rows))
    assert abs(whole["eval_loss"] - math.log(2)) > 1e-3
    for size in (1, 3):
        trainer.args.per_device_eval_batch_size = size
        assert numbers(trainer.evaluate(rows)) == pytest.approx(whole, rel=1e-5, abs=1e-6), size


def test_likelihood_of_chosen_is_the_mean_over_tokens(build, tiny_model, tokenizer):
    rows = build.raw["dpo"][:5]
    trainer = build("dpo", loss_type="sft")
    expected = slow_token_mean(tiny_model(), tokenizer, rows, "chosen")
    assert trainer.evaluate(Dataset.from_list(rows))["eval_loss"] == pytest.approx(expected, rel=1e-5)


# ---- the user's own metrics -----------------------------------------------------------------------------------------


class Accuracy:
    """Share of right tokens, over whole sets or batch by batch."""

    def __init__(self):
        self.right = self.total = self.calls = 0
        self.last = None

    def __call__(self, prediction, compute_result=True):
        self.calls, self.last = self.calls + 1, prediction
        scored = np.asarray(prediction.label_ids)[:, 1:]
        best = np.asarray(prediction.predictions)[:, :-1]
        self.right += (best == scored)[scored != -100].sum()
        self.total += (scored != -100).sum()
        return {"acc": float(self.right / self.total)} if compute_result else {}


@pytest.mark.parametrize("way", [{}, {"eval_accumulation_steps": 1}, {"batch_eval_metrics": True}], ids=str)
def test_own_metrics(build, way):
    """R085: the accuracy from argmaxed logits is the one that the trainer computes from its scores."""
    accuracy = Accuracy()
    trainer = build(
        "sft", eval_dataset=Dataset.from_list(build.raw["sft"][:5]), compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1), **way,
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert accuracy.calls == (3 if "batch_eval_metrics" in way else 1)
    assert metrics["eval_acc"] == pytest.approx(metrics["eval_mean_token_accuracy"], rel=1e-6)


def test_own_metrics_get_inputs_and_losses(build):
    rows = build.raw["sft"][:3]
    accuracy = Accuracy()
    trainer = build(
        "sft", eval_dataset=Dataset.from_list(rows), compute_metrics=accuracy, include_for_metrics=["inputs", "loss"],
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert [ids[ids != -100].tolist() for ids in accuracy.last.inputs] == trainer.eval_dataset["input_ids"][:]
    assert len(accuracy.last.losses) == 4 and metrics["eval_loss"] > 0


def test_own_metrics_of_pairs(build):
    seen = {}

    def look(prediction):
        seen["shapes"] = prediction.predictions.shape, prediction.label_ids.shape
        return {"scored": int((prediction.label_ids != -100).sum())}

    rows = Dataset.from_list(build.raw["dpo"][:3])
    trainer = build("dpo", eval_dataset={"a": rows}, compute_metrics=look)
    metrics = trainer.evaluate()
    (branches, width, vocabulary), labels = seen["shapes"]
    assert branches == 6 and labels == (6, width) and vocabulary == trainer.model.config.vocab_size
    tokens = sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in trainer.eval_dataset["a"])
    assert metrics["eval_a_scored"] == tokens


def test_no_logits_unless_asked_for(build, monkeypatch):
    """R185: evaluation keeps no tensor of tokens by vocabulary."""
    trainer = build("sft", eval_dataset=Dataset.from_list(build.raw["sft"]))
    monkeypatch.setattr(trainer, "plain_logits", lambda *a: pytest.fail("logits were computed"))
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_predict(build, kind):
    rows = build.raw[kind][:3]
    trainer = build(kind, eval_dataset=Dataset.from_list(rows))
    output = trainer.predict(Dataset.from_list(rows))
    expected = trainer.evaluate()
    assert output.metrics["test_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert output.predictions.shape[:2] == output.label_ids.shape
    assert len(output.predictions) == (6 if kind == "dpo" else 3)
    assert trainer.predict(stream(rows)).metrics["test_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


# ---- the best model -------------------------------------------------------------------------------------------------


def test_the_best_model_by_a_metric_of_one_of_several_sets(build, tmp_path):
    """R037: the model at the end is the checkpoint with the best value; stopping early works on it too."""
    rows = build.raw["dpo"]
    trainer = build(
        "dpo", eval_dataset={"a": Dataset.from_list(rows[:2]), "b": Dataset.from_list(rows[2:4])}, max_steps=12,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="a_rewards/margins", greater_is_better=False, learning_rate=0.1, save_total_limit=1,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    trainer.train()
    margins = logged(trainer, "eval_a_rewards/margins")
    assert trainer.state.best_metric == min(margins) and len(margins) < 6
    best = tmp_path / "run" / f"checkpoint-{2 * (1 + int(np.argmin(margins)))}"
    assert trainer.state.best_model_checkpoint == str(best)
    saved = load_file(best / "model.safetensors")
    assert all(torch.equal(p, saved[name]) for name, p in trainer.model.state_dict().items() if name in saved)


def test_a_best_metric_of_no_set_is_named_at_once(build):
    rows = Dataset.from_list(build.raw["dpo"])
    best = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    with pytest.raises(ConfigError, match="metric_for_best_model='loss'.*eval_a_loss"):
        build("dpo", eval_dataset={"a": rows, "b": rows}, **best)
    build("dpo", eval_dataset={"a": rows}, metric_for_best_model="eval_a_loss", **best)
