"""`prepare_preference`: ids of pairs in every form, cuts, drops and their report.

The oracle renders and tokenizes one row at a time, jointly; ids of plain text are written out by hand.
"""

from __future__ import annotations

import json

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from preftune.data import mapping
from preftune.data.preference import cut_pair
from preftune.data.report import Outcome
from preftune.data.tokenize import prepare_preference
from preftune.errors import ConfigError, DataFormatError
from tests.support.tokenizers import CHAT_TEMPLATE

IDS = ("prompt_ids", "chosen_ids", "rejected_ids")


def ask(content):
    return {"role": "user", "content": content}


def say(content):
    return {"role": "assistant", "content": content}


def prepare(rows, tokenizer, **how):
    return prepare_preference(Dataset.from_list(rows), tokenizer, **{"max_length": None, **how})


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def joint(tokenizer, prompt, answers, **options):
    """Prompt and answers of one conversational row, from the ids of whole renderings."""

    def render(messages, **how):
        return ids(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False, **how, **options))

    alone, *wholes = render(prompt, add_generation_prompt=True), *(render(prompt + answer) for answer in answers)
    shared = 0
    while shared < len(alone) and all(whole[shared : shared + 1] == alone[shared : shared + 1] for whole in wholes):
        shared += 1
    return [alone[:shared], *(whole[shared:] for whole in wholes)]


def test_text(tokenizer, preference_rows):
    eos = tokenizer.eos_token_id
    prepared = prepare(preference_rows["text"], tokenizer)
    assert prepared.dataset.column_names == list(IDS)
    for row, got in zip(preference_rows["text"], prepared.dataset):
        assert got["prompt_ids"] == ids(tokenizer, row["prompt"])
        assert got["chosen_ids"] == [*ids(tokenizer, row["chosen"]), eos]
        assert got["rejected_ids"] == [*ids(tokenizer, row["rejected"]), eos]
    assert prepared.report.to_dict()["dropped"] == {}


def test_all_forms_of_messages_give_the_same_ids(tokenizer, preference_rows):
    wanted = [joint(tokenizer, row["prompt"], [row["chosen"], row["rejected"]]) for row in preference_rows["messages"]]
    for form in ("messages", "implicit_messages", "sharegpt"):
        got = prepare(preference_rows[form], tokenizer).dataset
        assert [[row[column] for column in IDS] for row in got] == wanted
    whole = wanted[0][0] + wanted[0][1]
    assert tokenizer.decode(whole) == tokenizer.apply_chat_template(
        preference_rows["implicit_messages"][0]["chosen"], tokenize=False
    )


def test_implicit_text_prompt(tokenizer, preference_rows):
    for row, got in zip(preference_rows["implicit_text"], prepare(preference_rows["implicit_text"], tokenizer).dataset):
        for side in ("chosen", "rejected"):
            assert tokenizer.decode(got["prompt_ids"] + got[f"{side}_ids"]) == row[side] + "<eos>"


def test_eos_exactly_once(tokenizer):
    eos, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows = [{"prompt": "q", "chosen": "yes<eos>", "rejected": "no<|im_end|>"}]
    (got,) = prepare(rows, tokenizer).dataset
    assert got["chosen_ids"] == [*ids(tokenizer, "yes"), eos]
    assert got["rejected_ids"] == [*ids(tokenizer, "no"), end, eos]
    (got,) = prepare(rows, tokenizer, eos_token_ids=[end]).dataset
    assert got["rejected_ids"] == [*ids(tokenizer, "no"), end]
    # What a template ends with stays as it is, also where that is no EOS token.
    (got,) = prepare([{"prompt": [ask("q")], "chosen": [say("a")], "rejected": [say("b")]}], tokenizer).dataset
    assert tokenizer.decode(got["chosen_ids"]) == "a<|im_end|>\n"


def test_bos_exactly_once(make_tokenizer, preference_rows):
    bos = make_tokenizer("bos")
    for form in ("text", "implicit_text", "messages", "implicit_messages"):
        for row in prepare(preference_rows[form], bos).dataset:
            assert row["prompt_ids"][0] == bos.bos_token_id
            assert sum((row[column] for column in IDS), []).count(bos.bos_token_id) == 1
    rows = [{"prompt": "<bos>q", "chosen": "a", "rejected": "b"}, {"prompt": "", "chosen": "ab", "rejected": "cd"}]
    written, empty = prepare(rows, bos).dataset
    assert written["prompt_ids"] == [bos.bos_token_id, *ids(bos, "q")]
    assert empty["prompt_ids"] == [bos.bos_token_id]


