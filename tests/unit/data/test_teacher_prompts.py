"""Teacher's prompts: the template on text and on the last turn, contexts of any type, and what is cut where.

The tiny tokenizer survives encode and decode, so that a prompt can be read back.
"""

from __future__ import annotations

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from preftune.data.report import Outcome
from preftune.data.teacher_prompts import context_text, filled, fitted, prepare_contexts, prepare_questions
from preftune.errors import DataFormatError

TEMPLATE = "{prompt}\n\n{privileged_context}"


def prepared(rows, tokenizer, **changes):
    how = {"template": TEMPLATE, "max_prompt_length": None} | changes
    return prepare_contexts(Dataset.from_list(rows), tokenizer, **how)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_text(tokenizer):
    (row,) = prepared([{"prompt": "the cat", "privileged_context": "sat", "n": 3}], tokenizer).dataset
    assert row["prompt_ids"] == ids(tokenizer, "the cat")
    assert tokenizer.decode(row["teacher_prompt_ids"]) == "the cat\n\nsat"
    assert row["n"] == 3 and row["prompt"] == "the cat"


def test_the_last_turn_of_a_conversation(tokenizer):
    turns = [
        {"role": "system", "content": "{be} kind"},
        {"role": "user", "content": "the {cat}"},
    ]
    (row,) = prepared([{"prompt": turns, "privileged_context": "it {sat}"}], tokenizer).dataset
    expected = [turns[0], {"role": "user", "content": "the {cat}\n\nit {sat}"}]
    written = tokenizer.apply_chat_template(expected, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(row["teacher_prompt_ids"]) == written
    assert row["prompt"] == turns


def test_options_of_the_template_reach_the_teacher(tokenizer):
    row = {
        "prompt": [{"role": "user", "content": "a"}], "privileged_context": "b",
        "chat_template_kwargs": {"enable_thinking": True},
    }  # fmt: skip
    (made,) = prepared([row], tokenizer).dataset
    assert tokenizer.decode(made["teacher_prompt_ids"]).endswith("<think>\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}], "one\n\ntwo"),
        ([{"from": "gpt", "value": "shared"}], "shared"),
        (7, "7"),
        (["a", "b"], "['a', 'b']"),
    ],
)
def test_contexts_of_any_type(value, text):
    assert context_text(value, 0) == text


def test_mistakes_are_named_with_row_and_remedy(tokenizer):
    rows = [{"prompt": "a", "privileged_context": "b"}, {"prompt": "c", "privileged_context": None}]
    with pytest.raises(DataFormatError, match="row 1, column 'privileged_context': found NoneType.*filter"):
        prepared(rows, tokenizer)
    with pytest.raises(DataFormatError, match="needs 'privileged_context' too. It holds what the teacher is told"):
        prepared([{"prompt": "a"}], tokenizer)
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataFormatError, match="row 0, column 'prompt'.*ends with the user's turn"):
        prepared([{"prompt": answered, "privileged_context": "b"}], tokenizer)
    with pytest.raises(DataFormatError, match="row 0, column 'prompt': the last turn is a list"):
        filled([{"role": "user", "content": [{"type": "image"}]}], "{prompt}", {}, 0)


def test_columns_by_other_names(tokenizer):
    rows = Dataset.from_list([{"question": "a", "hint": "b"}])
    names = {"prompt": "question", "privileged_context": "hint"}
    made = prepare_contexts(rows, tokenizer, template=TEMPLATE, max_prompt_length=None, columns=names)
    assert tokenizer.decode(made.dataset[0]["teacher_prompt_ids"]) == "a\n\nb"


