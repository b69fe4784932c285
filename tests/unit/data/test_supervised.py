"""`prepare_sft`: which tokens are scored, for every form of row; checked by decoding what has a label.

Labels stand at their own token: the decoded scored part is exactly the text that should be learnt.
"""

from __future__ import annotations

import pytest
from datasets import Dataset

from preftune.data.tokenize import prepare_sft
from preftune.errors import ConfigError, DataFormatError
from tests.support.tokenizers import CHAT_TEMPLATE


def ask(content):
    return {"role": "user", "content": content}


def say(content):
    return {"role": "assistant", "content": content}


def prepare(rows, tokenizer, **how):
    return prepare_sft(Dataset.from_list(rows), tokenizer, **{"max_length": None, **how})


def scored(row):
    assert len(row["input_ids"]) == len(row["labels"])
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"]))
    return [token for token, label in zip(row["input_ids"], row["labels"]) if label != -100]


def parts(tokenizer, rows, **how):
    """Whole text and scored text of each prepared row."""
    dataset = prepare(rows, tokenizer, **how).dataset
    return [(tokenizer.decode(row["input_ids"]), tokenizer.decode(scored(row))) for row in dataset]


def test_text(tokenizer, sft_rows):
    wanted = [row["text"] + "<eos>" for row in sft_rows["text"]]
    assert parts(tokenizer, sft_rows["text"]) == [(text, text) for text in wanted]
    body = [{"body": row["text"], "text": 3} for row in sft_rows["text"]]
    assert parts(tokenizer, body, dataset_text_field="body") == [(text, text) for text in wanted]
    assert parts(tokenizer, [{"text": "one<eos>"}]) == [("one<eos>", "one<eos>")]
    assert parts(tokenizer, [{"text": "one"}], eos_token="<|im_end|>") == [("one<|im_end|>", "one<|im_end|>")]


def test_messages(tokenizer, sft_rows):
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in sft_rows["messages"]]
    for form in ("messages", "sharegpt"):
        assert parts(tokenizer, sft_rows[form]) == [(text, text) for text in texts]
    # A prompt column beside whole conversations is no prompt.
    both = [{**row, "prompt": "something"} for row in sft_rows["messages"]]
    assert parts(tokenizer, both) == [(text, text) for text in texts]


def test_only_completions_are_scored(tokenizer, sft_rows):
    row = sft_rows["prompt_completion"][0]
    whole, answer = row["prompt"] + row["completion"] + "<eos>", row["completion"] + "<eos>"
    assert parts(tokenizer, [row]) == [(whole, answer)]
    assert parts(tokenizer, [row], completion_only_loss=False) == [(whole, whole)]
    row = sft_rows["prompt_completion_messages"][0]
    whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
    assert parts(tokenizer, [row]) == [(whole, row["completion"][0]["content"] + "<|im_end|>\n")]
    assert parts(tokenizer, [row], completion_only_loss=False) == [(whole, whole)]


def test_bos_exactly_once_and_never_a_completion(make_tokenizer, sft_rows):
    bos = make_tokenizer("bos")
    for form in ("text", "messages", "prompt_completion", "prompt_completion_messages"):
        for row in prepare(sft_rows[form], bos).dataset:
            assert row["input_ids"][0] == bos.bos_token_id
            assert row["input_ids"].count(bos.bos_token_id) == 1
            if form.startswith("prompt"):
                assert row["labels"][0] == -100


def test_assistant_turns_only(tokenizer):
    messages = [ask("q"), say("one"), ask("r"), say("two")]
    ((whole, answers),) = parts(tokenizer, [{"messages": messages}], assistant_only_loss=True)
    assert whole == tokenizer.apply_chat_template(messages, tokenize=False)
    assert answers == "one<|im_end|>two<|im_end|>"
    # With a prompt that has turns of the assistant, the completion's turns only.
    row = {"prompt": messages[:3], "completion": messages[3:]}
    assert parts(tokenizer, [row], assistant_only_loss=True) == [(whole, "two<|im_end|>")]
    both = parts(tokenizer, [row], assistant_only_loss=True, completion_only_loss=False)
    assert both == [(whole, "one<|im_end|>two<|im_end|>")]


def test_assistant_turns_longer_than_max_length(tokenizer):
    """Mask and ids are cut alike, and what has nothing left to score is dropped and counted, not an error."""
    rows = [{"messages": [ask("q"), say("x" * 80)]}, {"messages": [ask("q" * 80), say("x")]}]
    prepared = prepare(rows, tokenizer, assistant_only_loss=True, max_length=64)
    (row,) = prepared.dataset
    assert len(row["input_ids"]) == len(row["labels"]) == 64
    assert tokenizer.decode(scored(row)).strip("x") == ""
    assert prepared.report.to_dict()["dropped"] == {"nothing_scored": {"count": 1, "rows": [1]}}