def test_tokens_that_merge_across_the_boundary(make_tokenizer):
    """The prompt ends where both wholes agree, so that the loss counts the token that holds the answer."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["? 9"])
    (row,) = prepare([{"prompt": "Price? ", "chosen": "9", "rejected": "8"}], tokenizer).dataset
    assert tokenizer.decode(row["prompt_ids"]) == "Price"
    assert tokenizer.decode(row["prompt_ids"] + row["chosen_ids"]) == "Price? 9<eos>"
    assert tokenizer.decode(row["prompt_ids"] + row["rejected_ids"]) == "Price? 8<eos>"


THINKS_IN_PROMPT = CHAT_TEMPLATE.replace("enable_thinking is defined and enable_thinking", "true")
# Renders reasoning only where there is some, so that two answers can differ before their content.
SHOWS_REASONING = CHAT_TEMPLATE.replace(
    "{{- message['content'] or '' -}}",
    "{%- if message['thinking'] %}{{ '<think>' + message['thinking'] + '</think>' }}{% endif -%}"
    "{{- message['content'] or '' -}}",
)


@pytest.mark.parametrize("template", [THINKS_IN_PROMPT, SHOWS_REASONING])
def test_templates_that_render_the_prompt_alone_otherwise(tokenizer, template):
    """Prompt + answer decodes to the whole rendering, with a whole number of <think>."""
    row = {"prompt": [ask("q")], "chosen": [{**say("A"), "thinking": "x"}], "rejected": [say("B")]}
    prepared = prepare([row], tokenizer, chat_template=template)
    (got,) = prepared.dataset
    for side in ("chosen", "rejected"):
        whole = tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False, chat_template=template)
        assert tokenizer.decode(got["prompt_ids"] + got[f"{side}_ids"]) == whole
        assert tokenizer.decode(got[f"{side}_ids"]).count("<think>") == whole.count("<think>")
    moved = template is THINKS_IN_PROMPT
    assert prepared.report.moved.count == moved
    assert ("is not how prompt + answer begins" in str(prepared.report)) is moved


def test_options_of_rows_reach_the_template(tokenizer):
    tools = [{"type": "function", "function": {"name": "add"}}]
    base = {"prompt": [ask("q")], "chosen": [say("a")], "rejected": [say("b")]}
    rows = [
        {**base, "tools": None, "chat_template_kwargs": None},
        {**base, "tools": json.dumps(tools), "chat_template_kwargs": None},
        {**base, "tools": None, "chat_template_kwargs": {"enable_thinking": False}},
        {**base, "tools": json.dumps(tools), "chat_template_kwargs": {"enable_thinking": True}},
    ]
    got = prepare(rows, tokenizer, chat_template_kwargs={"enable_thinking": True}).dataset
    thinking = [{"enable_thinking": True}, {"enable_thinking": True}, {}, {"enable_thinking": True}]
    for row, options, ours in zip(rows, thinking, got):
        answers = [row["chosen"], row["rejected"]]
        options = {"tools": json.loads(row["tools"]) if row["tools"] else None, **options}
        assert [ours[column] for column in IDS] == joint(tokenizer, row["prompt"], answers, **options)
    assert "add" in tokenizer.decode(got[1]["prompt_ids"])


LONG = [1] * 30
PAIRS = [
    # (prompt, chosen, rejected, max_length, mode) -> what is left, and the outcome
    (([1, 2, 3], [4, 5], [6], 5, "keep_start"), (([1, 2, 3], [4, 5], [6]), Outcome.KEPT)),
    (([1, 2, 3], [4, 5, 6], [7], 5, "keep_start"), (([1, 2, 3], [4, 5], [7]), Outcome.KEPT)),
    (([1, 2, 3], [4, 5, 6], [4, 5, 7], 5, "keep_start"), (([1, 2, 3], [4, 5], [4, 5]), Outcome.IDENTICAL)),
    (([1, 2, 3], [4], [5], 3, "keep_start"), (([1, 2, 3], [4], [5]), Outcome.PROMPT_FILLS)),
    (([1, 2, 3], [4], [5], 4, "keep_start"), (([1, 2, 3], [4], [5]), Outcome.KEPT)),
    (([1, 2, 3], [4, 5], [6, 7, 8], 5, "keep_end"), (([2, 3], [4, 5], [6, 7, 8]), Outcome.KEPT)),
    (([1, 2, 3], [4, 5], [6, 7, 8], 4, "keep_end"), (([3], [4, 5], [6, 7, 8]), Outcome.KEPT)),
    (([1, 2, 3], [4, 5], [6, 7, 8], 3, "keep_end"), (([1, 2, 3], [4, 5], [6, 7, 8]), Outcome.ANSWER_FILLS)),
    ((LONG, [2] * 10, [3] * 4, 16, "keep_end"), ((LONG[:6], [2] * 10, [3] * 4), Outcome.KEPT)),
    (([], [4], [5, 6], None, "keep_start"), (([], [4], [5, 6]), Outcome.NOTHING_SCORED)),
    (([], [4, 5], [5, 6], None, "keep_start"), (([], [4, 5], [5, 6]), Outcome.KEPT)),
    (([1], [], [5], None, "keep_start"), (([1], [], [5]), Outcome.NOTHING_SCORED)),
]


@pytest.mark.parametrize(("given_", "wanted"), PAIRS)
def test_cuts(given_, wanted):
    assert cut_pair(*given_) == wanted


tokens = st.lists(st.integers(0, 9), max_size=8)


@given(tokens, tokens, tokens, st.integers(1, 12), st.sampled_from(["keep_start", "keep_end"]))
def test_kept_pairs_fit_and_keep_one_side(prompt, chosen, rejected, max_length, mode):
    cut, outcome = cut_pair(prompt, chosen, rejected, max_length, mode)
    if outcome is not Outcome.KEPT:
        return
    assert len(cut[0]) + max(len(cut[1]), len(cut[2])) <= max_length
    if mode == "keep_end":
        assert cut[1:] == (chosen, rejected)
        assert prompt[len(prompt) - len(cut[0]) :] == cut[0]
    else:
        assert cut[0] == prompt
        assert (chosen[: len(cut[1])], rejected[: len(cut[2])]) == cut[1:]


def test_report(tokenizer):
    rows = [{"prompt": "a" * n, "chosen": "b" * 4, "rejected": "c" * m} for n, m in ((3, 4), (12, 4), (3, 30), (20, 1))]
    rows += [{"prompt": "a", "chosen": "x", "rejected": "x"}, {"prompt": "a", "chosen": " ", "rejected": "x"}]
    lengths = [tuple(len(ids(tokenizer, row[c])) for c in ("prompt", "chosen", "rejected")) for row in rows]
    assert lengths[:4] == [(3, 4, 4), (12, 4, 4), (3, 4, 30), (20, 4, 1)]  # the letters here do not merge
    prepared = prepare(rows, tokenizer, max_length=10)
    report = prepared.report
    assert (report.rows_in, report.rows_out, len(prepared.dataset)) == (6, 2, 2)
    assert report.to_dict()["dropped"] == {
        "identical": {"count": 1, "rows": [4]},
        "empty_answer": {"count": 1, "rows": [5]},
        "prompt_fills": {"count": 2, "rows": [1, 3]},
    }
    # Row 2 has 3 + 31 tokens with its EOS, of which 10 are left.
    assert report.to_dict()["cut"] == {"count": 1, "rows": [2], "tokens": 24}
    assert report.to_dict()["lengths"]["rejected_ids"] == {"min": 5, "p50": 5, "p90": 7, "p99": 7, "max": 7}
    text = str(report)
    assert "train: 6 rows read, 2 kept." in text
    assert "2 (rows 1, 3) with a prompt that fills max_length" in text
    assert "Cut to max_length: 1 (row 2), 24 tokens lost" in text


def test_nothing_left(tokenizer):
    rows = [{"prompt": "a" * 20, "chosen": "b", "rejected": "c"}] * 2 + [
        {"prompt": "a", "chosen": "b", "rejected": "b"}
    ]
    with pytest.raises(DataFormatError) as error:
        prepare(rows, tokenizer, max_length=8, name="eval_maths")
    message = str(error.value)
    assert "none of the 3 rows of the eval_maths dataset is left" in message
    assert "2 (rows 0, 1) with a prompt that fills max_length" in message
    assert "Raise max_length" in message
    with pytest.raises(DataFormatError, match="the train dataset has no rows"):
        prepare_preference(Dataset.from_dict({"prompt": [], "chosen": [], "rejected": []}), tokenizer)


def test_rows_of_ids_are_used_as_they_are(tokenizer, make_tokenizer):
    rows = [
        {
            "prompt_ids": [1, 2],
            "chosen_ids": [3, 4],
            "rejected_ids": [5],
            "prompt": "ignored",
            "ref_chosen_logps": -1.5,
        },
        {
            "prompt_ids": [1],
            "chosen_ids": [3],
            "rejected_ids": [5, 6, 7],
            "prompt": "ignored",
            "ref_chosen_logps": -2.5,
        },
    ]
    got = prepare(rows, make_tokenizer("no_template"), max_length=3).dataset
    assert sorted(got.column_names) == sorted([*IDS, "ref_chosen_logps"])
    assert [[row[column] for column in IDS] for row in got] == [[[1, 2], [3], [5]], [[1], [3], [5, 6]]]
    assert got["ref_chosen_logps"][:] == [-1.5, -2.5]
    for wrong in ("text", None, [1.5], [-1], [True]):
        with pytest.raises(DataFormatError, match="row 0, column 'chosen_ids': found .* wanted a list of token ids"):
            prepare([{**rows[0], "chosen_ids": wrong}], tokenizer)


def test_prepared_rows_can_be_prepared_again(tokenizer, preference_rows):
    once = prepare(preference_rows["messages"], tokenizer).dataset
    again = prepare_preference(once, tokenizer, max_length=None).dataset
    assert again[:] == once[:]


def test_columns_are_mapped_and_kept(tokenizer):
    rows = [{"question": "q", "good": "a", "bad": "b", "w": 0.5, "source": "web"}]
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    got = prepare(rows, tokenizer, columns=columns, keep_columns=["w", "source"]).dataset
    assert got["w"][:] == [0.5]
    assert got["source"][:] == ["web"]
    assert got.column_names == ["w", "source", *IDS]
    assert prepare(rows, tokenizer, columns=columns).dataset.column_names == list(IDS)


def test_pad_that_is_eos_changes_nothing(make_tokenizer, preference_rows):
    padded, plain = make_tokenizer("pad_is_eos"), make_tokenizer("plain")
    for form in ("text", "messages"):
        assert prepare(preference_rows[form], padded).dataset[:] == prepare(preference_rows[form], plain).dataset[:]


def test_answers_that_no_end_token_closes_are_reported(tokenizer, preference_rows):
    """The template ends turns with <|im_end|> and the tokenizer's EOS is <eos>."""
    report = prepare(preference_rows["messages"], tokenizer).report
    assert report.unended.count == len(preference_rows["messages"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert prepare(preference_rows["messages"], tokenizer, eos_token_ids=[end]).report.unended.count == 0
    assert prepare(preference_rows["text"], tokenizer).report.unended.count == 0


def test_errors_that_say_what_to_do(make_tokenizer, tokenizer, preference_rows):
    with pytest.raises(ConfigError, match="has no chat template. Give one"):
        prepare(preference_rows["messages"], make_tokenizer("no_template"))
    with pytest.raises(ConfigError, match="has no EOS token"):
        prepare(preference_rows["text"], make_tokenizer("no_eos"))
    with pytest.raises(ConfigError, match="Allowed: keep_start, keep_end"):
        prepare(preference_rows["text"], tokenizer, truncation_mode="keep_middle")
    strict = "{{ raise_exception('roles must alternate') if messages|length > 2 }}" + CHAT_TEMPLATE
    rows = [*preference_rows["messages"][:2]]
    rows.append({"prompt": [ask("q"), ask("r")], "chosen": [say("a")], "rejected": [say("b")]})
    with pytest.raises(DataFormatError, match="row 2: the chat template refuses .*roles must alternate"):
        prepare(rows, tokenizer, chat_template=strict)


def test_a_wrong_row_is_named_by_its_number_in_the_dataset(tokenizer, monkeypatch):
    monkeypatch.setattr(mapping, "ROWS_PER_PROCESS", 500)
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}] * 1500
    rows[1203] = {"prompt": "q", "chosen": None, "rejected": "b"}
    for num_proc in (None, 2):
        with pytest.raises(DataFormatError, match="row 1203, column 'chosen': found NoneType"):
            prepare(rows, tokenizer, num_proc=num_proc)