def test_the_context_is_cut_and_never_the_question(tokenizer):
    """TRL cut from the left, where the question stands: nothing was left of it, and nothing was said."""
    question, context = "What is the capital of Spain?", "The quick brown fox jumps over the lazy dog. Madrid."
    whole = len(ids(tokenizer, f"{question}\n\n{context}"))
    limit = whole - 4
    rows = [{"prompt": question, "privileged_context": context}, {"prompt": "a", "privileged_context": "b"}]
    made = prepared(rows, tokenizer, max_prompt_length=limit)
    text = tokenizer.decode(made.dataset[0]["teacher_prompt_ids"])
    assert text.startswith(f"{question}\n\n") and text.endswith("Madrid.")
    assert limit - 3 <= len(made.dataset[0]["teacher_prompt_ids"]) <= limit
    assert made.dataset[0]["prompt_ids"] == ids(tokenizer, question)
    report = made.report
    assert (report.cut.count, report.cut.rows, report.rows_out) == (1, [0], 2)
    assert report.cut_tokens >= 4
    assert "Cut to max_prompt_length: 1 (row 0)" in str(report)


def test_in_a_conversation_too(tokenizer):
    turns = [{"role": "user", "content": "What is the capital of Spain?"}]
    rows = [{"prompt": turns, "privileged_context": "again and again " * 9 + "Madrid."}]
    made = prepared(rows, tokenizer, max_prompt_length=40)
    (row,) = made.dataset
    text = tokenizer.decode(row["teacher_prompt_ids"])
    assert len(row["teacher_prompt_ids"]) <= 40
    assert text.startswith("<|im_start|>user\nWhat is the capital of Spain?\n\n")
    assert text.endswith("Madrid.<|im_end|>\n<|im_start|>assistant\n")


def test_questions_that_do_not_fit_are_counted(tokenizer):
    rows = [{"prompt": text, "privileged_context": "b"} for text in ("What is the capital of Spain?", "a")]
    made = prepared(rows, tokenizer, max_prompt_length=5)
    assert made.dataset["prompt"][:] == ["a"]
    assert made.report.dropped[Outcome.QUESTION_FILLS].rows == [0]
    with pytest.raises(DataFormatError, match=r"max_prompt_length.*Raise max_prompt_length"):
        prepared(rows[:1], tokenizer, max_prompt_length=5)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(0, 40), st.integers(1, 6))
def test_what_fits(lengths, limit, question):
    """Words of one token each: the question stays, parts lose their beginnings in order, no token too many."""

    class OneTokenAWord:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [int(word) for word in text.split()]}

        def decode(self, numbers):
            return " ".join(map(str, numbers))

    tokenizer = OneTokenAWord()
    parts = [" ".join(str(100 * p + i) for i in range(n)) for p, n in enumerate(lengths)]

    def compose(texts):
        return [-1] * question + [i for text in texts for i in tokenizer(text, False)["input_ids"]]

    found = fitted(compose, parts, limit=limit, tokenizer=tokenizer)
    total = sum(lengths)
    if question > limit:
        assert found is None
        return
    over = max(0, question + total - limit)
    assert found is not None and found.cut == over
    assert found.ids == [-1] * question + compose(parts)[question + over :]


def test_questions_for_later(tokenizer):
    rows = [
        {"prompt": "the cat", "privileged_context": None, "n": 0},
        {"prompt": "a", "privileged_context": "b", "n": 1},
    ]
    made = prepare_questions(Dataset.from_list(rows), tokenizer, max_prompt_length=2, reads_feedback=True)
    kept = [row["n"] for row in made.dataset]
    assert kept == [row["n"] for row in rows if len(ids(tokenizer, row["prompt"])) <= 2]
    with pytest.raises(DataFormatError, match="row 0, column 'privileged_context': found int 3; wanted text"):
        prepare_questions(
            Dataset.from_list([{"prompt": "a", "privileged_context": 3}]),
            tokenizer, max_prompt_length=None, reads_feedback=True,
        )  # fmt: skip
    with pytest.raises(DataFormatError, match="ends with the user's turn"):
        prepare_questions(
            Dataset.from_list([{"prompt": [{"role": "system", "content": "a"}]}]),
            tokenizer, max_prompt_length=None, reads_feedback=False,
        )  # fmt: skip


def test_a_stream(tokenizer):
    stream = Dataset.from_list([{"prompt": "a", "privileged_context": "b"}]).to_iterable_dataset()
    (row,) = prepare_contexts(stream, tokenizer, template=TEMPLATE, max_prompt_length=9).dataset
    assert tokenizer.decode(row["teacher_prompt_ids"]) == "a\n\nb"
