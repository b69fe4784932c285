"""`prepare_unpaired`: ids and labels of rows in every form, what is refused, and pairs as two rows each.

The oracle is `prepare_preference` for pairs and a rendering of one row at a time for messages.
"""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from preftune.data.tokenize import prepare_preference
from preftune.data.unpaired import prepare_unpaired, read_label
from preftune.errors import ConfigError, DataFormatError

LABELS = [True, False, False, True, True, False, True, False]


def prepare(rows, tokenizer, **how):
    data = rows if not isinstance(rows, list) else Dataset.from_list(rows)
    return prepare_unpaired(data, tokenizer, **{"max_length": None, **how})


def labelled(sft_rows, form="prompt_completion"):
    return [{**row, "label": label} for row, label in zip(sft_rows[form], LABELS)]


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_text(tokenizer, sft_rows):
    rows = labelled(sft_rows)
    prepared = prepare(rows, tokenizer)
    assert set(prepared.dataset.column_names) == {"prompt_ids", "completion_ids", "label"}
    for row, got in zip(rows, prepared.dataset, strict=True):
        assert got["prompt_ids"] == ids(tokenizer, row["prompt"])
        assert got["completion_ids"] == [*ids(tokenizer, row["completion"]), tokenizer.eos_token_id]
        assert got["label"] is row["label"]


@pytest.mark.parametrize("form", ["prompt_completion_messages", "messages", "sharegpt"])
def test_messages(tokenizer, sft_rows, form):
    """The last message of a conversation is the completion; prompt + completion decode to the whole rendering."""
    whole = [
        tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
        for row in sft_rows["prompt_completion_messages"]
    ]
    prepared = prepare(labelled(sft_rows, form), tokenizer).dataset
    for row, text in zip(prepared, whole, strict=True):
        assert tokenizer.decode(row["prompt_ids"] + row["completion_ids"]) == text
        assert tokenizer.decode(row["prompt_ids"]).endswith("<|im_start|>assistant\n")
    assert list(prepared["label"]) == LABELS


def test_of_a_longer_conversation_only_the_last_turn_is_the_completion(tokenizer):
    turns = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    messages = [{"role": role, "content": text} for role, text in turns]
    rows = [{"messages": messages, "label": True}, {"messages": messages[:4], "label": False}]
    prepared = prepare(rows, tokenizer)
    (row,) = prepared.dataset
    assert tokenizer.decode(row["completion_ids"]) == "b<|im_end|>\n"
    assert prepared.report.to_dict()["dropped"] == {"empty_answer": {"count": 1, "rows": [1]}}


@pytest.mark.parametrize("form", ["text", "messages", "implicit_text", "implicit_messages", "sharegpt"])
@pytest.mark.parametrize("streaming", [False, True])
def test_pairs_become_two_rows_each_in_turn(tokenizer, preference_rows, form, streaming):
    """W4: chosen, rejected, chosen, rejected, ... and never a thousand of one kind."""
    pairs = Dataset.from_list(preference_rows[form])
    wanted = prepare_preference(pairs, tokenizer).dataset
    rows = list(prepare(pairs.to_iterable_dataset() if streaming else pairs, tokenizer).dataset)
    assert [row["label"] for row in rows] == [True, False] * len(pairs)
    for place, pair in enumerate(wanted):
        good, bad = rows[2 * place : 2 * place + 2]
        assert good["prompt_ids"] == bad["prompt_ids"] == pair["prompt_ids"]
        assert (good["completion_ids"], bad["completion_ids"]) == (pair["chosen_ids"], pair["rejected_ids"])


def test_ids_are_taken_as_they_are(tokenizer):
    rows = [{"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "label": 1, "extra": "x"}]
    assert list(prepare(rows, tokenizer).dataset) == [{"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "label": 1}]
    once = prepare(rows, tokenizer, max_length=4, keep_columns=["extra"]).dataset
    assert list(once) == [{"prompt_ids": [5, 6], "completion_ids": [7, 8], "label": 1, "extra": "x"}]
    assert list(prepare(once, tokenizer, max_length=4, keep_columns=["extra"]).dataset) == list(once)
    pairs = [{"prompt_ids": [5], "chosen_ids": [6, 7], "rejected_ids": [8], "source": "web"}]
    got = list(prepare(pairs, tokenizer, keep_columns=["source"]).dataset)
    assert [(row["completion_ids"], row["label"], row["source"]) for row in got] == [
        ([6, 7], True, "web"), ([8], False, "web"),
    ]  # fmt: skip


def test_cut_and_dropped(tokenizer):
    prompts = [{"prompt_ids": [1] * n, "completion_ids": [2] * m, "label": True} for n, m in ((3, 4), (5, 9), (8, 1))]
    prepared = prepare(prompts, tokenizer, max_length=8)
    assert [(len(r["prompt_ids"]), len(r["completion_ids"])) for r in prepared.dataset] == [(3, 4), (5, 3)]
    assert prepared.report.cut.rows == [1] and prepared.report.cut_tokens == 6
    assert prepared.report.to_dict()["dropped"] == {"prompt_fills": {"count": 1, "rows": [2]}}
    end = prepare(prompts, tokenizer, max_length=8, truncation_mode="keep_end").dataset
    assert [(len(r["prompt_ids"]), len(r["completion_ids"])) for r in end] == [(3, 4), (7, 1)]
    with pytest.raises(ConfigError, match="truncation_mode='middle' is not known"):
        prepare(prompts, tokenizer, truncation_mode="middle")


def test_empty_completions_are_dropped(tokenizer):
    rows = [{"prompt": "q", "completion": text, "label": True} for text in ("a", "", "  ")]
    prepared = prepare(rows, tokenizer)
    assert len(prepared.dataset) == 1 and prepared.report.rows_dropped == 2


@pytest.mark.parametrize("value", [True, 1, 1.0, np.bool_(True), np.int64(1)])
def test_labels(value):
    assert read_label(value, 0) is True
    assert read_label(type(value)(0), 0) is False


@pytest.mark.parametrize("value", [None, 2, -1, "true", 0.5, float("nan"), [True]])
def test_labels_that_are_none(tokenizer, value):
    with pytest.raises(DataFormatError, match=r"row 7, column 'label'.*wanted true or false"):
        read_label(value, 7)


def test_a_wrong_label_is_named(tokenizer, sft_rows):
    rows = [{**row, "label": label} for row, label in zip(sft_rows["prompt_completion"], [1, 0, 5])]
    with pytest.raises(DataFormatError, match="row 2, column 'label': found int 5"):
        prepare(rows, tokenizer)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b"}, "needs 'label' too. Rows without a label are for SFTTrainer"),
        ({"messages": [{"role": "user", "content": "a"}]}, "needs 'label' too"),
        ({"prompt": "a", "response": "b", "label": True}, r"--columns completion=response"),
        ({"text": "a"}, "'prompt', 'completion', 'label' too"),
        ({"prompt": "a", "completion": "b", "thumbs_up": True}, r"--columns label=thumbs_up"),
        ({"prompt": None, "completion": "b", "label": True}, "row 0, column 'prompt'"),
    ],
)
def test_what_cannot_be_read(tokenizer, row, words):
    with pytest.raises(DataFormatError, match=words):
        prepare([row], tokenizer)


def test_own_column_names(tokenizer):
    rows = [{"question": "q", "answer": "a", "liked": False}]
    (row,) = prepare(rows, tokenizer, columns={"prompt": "question", "completion": "answer", "label": "liked"}).dataset
    assert row["label"] is False and row["prompt_ids"] == ids(tokenizer, "q")
