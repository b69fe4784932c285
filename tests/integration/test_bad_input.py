"""What goes wrong on a first day: each is one error that names the thing and the remedy, before a model is loaded."""

from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from preftune import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from preftune.errors import ConfigError, DataFormatError, ReferenceError
from preftune.trainers import base
from tests.support.runs import logged, options


def dpo(tmp_path, model, tokenizer, rows, **changes):
    extra = {k: changes.pop(k) for k in ("ref_model", "eval_dataset", "peft_config", "data_collator") if k in changes}
    dataset = Dataset.from_list(rows) if isinstance(rows, list) else rows
    args = DPOConfig(**options(tmp_path, **changes))
    return DPOTrainer(model, args=args, train_dataset=dataset, processing_class=tokenizer, **extra)


@pytest.mark.parametrize(
    "rows,words",
    [
        (None, "train_dataset is missing"),
        ([{"prompt": "a", "chosen": "", "rejected": "c"}] * 3, "empty"),
        ([{"prompt": "a", "chosen": "same", "rejected": "same"}] * 3, "equal"),
        ([{"prompt": "a", "chosen": 3, "rejected": "c"}], "chosen"),
        ([{"prompt": "a", "chosen": None, "rejected": "c"}], "chosen"),
        ([{"question": "a", "good": "b", "bad": "c"}], "columns"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, tokenizer, rows, words, monkeypatch):
    monkeypatch.setattr(
        base, "load_model", lambda *a, **k: pytest.fail("the model was loaded before the data were read")
    )
    with pytest.raises(DataFormatError, match=words):
        dpo(tmp_path, "no-such-model", tokenizer, rows)


def test_other_names_of_columns(tmp_path, tiny_model, tokenizer):
    rows = [{"question": "What?", "good": " This.", "bad": " That, or so."}] * 4
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    trainer = dpo(tmp_path, tiny_model(), tokenizer, rows, columns=columns, max_steps=1)
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.parametrize(
    "data", [DatasetDict({"train": Dataset.from_list([{"a": 1}])}), [{"prompt": "a"}]], ids=["dict", "list"]
)
def test_a_dataset_of_another_type(tmp_path, tokenizer, data):
    args = DPOConfig(**options(tmp_path))
    with pytest.raises((TypeError, DataFormatError), match=r"Dataset|split"):
        DPOTrainer("no-such-model", args=args, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize("variant", ["no_pad", "pad_is_eos", "bos"])
def test_odd_tokenizers_train(tmp_path, tiny_model, make_tokenizer, preference_rows, variant):
    trainer = dpo(tmp_path, tiny_model(), make_tokenizer(variant), preference_rows["text"], max_steps=1)
    trainer.train()
    assert logged(trainer, "loss") == [pytest.approx(0.693147, abs=1e-5)]


@pytest.mark.parametrize(
    "variant,form,words", [("no_template", "messages", "chat template"), ("no_eos", "text", "(?i)eos|end-of-sequence")]
)
def test_tokenizers_that_cannot_do_it(tmp_path, tiny_model, make_tokenizer, preference_rows, variant, form, words):
    with pytest.raises((ConfigError, DataFormatError), match=words):
        dpo(tmp_path, tiny_model(), make_tokenizer(variant), preference_rows[form])


def test_models_that_are_not_there(tmp_path, tokenizer, preference_rows):
    with pytest.raises(ConfigError, match="no-such-model"):
        dpo(tmp_path, "no-such-model", tokenizer, preference_rows["text"])
    with pytest.raises(ConfigError, match="processing_class"):
        dpo(tmp_path, "no-such-model", None, preference_rows["text"])


def test_options_that_contradict(tmp_path, tiny_model, tokenizer, preference_rows):
    rows = preference_rows["text"]
    policy = tiny_model()
    with pytest.raises((ConfigError, ReferenceError), match="policy itself"):
        dpo(tmp_path, policy, tokenizer, rows, ref_model=policy)
    with pytest.raises(ConfigError, match="precompute_ref_log_probs"):
        dpo(tmp_path, tiny_model(), tokenizer, rows, sync_ref_model=True, precompute_ref_log_probs=True)
    with pytest.raises(ConfigError, match="model_init_kwargs"):
        dpo(tmp_path, tiny_model(), tokenizer, rows, model_init_kwargs={"revision": "x"})
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="pad_token='<nope>'"):
        dpo(tmp_path, tiny_model(), tokenizer, rows, pad_token="<nope>")
    with pytest.raises(TypeError, match="PeftConfig"):
        dpo(tmp_path, tiny_model(), tokenizer, rows, peft_config={"r": 4})


def test_streaming_trains_and_evaluates(tmp_path, tiny_model, tokenizer, preference_rows):
    stream = IterableDataset.from_generator(lambda: iter(preference_rows["text"]))
    listed = dpo(tmp_path / "a", tiny_model(), tokenizer, preference_rows["text"], train_sampling_strategy="sequential")
    streamed = dpo(tmp_path / "b", tiny_model(), tokenizer, stream, eval_dataset=stream)
    listed.train()
    streamed.train()
    assert logged(streamed, "loss") == pytest.approx(logged(listed, "loss"), rel=1e-6)
    assert streamed.evaluate()["eval_loss"] > 0


def test_an_output_folder_that_cannot_be_written(tmp_path, tiny_model, tokenizer, preference_rows):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="output_dir"):
        dpo(tmp_path / "file" / "out", tiny_model(), tokenizer, preference_rows["text"])


def test_a_collator_without_a_tree(tmp_path, tiny_model, tokenizer, preference_rows):
    trainer = dpo(tmp_path, tiny_model(), tokenizer, preference_rows["text"], data_collator=lambda rows: {"rows": rows})
    with pytest.raises(DataFormatError, match="PromptTree"):
        trainer.train()


def test_extra_columns_reach_a_collator(tmp_path, tiny_model, tokenizer, preference_rows):
    """R075: remove_unused_columns=False keeps them."""
    seen = []

    def collate(rows):
        seen.extend(row["w"] for row in rows)
        return default(rows)

    rows = [row | {"w": float(i)} for i, row in enumerate(preference_rows["text"])]
    trainer = dpo(
        tmp_path, tiny_model(), tokenizer, rows, data_collator=collate, remove_unused_columns=False, max_steps=1
    )
    default = trainer.default_collator()
    trainer.train()
    assert set(seen) <= {float(i) for i in range(8)} and len(seen) >= 2


def test_rows_lost_are_told(tmp_path, tiny_model, tokenizer, caplog):
    """R057, R060: a prompt that fills max_length drops its row; a cut answer is counted."""
    rows = [
        {"prompt": "long " * 40, "chosen": " yes", "rejected": " no"},
        {"prompt": "Why?", "chosen": " because " * 30, "rejected": " no"},
        {"prompt": "Why?", "chosen": " so", "rejected": " no"},
    ]
    trainer = dpo(tmp_path, tiny_model(), tokenizer, rows, max_length=32)
    assert len(trainer.train_dataset) == 2
    assert "1 (row 0) with a prompt that fills max_length" in caplog.text
    assert "Cut to max_length: 1 (row 1)" in caplog.text


def test_no_arguments_at_all(tmp_path, tiny_model, tokenizer, sft_rows, monkeypatch):
    """args=None works on a machine without an accelerator (C6), into a folder named after the model."""
    monkeypatch.chdir(tmp_path)
    trainer = SFTTrainer(tiny_model(), train_dataset=Dataset.from_list(sft_rows["text"]), processing_class=tokenizer)
    assert trainer.args.output_dir.endswith("-SFT") and isinstance(trainer.args, SFTConfig)
