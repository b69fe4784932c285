"""Reward training from rows to a model that scores: what changes nothing, honest metrics, heads that are kept."""

from __future__ import annotations

import copy
import math
import signal

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from preftune import RewardConfig, RewardTrainer
from preftune.errors import ConfigError, DataFormatError
from preftune.trainers import base
from tests.integration.test_examples import load
from tests.support.runs import die, digest, killed, logged, options

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
EXTRA = ("peft_config", "eval_dataset", "compute_metrics", "callbacks")
# without clipping, which would hide a gradient that is a multiple of the right one
SGD = {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 0.0, "train_sampling_strategy": "sequential"}


@pytest.fixture
def build(tmp_path, tiny_model, tokenizer, preference_rows):
    """`build(rows=None, model=None, **options)`: a trainer on eight pairs of texts."""

    def make(rows=None, model=None, folder="run", processing_class=tokenizer, **changes):
        extra = {k: changes.pop(k) for k in EXTRA if k in changes}
        rows = preference_rows["text"] if rows is None else rows
        return RewardTrainer(
            model if model is not None else tiny_model(head="value"),
            args=RewardConfig(**options(tmp_path / folder, **changes)),
            train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
            processing_class=processing_class,
            **extra,
        )

    return make


def slow_scores(model, tokenizer, rows):
    """`[rows, 2]` through the classifier itself, one text at a time in float64."""
    model = copy.deepcopy(model).double().eval()

    def score(text):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return model(torch.tensor([ids])).logits.item()

    return np.array([[score(row["prompt"] + row[side]) for side in ("chosen", "rejected")] for row in rows])


def weights_of(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_loss_and_metrics_by_hand(build, tiny_model, tokenizer, preference_rows):
    """Two steps of four pairs in one log: means, and true extremes, over all eight (learning rate 0)."""
    model, rows = tiny_model(head="value"), preference_rows["text"]
    order = np.argsort(slow_scores(model, tokenizer, rows).min(1))  # so that both extremes are in the first step
    rows = [rows[n] | {"margin": 0.25 * n} for n in order]
    scores = slow_scores(model, tokenizer, rows)
    assert scores[4:].min() > scores.min() and scores[4:].max() < scores.max()
    trainer = build(
        rows, center_rewards_coefficient=0.1, learning_rate=0.0, max_steps=2, logging_steps=2,
        per_device_train_batch_size=4, **{"train_sampling_strategy": "sequential"},
    )  # fmt: skip
    trainer.train()
    chosen, rejected = scores.T
    gaps = chosen - rejected - np.array([row["margin"] for row in rows])
    wanted = {
        "loss": np.mean([math.log1p(math.exp(-gap)) for gap in gaps] + 0.1 * (chosen + rejected) ** 2),
        "mean_reward": scores.mean(),
        "min_reward": scores.min(),
        "max_reward": scores.max(),
        "accuracy": (chosen > rejected).mean(),
        "margin": (chosen - rejected).mean(),
        "num_tokens": sum(
            len(ids) for row in trainer.train_dataset for ids in (row["chosen_ids"], row["rejected_ids"])
        ),
    }
    assert 0 < wanted["accuracy"] < 1
    for name, value in wanted.items():
        assert logged(trainer, name)[0] == pytest.approx(value, rel=1e-5), name


def test_how_a_step_is_cut_changes_nothing(build, preference_rows):
    """Batch 4, 2 x 2, a token budget and the padded layout give the same weights; so does recomputing activations."""
    rows = [row | {"margin": 0.1 * n} for n, row in enumerate(preference_rows["text"])]

    def run(**changes):
        trainer = build(rows, max_steps=2, center_rewards_coefficient=0.1, **SGD, **changes)
        start = weights_of(trainer)
        trainer.train()
        return weights_of(trainer), (weights_of(trainer) - start).abs().max(), logged(trainer, "loss")

    whole, moved, losses = run(per_device_train_batch_size=4, attention_layout="tree")
    assert moved > 1e-3
    for cut in (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 4, "max_tokens_per_micro_batch": 40},
        {"per_device_train_batch_size": 4, "attention_layout": "padded"},
        {"per_device_train_batch_size": 4, "gradient_checkpointing": True},
    ):
        weights, _, again = run(**cut)
        assert (weights - whole).abs().max() < 1e-6, cut
        assert again == pytest.approx(losses, rel=1e-6), cut


