"""Cuts of texts: ids of the parts are the ids of the whole, for tokenizers of every kind; and that cuts are made.

The oracle is the tokenizer on the whole text.
"""

from __future__ import annotations

import functools
import pickle
import random
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from preftune.data.words import WordMemo, Words, encode_whole
from tests.support.tokenizers import LINES
from tests.unit.data.kinds import CHATTY, KINDS, LOCAL_KINDS, PIECES, texts, tokenizer_of


@functools.cache
def words_of(kind):
    return Words(tokenizer_of(kind))


@functools.cache
def memo_of(kind):
    return WordMemo(tokenizer_of(kind), words_of(kind))


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(prompt=texts, answer=texts)
def test_a_boundary_that_holds_splits_the_ids(kind, prompt, answer):
    tokenizer = tokenizer_of(kind)
    if words_of(kind).boundary_holds(prompt, prompt + answer):
        assert ids(tokenizer, prompt) + ids(tokenizer, answer) == ids(tokenizer, prompt + answer)


@pytest.mark.parametrize("kind", ["bytes", "three_digits", "one_digit_nfc", "newline_digits", "cased"])
@pytest.mark.parametrize("answer", ["Hello there, friend.", "你好。", "12 apples", "<|im_end|>\n", "`code`"])
def test_usual_chat_answers_are_tokenized_apart(kind, answer):
    """Else preparation would be right but slow: the prompt of a chat template is not tokenized again."""
    for prompt in (CHATTY, "What is it?\n", "Was heißt 好?\n", "long " * 40 + "question?\n"):
        assert words_of(kind).boundary_holds(prompt, prompt + answer)


@pytest.mark.parametrize("kind", ["metaspace", "no_words"])
def test_tokenizers_that_mark_the_beginning_are_never_split(kind):
    assert not words_of(kind).boundary_holds(CHATTY, CHATTY + "Hello there.")
    assert memo_of(kind).off
    assert memo_of(kind).encode(["text"]) is None


@pytest.mark.parametrize("kind", LOCAL_KINDS)
@settings(max_examples=300)
@given(st.lists(texts | st.text(max_size=12), min_size=1, max_size=3))
@example(["it's we'll l'or 'tis I'd", "the\n\nThe, \n the", "a  b   c \t d", "12 345 6789abc 1234567"])
@example(
    ["café au lait”, the e\u0301 é", "你好, the ”. x", "é", "aé", "", " ", "a<|im_end|>b <eos> c<|im_", "x\u00a0y z"]
)
def test_remembered_words_give_the_ids_of_the_whole(kind, several):
    memo = memo_of(kind)
    memo.CHECKED = len(several) + 1  # every text is compared inside as well
    assert memo.encode(several) == [ids(tokenizer_of(kind), text) for text in several]
    assert not memo.off


@pytest.mark.parametrize("kind", LOCAL_KINDS)
def test_long_random_texts(kind):
    draw = random.Random(3)
    alphabet = [*PIECES, *string.printable, *" ".join(LINES).split(), *(" " + word for word in LINES[0].split())]
    several = ["".join(draw.choices(alphabet, k=400)) for _ in range(20)]
    memo = WordMemo(tokenizer_of(kind), words_of(kind))
    memo.CHECKED = 1
    assert memo.encode(several) == [ids(tokenizer_of(kind), text) for text in several]


@pytest.mark.parametrize("kind", ["bytes", "three_digits", "one_digit_nfc", "newline_digits", "cased"])
def test_words_are_tokenized_once(kind, monkeypatch):
    tokenizer, memo = tokenizer_of(kind), WordMemo(tokenizer_of(kind), words_of(kind))
    assert memo._cut("The capital, of France.\n\nIt is Paris") == [
        *("The", " capital", ",", " of", " France", ".\n\nIt", " is", " Paris")
    ]
    assert memo._cut("<|im_start|>user\nnaïve café is<|im_end|>") == [
        *("<|im_start|>", "user", "\nnaïve", " café is", "<|im_end|>")
    ]
    memo.encode(["the capital of France"])
    asked = []
    plain = type(tokenizer).__call__

    def counting(self, several, **how):
        asked.append(list(several))
        return plain(self, several, **how)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    memo.encode(["the France of capital"])
    assert asked == [["the France of capital"]]  # only the check


def test_a_memo_that_is_wrong_is_switched_off():
    memo = WordMemo(tokenizer_of("bytes"), words_of("bytes"))
    memo._ids[" capital"] = [7]
    assert memo.encode(["the capital", "the"]) is None
    assert memo.off


def test_a_memo_forgets():
    memo = WordMemo(tokenizer_of("bytes"), words_of("bytes"))
    memo.LIMIT, memo.LONGEST = 3, 4
    assert memo.encode(["a capital of"]) == encode_whole(tokenizer_of("bytes"), ["a capital of"])
    assert set(memo._ids) == {"a", " of"}
    memo.encode(["no it is"])
    assert memo._ids == {}
    memo.encode(["a"])
    copy = pickle.loads(pickle.dumps(memo))
    assert copy._ids == {}
    assert copy.encode(["a capital of"]) == memo.encode(["a capital of"])


@pytest.mark.parametrize("options", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_tokens_that_swallow_their_neighbourhood_forbid_cuts(make_tokenizer, options):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<mask>", **options)])
    words = Words(tokenizer)
    assert not words.local
    assert not words.boundary_holds(CHATTY, CHATTY + "Hello there.")
    assert WordMemo(tokenizer, words).off


def test_special_tokens_that_are_text(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.split_special_tokens = True
    assert WordMemo(tokenizer, Words(tokenizer)).off
