"""Ids of prompt and answers: equal to those of the whole text, whatever the tokenizer; special tokens once.

The oracle is the tokenizer on the whole text, one text at a time.
"""

from __future__ import annotations

import functools
import pickle

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preftune.data.encoding import TextEncoder, common_prefix_length
from preftune.errors import ConfigError
from tests.unit.data.kinds import CHATTY, KINDS, texts, tokenizer_of


@functools.cache
def encoder_of(kind):
    return TextEncoder(tokenizer_of(kind))


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def longest_common(prompt, *wholes):
    """Token by token, the slow way."""
    n = 0
    while n < len(prompt) and all(n < len(whole) and whole[n] == prompt[n] for whole in wholes):
        n += 1
    return n


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(prompt=texts, chosen=texts, rejected=texts)
@example("Price? ", "9", "€9")
@example("the answer is 12", "34567", "3")
@example(CHATTY, "\n\nhello", " hello")
@example(CHATTY, "<|im_end|>\n", "\u0301a<|im_end|>\n")
@example("<|im_", "start|>a", "end|>b")
@example("e", "\u0301", "f")
def test_branches_are_the_ids_of_the_whole(kind, prompt, chosen, rejected):
    tokenizer = tokenizer_of(kind)
    wholes = (prompt + chosen, prompt + rejected)
    (branches,) = encoder_of(kind).branches([prompt], [wholes])
    alone, *joint = (ids(tokenizer, text) for text in (prompt, *wholes))
    shared = longest_common(alone, *joint)
    assert branches.prompt == alone[:shared]
    assert branches.answers == [whole[shared:] for whole in joint]
    assert branches.moved == len(alone) - shared


def test_prompt_that_is_no_prefix_of_the_whole(tokenizer):
    """The prompt alone ends with <think>, the whole does not: the boundary is the last common token."""
    opened, whole = CHATTY + "<think>\n", CHATTY + "Paris.<|im_end|>\n"
    (branches,) = TextEncoder(tokenizer).branches([opened], [(whole, whole)])
    assert tokenizer.decode(branches.prompt) == CHATTY
    assert tokenizer.decode(branches.prompt + branches.answers[0]) == whole
    assert branches.moved > 0


def test_equal_texts_are_tokenized_once_in_one_call(monkeypatch):
    tokenizer = tokenizer_of("no_words")  # never in pieces
    calls = []
    plain = type(tokenizer).__call__

    def counting(self, texts, **how):
        calls.append(list(texts))
        return plain(self, texts, **how)

    encoder = encoder_of("no_words")
    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    encoder.branches(["q", "q", "r"], [("qa", "qb"), ("qa", "qc"), ("ra", "rb")])
    assert calls == [["q", "qa", "qb", "qc", "r", "ra", "rb"]]


def test_leading_ids(tokenizer, make_tokenizer):
    bos = make_tokenizer("bos")
    encoder = TextEncoder(bos)
    assert encoder.leading == [bos.bos_token_id]
    assert encoder.open([7, 8]) == [bos.bos_token_id, 7, 8]
    assert encoder.open([bos.bos_token_id, 7]) == [bos.bos_token_id, 7]
    assert TextEncoder(tokenizer).leading == []
    assert TextEncoder(tokenizer).open([7]) == [7]


def test_close_adds_one_end(tokenizer):
    encoder = TextEncoder(tokenizer, eos_token_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")])
    eos = tokenizer.eos_token_id
    assert encoder.close("yes", ids(tokenizer, "yes")) == [*ids(tokenizer, "yes"), eos]
    for ended in ("yes<eos>", "yes<eos>\n", "yes<|im_end|>"):
        assert encoder.close(ended, ids(tokenizer, ended)) == ids(tokenizer, ended)


def test_eos_token_by_name(tokenizer, make_tokenizer):
    assert TextEncoder(tokenizer, "<|im_end|>").eos == tokenizer.convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(ConfigError, match="'<nope>' is not in the tokenizer's vocabulary"):
        TextEncoder(tokenizer, "<nope>")
    with pytest.raises(ConfigError, match="no EOS token"):
        TextEncoder(make_tokenizer("no_eos")).close("yes", [3])


def test_encoder_survives_pickling(tokenizer):
    encoder = pickle.loads(pickle.dumps(TextEncoder(tokenizer)))
    assert encoder.encode(["Paris", "Rome"]) == [ids(tokenizer, "Paris"), ids(tokenizer, "Rome")]
    assert encoder.encode([]) == []


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_length(one, other):
    assert common_prefix_length(one, other) == longest_common(one, other)