def test_it_learns_and_is_measured(build, tokenizer, preference_rows):
    trainer = build(max_steps=10, per_device_train_batch_size=8, learning_rate=1e-3, per_device_eval_batch_size=3)
    rows = Dataset.from_list(preference_rows["text"])
    before = trainer.score_pairs(rows)
    slow = slow_scores(trainer.model, tokenizer, preference_rows["text"])
    assert np.allclose(np.stack([before.chosen_scores, before.rejected_scores], 1), slow, atol=1e-4)
    trainer.train()
    after = trainer.score_pairs(rows)
    assert after.shares["accuracy"].value == 1.0 > before.accuracy.value and after.accuracy.n == 8
    assert "pair accuracy: 1.000" in str(after) and "mean score: chosen" in str(after)
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]


def test_evaluation_and_prediction(build, tokenizer, preference_rows):
    """Predictions are the two scores of each row, labels say that column 0 is the better; W18: no row counts twice."""
    rows = preference_rows["text"]
    seen = []

    def accuracy(prediction):
        seen.append(prediction)
        return {"mine": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}

    trainer = build(
        rows[:4], eval_dataset=Dataset.from_list(rows), compute_metrics=accuracy, per_device_eval_batch_size=3,
        include_for_metrics=["inputs"],
    )  # fmt: skip
    metrics = trainer.evaluate()
    slow = slow_scores(trainer.model, tokenizer, rows)
    assert np.allclose(seen[0].predictions, slow, atol=1e-4) and seen[0].label_ids.tolist() == [0] * 8
    chosen = [[i for i in ids if i >= 0] for ids in seen[0].inputs[:, :, 0].tolist()]
    assert chosen == trainer.eval_dataset["chosen_ids"][:]
    assert metrics["eval_mine"] == metrics["eval_accuracy"] == (slow[:, 0] > slow[:, 1]).mean()
    assert metrics["eval_min_reward"] == pytest.approx(slow.min(), rel=1e-4)
    assert metrics["eval_mean_reward"] == pytest.approx(slow.mean(), rel=1e-4)
    assert np.allclose(trainer.predict(Dataset.from_list(rows)).predictions, slow, atol=1e-4)


def test_the_model_that_is_saved_scores_the_same(build, tmp_path, tokenizer, tiny_model, preference_rows):
    """From a causal checkpoint by name, full training: transformers' own class gives the scores, in a padded batch."""
    tiny_model().save_pretrained(tmp_path / "causal")
    trainer = build(model=str(tmp_path / "causal"), max_steps=2)
    trainer.train()
    trainer.save_model()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert model.num_labels == 1
    table = trainer.score_pairs(Dataset.from_list(preference_rows["text"]))
    saved = AutoTokenizer.from_pretrained(tmp_path / "run")
    texts = [row["prompt"] + row["chosen"] + saved.eos_token for row in preference_rows["text"]]
    with torch.no_grad():
        batch = saved(texts, padding=True, return_tensors="pt")
        scores = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert np.allclose(scores.numpy(), table.chosen_scores, atol=1e-5)


@pytest.mark.parametrize("task", ["SEQ_CLS", "CAUSAL_LM"])
def test_an_adapter_is_saved_with_its_head(build, tmp_path, tiny_model, preference_rows, task):
    """R132: five steps, save, load on a fresh base: the same scores; base weights stay as they were."""
    tiny_model().save_pretrained(tmp_path / "causal")
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type=task)
    trainer = build(model=str(tmp_path / "causal"), peft_config=config, max_steps=5)
    base_weights = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    head = trainer.model.score.weight.clone()
    trainer.train()
    assert not torch.equal(trainer.model.score.weight, head)
    assert all(torch.equal(p, base_weights[n]) for n, p in trainer.model.named_parameters() if n in base_weights)
    trainer.save_model()
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "run", num_labels=1)
    rows = Dataset.from_list(preference_rows["text"])
    again = build(model=loaded, folder="again").score_pairs(rows)
    assert np.allclose(again.chosen_scores, trainer.score_pairs(rows).chosen_scores, atol=1e-6)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_killed_and_resumed(build, preference_rows, lora):
    common = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3,
        "gradient_accumulation_steps": 2, "peft_config": LORA if lora else None,
    }  # fmt: skip
    rows = preference_rows["text"] * 2
    straight = build(rows, folder="a", **common)
    straight.train()

    def run():
        trainer = build(rows, folder="b", **common)
        save = base.save_running_state
        base.save_running_state = lambda *a: die() if trainer.state.global_step == 4 else save(*a)
        trainer.train()

    assert killed(run) == signal.SIGKILL
    resumed = build(rows, folder="b", **common)
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed) == digest(straight)
    # the log of steps 1 to 3 spans the checkpoint of step 2
    for name in ("loss", "min_reward", "max_reward", "accuracy", "num_tokens"):
        assert logged(resumed, name) == logged(straight, name), name


