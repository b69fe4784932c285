"""SFT from rows to weights: which tokens are trained, packing that hides documents from each other, honest means."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, GenerationConfig, TrainingArguments

from preftune import SFTConfig, SFTTrainer
from preftune.errors import ConfigError
from tests.support.runs import logged, options


def build(tmp_path, model, tokenizer, rows, **changes):
    extra = {
        k: changes.pop(k) for k in ("eval_dataset", "compute_metrics", "preprocess_logits_for_metrics") if k in changes
    }
    return SFTTrainer(
        model=model,
        args=SFTConfig(**options(tmp_path, **changes)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **extra,
    )


def slow_nll(model, ids: list[int], keep: list[bool]) -> list[float]:
    """-log p of the kept tokens, one ordinary forward in float64."""
    logps = model.double()(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [-logps[i - 1, t].item() for i, t in enumerate(ids) if keep[i] and i > 0]


def test_loss_is_the_token_mean_of_completions(tmp_path, tiny_model, tokenizer, sft_rows):
    rows = sft_rows["prompt_completion"][:3]
    trainer = build(tmp_path, tiny_model(), tokenizer, rows, max_steps=1, per_device_train_batch_size=3)
    trainer.train()
    model, values = tiny_model().eval(), []
    for row in rows:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        values += slow_nll(model, prompt + answer, [False] * len(prompt) + [True] * len(answer))
    assert logged(trainer, "loss") == [pytest.approx(sum(values) / len(values), rel=1e-5)]


def test_packing_changes_nothing_but_the_rows(tmp_path, tiny_model, tokenizer):
    """R064: one packed row of two documents has the loss of two rows; no token crosses the border."""
    rows = [{"input_ids": [7, 8, 9]}, {"input_ids": [10, 11, 12, 13]}]
    plain = build(tmp_path, tiny_model(), tokenizer, rows, max_steps=1)
    packed = build(tmp_path, tiny_model(), tokenizer, rows, max_steps=1, packing=True, max_length=8)
    assert len(packed.train_dataset) == 1
    plain.train()
    packed.train()
    values = slow_nll(tiny_model().eval(), [7, 8, 9], [True] * 3) + slow_nll(
        tiny_model().eval(), [10, 11, 12, 13], [True] * 4
    )
    assert len(values) == 5
    for trainer in (plain, packed):
        assert logged(trainer, "loss") == [pytest.approx(sum(values) / 5, rel=1e-5)]
    for a, b in zip(plain.model.parameters(), packed.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_assistant_turns_only(tmp_path, tiny_model, tokenizer, sft_rows):
    trainer = build(tmp_path, tiny_model(), tokenizer, sft_rows["messages"], assistant_only_loss=True)
    row, source = trainer.train_dataset[0], sft_rows["messages"][0]["messages"]
    kept = tokenizer.decode([i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100])
    assert kept == source[1]["content"] + "<|im_end|>"


def test_labels_given_are_used(tmp_path, tiny_model, tokenizer):
    rows = [{"input_ids": [7, 8, 9, 10], "labels": [-100, -100, 9, -100]}]
    trainer = build(tmp_path, tiny_model(), tokenizer, rows, max_steps=1, per_device_train_batch_size=1)
    trainer.train()
    expected = slow_nll(tiny_model().eval(), [7, 8, 9, 10], [False, False, True, False])
    assert logged(trainer, "loss") == [pytest.approx(expected[0], rel=1e-5)]


def test_dft_value(tmp_path, tiny_model, tokenizer):
    """mean of p * -log p with p = exp(-nll)."""
    rows = [{"input_ids": [7, 8, 9, 10]}]
    trainer = build(
        tmp_path, tiny_model(), tokenizer, rows, max_steps=1, loss_type="dft", per_device_train_batch_size=1
    )
    trainer.train()
    nll = torch.tensor(slow_nll(tiny_model().eval(), [7, 8, 9, 10], [True] * 4))
    assert logged(trainer, "loss") == [pytest.approx((nll * (-nll).exp()).mean().item(), rel=1e-5)]


def test_best_model_by_a_metric_of_the_trainer(tmp_path, tiny_model, tokenizer, sft_rows):
    """R037: metric_for_best_model finds what evaluate() returns."""
    trainer = build(
        tmp_path, tiny_model(), tokenizer, sft_rows["text"], eval_dataset=Dataset.from_list(sft_rows["text"]),
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, save_total_limit=1,
        metric_for_best_model="eval_mean_token_accuracy", greater_is_better=True, load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric is not None
    assert trainer.state.best_model_checkpoint.startswith(str(tmp_path / "checkpoint-"))


def test_compute_metrics_gets_logits_and_labels(tmp_path, tiny_model, tokenizer, sft_rows):
    """R085: reduced predictions have shape (rows, width); accuracy over the labels."""
    seen = {}

    def accuracy(prediction):
        seen["shape"] = prediction.predictions.shape
        keep = prediction.label_ids != -100
        return {"acc": float((prediction.predictions == prediction.label_ids)[keep].mean())}

    trainer = build(
        tmp_path, tiny_model(), tokenizer, sft_rows["text"], eval_dataset=Dataset.from_list(sft_rows["text"][:4]),
        compute_metrics=accuracy, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert len(seen["shape"]) == 2 and seen["shape"][0] == 4
    assert 0 <= metrics["eval_acc"] <= 1 and "eval_loss" in metrics


@pytest.mark.filterwarnings("ignore:pad_token is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"assistant_only_loss": True}, ConfigError, "messages|conversation"),
        ({"completion_only_loss": True}, ConfigError, "prompt.*completion"),
        ({"eos_token": "<nope>"}, ConfigError, "eos_token='<nope>'"),
        ({"pad_token": "<nope>"}, ConfigError, "pad_token='<nope>'"),
        ({"loss_type": "nlll"}, ConfigError, "nll"),
        ({"packing": True, "packing_strategy": "bdf"}, ConfigError, "bfd"),
    ],
)
def test_mistakes_are_named(tmp_path, tiny_model, tokenizer, sft_rows, changes, error, words):
    with pytest.raises(error, match=words):
        build(tmp_path, tiny_model(), tokenizer, sft_rows["text"], **changes)


def test_a_template_without_marks_scores_the_same_tokens(tmp_path, tiny_model, make_tokenizer, sft_rows):
    """R059: marks are derived from the template; where none can be, the error says why."""
    labels = []
    for variant in ("plain", "no_markers"):
        tokenizer = make_tokenizer(variant)
        trainer = build(tmp_path, tiny_model(), tokenizer, sft_rows["messages"], assistant_only_loss=True)
        labels.append(trainer.train_dataset["labels"][:])
    assert labels[0] == labels[1]
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    with pytest.raises(ConfigError, match="no special token"):
        build(tmp_path, tiny_model(), tokenizer, sft_rows["messages"], assistant_only_loss=True)


def test_rows_taken_as_they_are_are_told(tmp_path, tiny_model, tokenizer, caplog):
    """R074: nothing is cut without preparation, and that is said."""
    rows = [{"input_ids": [10] * 30, "labels": [10] * 30}] * 2
    changes = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": 8, "max_steps": 1}
    trainer = build(tmp_path, tiny_model(), tokenizer, rows, **changes)
    assert "max_length and packing do not act" in caplog.text
    trainer.train()
    assert logged(trainer, "num_tokens")[-1] >= 60


def test_a_mask_without_labels_is_no_label(tmp_path, tiny_model, tokenizer):
    """Taken as they are they would be scored everywhere; with a collator of one's own that is its affair."""
    rows = [{"input_ids": [7, 8, 9], "completion_mask": [0, 1, 1]}] * 2
    skip = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_steps": 1}
    with pytest.raises(ConfigError, match=r"train rows.*'completion_mask' but no 'labels'.*would be scored"):
        build(tmp_path, tiny_model(), tokenizer, rows, **skip)
    trainer = build(tmp_path, tiny_model(), tokenizer, [{**row, "labels": [-100, 8, 9]} for row in rows], **skip)
    with pytest.raises(ConfigError, match="eval rows"):
        trainer.evaluate(Dataset.from_list(rows))
    SFTTrainer(
        tiny_model(), SFTConfig(**options(tmp_path, **skip)), lambda rows: rows, Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip


def test_tokens_and_template_are_used_and_saved(tmp_path, tiny_model, tokenizer, sft_rows):
    """R054: what ended the texts of training ends them afterwards: in tokenizer, config and generation config."""
    (tmp_path / "t.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}")
    changes = {"chat_template_path": str(tmp_path / "t.jinja"), "eos_token": "<|im_end|>", "max_steps": 1}
    trainer = build(tmp_path / "run", tiny_model(), tokenizer, sft_rows["messages"], **changes)
    assert tokenizer.decode(trainer.train_dataset[0]["input_ids"]).startswith("[user] What")
    assert tokenizer.eos_token == "<eos>" and tokenizer.chat_template[0] != "["  # the one given stays as it was
    trainer.train()
    trainer.save_model()
    saved = AutoTokenizer.from_pretrained(tmp_path / "run")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert saved.eos_token_id == trainer.model.config.eos_token_id == end
    assert saved.chat_template.startswith("{% for m in messages %}[")
    assert end in GenerationConfig.from_pretrained(tmp_path / "run").eos_token_id
    text = build(tmp_path / "text", tiny_model(), tokenizer, sft_rows["text"], eos_token="<|im_end|>")
    assert text.train_dataset[0]["input_ids"][-1] == end


def test_an_answer_that_nothing_ends_is_said_aloud(tmp_path, tiny_model, make_tokenizer, sft_rows, caplog):
    """R054: the template ends turns with another token than the one that stops generation."""
    build(tmp_path, tiny_model(), make_tokenizer("plain"), sft_rows["messages"])
    assert "the answer ends with no end-of-sequence token" in caplog.text
    caplog.clear()
    build(tmp_path, tiny_model(), make_tokenizer("plain"), sft_rows["messages"], eos_token="<|im_end|>")
    assert "end-of-sequence" not in caplog.text


def test_arguments_of_transformers_are_taken(tmp_path, tiny_model, tokenizer, sft_rows):
    """R175: a plain TrainingArguments, whose missing options have the defaults of SFTConfig."""
    given = options(tmp_path, max_steps=1)
    trainer = SFTTrainer(
        tiny_model(), TrainingArguments(**given), train_dataset=Dataset.from_list(sft_rows["text"]),
        processing_class=tokenizer,
    )  # fmt: skip
    assert isinstance(trainer.args, SFTConfig) and trainer.args.max_length == 1024
    trainer.train()
    assert len(logged(trainer, "loss")) == 1