def test_templates_without_markers(make_tokenizer, sft_rows):
    unmarked = make_tokenizer("no_markers")
    derived = prepare(sft_rows["messages"], unmarked, assistant_only_loss=True).dataset
    with pytest.raises(ConfigError, match="has no chat template"):
        prepare(sft_rows["messages"], make_tokenizer("no_template"), assistant_only_loss=True)
    marked = prepare(sft_rows["messages"], unmarked, assistant_only_loss=True, chat_template=CHAT_TEMPLATE).dataset
    assert unmarked.decode(scored(marked[1])) == "four.<|im_end|>"
    assert derived[:] == marked[:]


@pytest.mark.parametrize("field", ["text", "body"])
def test_formatting_func_counts_whatever_the_text_field_is(tokenizer, field):
    rows = [{"body": "no", "text": "no", "q": "2+2", "a": "4"}]
    got = parts(tokenizer, rows, formatting_func=lambda row: f"{row['q']}={row['a']}", dataset_text_field=field)
    assert got == [("2+2=4<eos>", "2+2=4<eos>")]
    with pytest.raises(DataFormatError, match="row 0: formatting_func returned list"):
        prepare(rows, tokenizer, formatting_func=lambda row: [row["q"]])


def test_rows_without_a_scored_token_are_dropped(tokenizer):
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "long " * 9, "completion": "a"}]
    prepared = prepare(rows, tokenizer, max_length=5)
    assert len(prepared.dataset) == 1
    assert "1 (row 1) with no token to score" in str(prepared.report)
    with pytest.raises(DataFormatError, match="none of the 1 rows .* no token to score"):
        prepare([{"text": ""}], tokenizer)  # only an EOS, which nothing predicts


def test_rows_of_ids_are_used_as_they_are(tokenizer):
    def formatting_func(row):
        raise AssertionError("rows of ids need no formatting")

    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 9, 7], "text": "ignored"}]
    with pytest.warns(UserWarning, match="tokenized already, so formatting_func is not used"):
        (row,) = prepare(rows, tokenizer, formatting_func=formatting_func).dataset
    assert row == {"input_ids": [5, 6, 7], "labels": [-100, 9, 7]}
    (row,) = prepare([{"input_ids": [5, 6, 7]}], tokenizer).dataset
    assert row["labels"] == [5, 6, 7]
    masks = {"completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}
    (row,) = prepare([{"input_ids": [5, 6, 7], **masks}], tokenizer).dataset
    assert row == {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2, 3, 4], "labels": [1, 2]}, "row 0: 'labels' has 2 values and 'input_ids' has 4"),
        (
            {"input_ids": [1, 2, 3], "completion_mask": [1]},
            "row 0: 'completion_mask' has 1 values and 'input_ids' has 3",
        ),
        ({"input_ids": [1, 2, 3], "assistant_masks": [1] * 4}, "row 0: 'assistant_masks' has 4 values"),
        ({"input_ids": "text"}, "row 0, column 'input_ids': found 'text'; wanted a list of token ids"),
    ],
)
def test_wrong_rows_of_ids(tokenizer, row, message):
    with pytest.raises(DataFormatError, match=message):
        prepare([row], tokenizer)


def test_truncation_is_of_each_row_and_reported(tokenizer):
    rows = [{"input_ids": list(range(6, 26))}, {"input_ids": [7, 8]}]
    kept = {"keep_start": list(range(6, 14)), "keep_end": list(range(18, 26))}
    for mode, ids in kept.items():
        prepared = prepare(rows, tokenizer, max_length=8, truncation_mode=mode)
        assert prepared.dataset["input_ids"][:] == [ids, [7, 8]]
        assert prepared.dataset["labels"][:] == [ids, [7, 8]]
        assert prepared.report.to_dict()["cut"] == {"count": 1, "rows": [0], "tokens": 12}
    assert prepare(rows, tokenizer, max_length=None).dataset["input_ids"][0] == list(range(6, 26))


def test_number_of_scored_tokens(tokenizer):
    """Row of prompt 3 and answer 2: two loss terms, and both are the answer."""
    (row,) = prepare([{"input_ids": [6, 7, 8, 9, 10], "completion_mask": [0, 0, 0, 1, 1]}], tokenizer).dataset
    assert scored(row) == [9, 10]
