"""Tokenizers of the kinds that published models have, by how they cut text into words, and texts that try them.

All have the special tokens of the shared test tokenizer; "metaspace" and "no_words" cannot be tokenized in parts.
"""

from __future__ import annotations

import functools

from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import CHAT_TEMPLATE, LINES, SPECIALS

# Digits in threes, newlines with the spaces before them, a punctuation mark with the word after it.
THREE_DIGITS = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
ONE_DIGIT = THREE_DIGITS.replace("{1,3}", "")
# A word begins with its capitals and has its contraction on it, so that no cut before an apostrophe is safe.
CASED = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?\p{Lu}*[\p{Ll}\p{Lo}\p{M}]+(?i:'s|'t|'ll)?",
        r"[^\r\n\p{L}\p{N}]?\p{Lu}+[\p{Ll}\p{Lo}\p{M}]*(?i:'s|'t|'ll)?",
        *THREE_DIGITS.split("|")[-5:],
    ]
)
EXTRA_LINES = (
    "price 9 € 99 €\n\nthe\n\n\n",
    "1234567 12 345 6789",
    "it's we'll   spaces",
    "ünï cödé é naïve 你好 世界",
)

CHATTY = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
PIECES = [
    *("a", "the", " the", "user", "'s", "'", ":", ": ", ".", "?", "€", " €", "9", "12", "345", "é", "ü", "e\u0301"),
    *("\u0301", "你好", "ᄀ", "ᅡ", "<", "im_", "<|", "|>", "<|im_end|>", "<|im_start|>", "<eos>", "x" * 70, "1234567"),
    *("\n", "\n\n", "\r\n", " ", "  ", "\t", "assistant", "\n<|im_start|>assistant\n", "capital of France", " I know"),
]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)

LOCAL_KINDS = ("bytes", "prefix_space", "three_digits", "one_digit_nfc", "newline_digits", "cased")
KINDS = (*LOCAL_KINDS, "metaspace", "no_words")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_of_words])


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that cuts words like GPT-2 ("bytes"), Llama 3 ("three_digits"), Qwen ("one_digit_nfc"), ..."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "prefix_space":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "three_digits":
        backend.pre_tokenizer = _split(THREE_DIGITS)
    elif kind == "cased":
        backend.pre_tokenizer = _split(CASED)
    elif kind == "one_digit_nfc":
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = _split(ONE_DIGIT)
    elif kind == "newline_digits":
        steps = [
            pre_tokenizers.Split(Regex(r"[\r\n]"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = []
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Replace("▁", " ")
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*LINES, *EXTRA_LINES], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
