"""Which form rows have, what one row says, and the errors that name row, column, found, wanted and remedy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from datasets import Dataset, IterableDataset

from preftune.data.columns import check_plain, column_names, first_row, rename_columns
from preftune.data.formats import (
    is_conversational,
    is_conversational_from_value,
    maybe_convert_to_chatml,
    preference_source,
    read_preference_row,
    read_supervised_row,
    supervised_source,
)
from preftune.data.report import Outcome
from preftune.errors import ConfigError, DataFormatError


def ask(content):
    return {"role": "user", "content": content}


def say(content):
    return {"role": "assistant", "content": content}


SHAREGPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CHATML = [{"role": "system", "content": "s"}, ask("q"), say("a")]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "q", "chosen": [ask("q"), say("a")], "rejected": [ask("q"), say("b")]}, True),
        ({"prompt": [ask("q")], "completion": "a"}, True),
        ({"messages": [ask("q")]}, True),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, False),
        ({"messages": []}, False),
        ({"messages": None, "prompt": []}, False),
        ({"messages": [{"from": "human", "value": "q"}]}, False),
        ({"text": "t"}, False),
    ],
)
def test_is_conversational(row, answer):
    assert is_conversational(row) is answer
    assert is_conversational(dict(reversed(row.items()))) is answer


def test_is_conversational_does_not_depend_on_the_hash_seed():
    code = (
        "from preftune.data.formats import is_conversational as f; m = [{'role': 'user', 'content': 'q'}]\n"
        "print(f({'prompt': 'q', 'chosen': m, 'rejected': m, 'completion': 'x'}))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert answers == {"True\n"}


def test_from_value_rows():
    row = {"conversations": SHAREGPT, "id": 1}
    assert is_conversational_from_value(row)
    assert maybe_convert_to_chatml(row) == {"messages": CHATML, "id": 1}
    assert row == {"conversations": SHAREGPT, "id": 1}  # nothing is changed in place
    assert not is_conversational_from_value({"conversations": []})
    assert not is_conversational_from_value({"messages": SHAREGPT})
    assert maybe_convert_to_chatml({"messages": CHATML}) == {"messages": CHATML}
    assert maybe_convert_to_chatml({"prompt": SHAREGPT[:2]}) == {"prompt": CHATML[:2]}


PAIR = ([ask("q")], [say("a")], [say("b")])
WHOLE = {"chosen": [ask("q"), say("a")], "rejected": [ask("q"), say("b")]}
TURNS = {"chosen": say("a"), "rejected": say("b")}


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, ("q", "a", "b")),
        ({"chosen": "q a", "rejected": "q b"}, ("q", " a", " b")),
        ({"prompt": None, "chosen": "q a", "rejected": "q b"}, ("q", " a", " b")),
        ({"prompt": [ask("q")], "chosen": [say("a")], "rejected": [say("b")]}, PAIR),
        ({"prompt": "q", "chosen": [say("a")], "rejected": [say("b")]}, PAIR),  # text before messages: a user's turn
        ({"prompt": [ask("q")], "chosen": "a", "rejected": "b"}, PAIR),  # text after messages: an assistant's turn
        (WHOLE, PAIR),
        ({"prompt": "whatever", **WHOLE}, PAIR),  # whole conversations say the prompt themselves
        ({"prompt": [ask("q")], **WHOLE}, PAIR),
        ({"messages": WHOLE["chosen"], **WHOLE}, PAIR),
        ({"messages": [ask("q")], **TURNS}, PAIR),
        ({"conversations": [{"from": "human", "value": "q"}], **TURNS}, PAIR),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            PAIR,
        ),
    ],
)
def test_preference_rows(row, wanted):
    read = read_preference_row(row, 0)
    assert (read.prompt, read.chosen, read.rejected) == wanted
    assert read.tools is None
    assert read.template_kwargs == {}


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, Outcome.IDENTICAL),
        ({"chosen": "q a", "rejected": "q a"}, Outcome.IDENTICAL),
        ({"prompt": "q", "chosen": "", "rejected": "a"}, Outcome.EMPTY_ANSWER),
        ({"prompt": "q", "chosen": "a", "rejected": " \n"}, Outcome.EMPTY_ANSWER),
        ({"chosen": "", "rejected": "a"}, Outcome.EMPTY_ANSWER),
        ({"chosen": "Tea is hot", "rejected": "Tea is hot and sweet"}, Outcome.EMPTY_ANSWER),
        ({"chosen": [], "rejected": [say("a")]}, Outcome.EMPTY_ANSWER),
        ({"prompt": [ask("q")], "chosen": [say("")], "rejected": [say("a")]}, Outcome.EMPTY_ANSWER),
        ({"chosen": WHOLE["chosen"], "rejected": [*WHOLE["chosen"], ask("r")]}, Outcome.EMPTY_ANSWER),
        ({"chosen": WHOLE["chosen"], "rejected": WHOLE["chosen"]}, Outcome.IDENTICAL),
        ({"chosen": [say("a")], "rejected": [say("b")]}, Outcome.NO_PROMPT),
        ({"prompt": [], "chosen": [say("a")], "rejected": [say("b")]}, Outcome.NO_PROMPT),
    ],
)
def test_preference_rows_that_cannot_be_used(row, outcome):
    assert read_preference_row(row, 0) is outcome


def test_an_answer_of_tool_calls_alone_is_no_empty_answer():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    read = read_preference_row({"prompt": [ask("q")], "chosen": [call], "rejected": [say("b")]}, 0)
    assert read.chosen == [call]


def test_options_of_a_row():
    row = {"prompt": [ask("q")], "chosen": [say("a")], "rejected": [say("b")]}
    tools = [{"type": "function", "function": {"name": "f", "description": None}}]
    read = read_preference_row({**row, "tools": tools, "chat_template_kwargs": {"think": True, "other": None}}, 0)
    assert read.tools == [{"type": "function", "function": {"name": "f"}}]  # Arrow's None entries are no schema
    assert read.template_kwargs == {"think": True}
    assert read_preference_row({**row, "tools": '[{"name": "f", "default": null}]'}, 0).tools == [{"name": "f"}]
    assert read_preference_row({**row, "tools": []}, 0).tools is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": None}, r"row 17, column 'chosen': found NoneType None; wanted text or a list of messages. Leave"),
        ({"chosen": 3}, "row 17, column 'chosen': found int 3; wanted text"),
        ({"rejected": [say("b")]}, "row 17, column 'rejected': found list .* wanted the form of 'chosen', str"),
        ({"chosen": ["a"], "rejected": ["b"]}, "row 17, column 'chosen': found str 'a'; wanted messages"),
        ({"prompt": {"question": "q"}}, "row 17, column 'prompt': found dict"),
        ({"tools": "not json"}, "row 17, column 'tools'"),
        ({"tools": 3}, "row 17, column 'tools': found int 3"),
        ({"chat_template_kwargs": "x"}, "row 17, column 'chat_template_kwargs': found str 'x'; wanted a dict"),
    ],
)
def test_wrong_values_name_the_row(change, message):
    with pytest.raises(DataFormatError, match=message):
        read_preference_row({"prompt": "q", "chosen": "a", "rejected": "b", **change}, 17)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["prompt", "chosen"], r"columns \['prompt', 'chosen'\]; a preference dataset needs 'rejected' too"),
        (["prompt", "chosen", "rejcted"], r"'rejcted' is meant, say columns=\{'rejected': 'rejcted'\}"),
        (["prompt", "accepted", "rejected"], r"columns=\{'chosen': 'accepted'\} \(--columns chosen=accepted\)"),
        (["prompt", "completion", "label"], "KTOTrainer"),
    ],
)
def test_missing_preference_columns(columns, message):
    with pytest.raises(DataFormatError, match=message):
        preference_source(columns, {}, "train")


def test_a_question_beside_pairs_without_a_prompt():
    """Without the error, "The " would be the prompt: the first letters that two answers happen to share."""
    columns = ["question", "chosen", "rejected"]
    row = {"question": "Capital of France?", "chosen": "The capital is Paris.", "rejected": "The capital is Rome."}
    with pytest.raises(DataFormatError, match=r"columns=\{'prompt': 'question'\}"):
        preference_source(columns, row, "train")
    inside = {**row, "chosen": f"{row['question']} Paris.", "rejected": f"{row['question']} Rome."}
    assert preference_source(columns, inside, "train") == "pairs"


def source(columns, first=None, **how):
    defaults = {
        "text_field": "text",
        "has_formatting_func": False,
        "completion_only_loss": None,
        "assistant_only_loss": False,
    }
    return supervised_source(columns, first or dict.fromkeys(columns, "x"), "train", **{**defaults, **how})


def test_sources_of_supervised_rows():
    assert source(["text"]) == "text"
    assert source(["body"], text_field="body") == "text"
    assert source(["prompt", "completion", "text"]) == "completions"
    assert source(["messages", "prompt"]) == "messages"  # a prompt column beside whole conversations
    assert source(["conversations"]) == "messages"
    assert source(["chat"], {"chat": CHATML}, text_field="chat") == "messages"
    assert source(["anything"], has_formatting_func=True, text_field="other") == "formatted"
    assert source(["input_ids", "text"], has_formatting_func=True) == "ids"


@pytest.mark.parametrize(
    ("columns", "how", "error", "message"),
    [
        (["content"], {}, DataFormatError, r"wanted 'text', or 'messages'.*columns=\{'text': 'content'\}"),
        (["prompt"], {}, DataFormatError, "needs 'completion' too"),
        (["text"], {"completion_only_loss": True}, ConfigError, "needs rows with 'prompt' and 'completion'"),
        (["text"], {"completion_only_loss": True, "has_formatting_func": True}, ConfigError, "formatting_func returns"),
        (["text"], {"assistant_only_loss": True}, ConfigError, "assistant_only_loss=True needs messages"),
        (["prompt", "completion"], {"assistant_only_loss": True}, ConfigError, "needs messages"),
    ],
)
def test_supervised_columns_that_do_not_do(columns, how, error, message):
    with pytest.raises(error, match=message):
        source(columns, **how)


def test_supervised_rows():
    read = read_supervised_row({"prompt": "q", "completion": "a"}, 0, "completions", "text")
    assert (read.prompt, read.completion) == ("q", "a")
    read = read_supervised_row({"prompt": "q", "completion": [say("a")]}, 0, "completions", "text")
    assert (read.prompt, read.completion) == ([ask("q")], [say("a")])
    read = read_supervised_row({"prompt": [ask("q")], "completion": "a"}, 0, "completions", "text")
    assert (read.prompt, read.completion) == ([ask("q")], [say("a")])
    read = read_supervised_row({"conversations": SHAREGPT}, 0, "messages", "text")
    assert (read.prompt, read.completion) == (None, CHATML)
    with pytest.raises(DataFormatError, match="row 5, column 'text': found NoneType"):
        read_supervised_row({"text": None}, 5, "text", "text")


def test_rename_columns():
    rows = Dataset.from_list([{"question": "q", "good": "a", "bad": "b", "prompt": "old"}])
    named = rename_columns(rows, {"prompt": "question", "chosen": "good", "rejected": "bad"})
    assert named[0] == {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert rename_columns(rows, None) is rows
    assert rename_columns(rows, {"prompt": "prompt"}) is rows
    swapped = rename_columns(rows, {"good": "bad", "bad": "good"})
    assert (swapped[0]["good"], swapped[0]["bad"]) == ("b", "a")
    with pytest.raises(DataFormatError, match=r"maps 'prompt' to 'questoin'.*Did you mean 'question'\?"):
        rename_columns(rows, {"prompt": "questoin"})
    with pytest.raises(ConfigError, match="one column under two names"):
        rename_columns(rows, {"prompt": "question", "chosen": "question"})


def test_streams_that_do_not_know_their_columns():
    stream = IterableDataset.from_generator(lambda: iter([{"question": "q", "chosen": "a", "rejected": "b"}]))
    assert column_names(stream) == ["question", "chosen", "rejected"]
    assert first_row(rename_columns(stream, {"prompt": "question"}), "train")["prompt"] == "q"


def test_datasets_that_cannot_be_prepared():
    rows = Dataset.from_list([{"text": "t"}])
    with pytest.raises(DataFormatError, match="makes its rows on the fly.*skip_prepare_dataset"):
        check_plain(rows.with_transform(lambda batch: batch), "train")
    with pytest.raises(DataFormatError, match=r"is a list; wanted a datasets.Dataset.*from_list"):
        check_plain([{"text": "t"}], "train")
    with pytest.raises(DataFormatError, match="the train dataset has no rows"):
        first_row(Dataset.from_dict({"text": []}), "train")
    check_plain(rows.with_format("torch"), "train")
