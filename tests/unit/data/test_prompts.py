"""Prompt rows: ids as the chat template or the tokenizer writes them, every other column kept."""

from __future__ import annotations

import pytest
from datasets import Dataset

from preftune.data.prompts import prepare_prompts
from preftune.errors import DataFormatError


def test_text_and_messages(tokenizer):
    text = prepare_prompts(Dataset.from_list([{"prompt": "the cat", "solution": "7"}]), tokenizer)
    assert text.dataset[0]["prompt_ids"] == tokenizer("the cat")["input_ids"]
    assert text.dataset[0]["solution"] == "7" and text.dataset[0]["prompt"] == "the cat"
    messages = [{"role": "user", "content": "the cat"}]
    chat = prepare_prompts(Dataset.from_list([{"prompt": messages}]), tokenizer)
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.dataset[0]["prompt_ids"] == tokenizer(written, add_special_tokens=False)["input_ids"]


def test_bos_once(make_tokenizer):
    tokenizer = make_tokenizer("bos")
    rows = Dataset.from_list([{"prompt": "the cat"}, {"prompt": tokenizer.bos_token + "the cat"}])
    ids = prepare_prompts(rows, tokenizer).dataset["prompt_ids"]
    assert list(ids[0]) == list(ids[1]) and list(ids[0]).count(tokenizer.bos_token_id) == 1


def test_ids_are_taken_as_they_are_and_empty_prompts_are_reported(tokenizer):
    rows = Dataset.from_list([{"prompt_ids": [1, 2], "n": 0}, {"prompt_ids": [], "n": 1}])
    prepared = prepare_prompts(rows, tokenizer)
    assert prepared.dataset["n"] == [0] and prepared.report.rows_dropped == 1


def test_columns_by_other_names(tokenizer):
    rows = Dataset.from_list([{"question": "the cat", "answer": "7"}])
    prepared = prepare_prompts(rows, tokenizer, columns={"prompt": "question"})
    assert prepared.dataset[0]["prompt"] == "the cat" and prepared.dataset[0]["answer"] == "7"
    with pytest.raises(DataFormatError, match="prompt=question"):
        prepare_prompts(rows, tokenizer)


def test_a_stream_keeps_its_columns(tokenizer):
    stream = Dataset.from_list([{"prompt": "the cat", "n": 1}, {"prompt": "a dog", "n": 2}]).to_iterable_dataset()
    prepared = list(prepare_prompts(stream, tokenizer).dataset)
    assert [row["n"] for row in prepared] == [1, 2]
    assert prepared[1]["prompt_ids"] == tokenizer("a dog")["input_ids"]