def test_special_tokens(build, make_tokenizer, tiny_model, preference_rows):
    """Without a padding token the EOS token pads, in a copy; the score is then read at the token before it."""
    given = make_tokenizer("no_pad")
    trainer = build(processing_class=given)
    assert given.pad_token is None and trainer.processing_class.pad_token == "<eos>"
    assert trainer.model.config.pad_token_id == given.eos_token_id
    model = tiny_model(head="value").double()
    row = preference_rows["text"][0]
    ids = given(row["prompt"] + row["chosen"], add_special_tokens=False)["input_ids"]
    table = trainer.score_pairs(Dataset.from_list([row]))
    assert table.chosen_scores[0] == pytest.approx(model(torch.tensor([ids])).logits.item(), rel=1e-4)


def test_template_and_eos_token_are_used_and_saved(build, tmp_path, tokenizer, preference_rows):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}")
    path = str(tmp_path / "t.jinja")
    trainer = build(preference_rows["messages"], chat_template_path=path, peft_config=LORA)
    assert set(trainer.model.peft_config["default"].modules_to_save) == {"score", "classifier"}  # C11: no lm_head
    assert tokenizer.decode(trainer.train_dataset[0]["chosen_ids"]).startswith("[user] What")
    assert trainer.processing_class.chat_template.startswith("{% for m") and tokenizer.chat_template[:3] != "{% "
    trainer = build(eos_token="<|im_end|>")
    assert trainer.train_dataset[0]["chosen_ids"][-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_dropout_is_off_unless_asked_for(build, tiny_model):
    model = tiny_model(head="value", attention_dropout=0.5)
    build(model=model)
    assert model.model.layers[0].self_attn.attention_dropout == 0
    model = tiny_model(head="value", attention_dropout=0.5)
    build(model=model, disable_dropout=False)
    assert model.model.layers[0].self_attn.attention_dropout == 0.5


def test_what_cannot_be_is_refused(build, tiny_model, preference_rows):
    with pytest.raises(ConfigError, match="reward models require `num_labels=1`"):
        build(model=tiny_model(head="value", num_labels=2))
    with pytest.raises(ConfigError, match="both a PeftModel and a peft_config"):
        build(model=get_peft_model(tiny_model(head="value"), copy.deepcopy(LORA)), peft_config=LORA)
    with pytest.raises(TypeError, match="peft_config is a str"):
        build(peft_config="lora")
    with pytest.raises(DataFormatError, match=r"none of the 8 rows.*max_length"):
        build(max_length=2)
    with pytest.raises(ConfigError, match="overlong='trim'.*drop, cut"):
        build(overlong="trim")
    with pytest.raises(ConfigError, match="router_aux_loss_coef"):
        build(router_aux_loss_coef=0.1)


def test_rows_left_out_are_said(build, caplog):
    rows = [{"prompt": "a " * n, "chosen": "b", "rejected": "c"} for n in (1, 2, 90)]
    build(rows, max_length=32)
    assert "train: 3 rows read, 2 kept. Dropped: 1 (row 2) with more than max_length tokens." in caplog.text


def test_example_runs(tmp_path, tiny_model, tokenizer, preference_rows, capsys):
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = Dataset.from_list(preference_rows["text"] * 2)
    given = options(tmp_path / "out", max_steps=2)
    train = load("reward").train
    trainer = train(str(tmp_path / "model"), rows, given.pop("output_dir"), **given)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() and trainer.eval_dataset is not None
    assert capsys.readouterr().out.count("pair accuracy") == 2
