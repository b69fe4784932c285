"""Text to token ids, many at a time: the special tokens around a text, and where a prompt ends and its answer begins.

A prompt is tokenized once and its answers apart from it, but only where that provably gives the ids of the whole.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from preftune.errors import ConfigError

Ids = list[int]

# Splitting steps that cut a text from left to right by what stands at the cut, and normalisers that change no ASCII.
_LOCAL_SPLITS = {"ByteLevel", "Split", "Digits", "Punctuation"}
_LOCAL_NORMALIZERS = {"NFC", "NFKC"}
_WINDOW = 64


@dataclass(slots=True)
class Branches:
    """Ids of a prompt and of the answers that follow it.

    `moved` counts the tokens at the end of the prompt, tokenized alone, that are not part of prompt + answer.
    """

    prompt: Ids
    answers: list[Ids]
    moved: int


class TextEncoder:
    """A tokenizer with what preparation has to know of it.

    Attributes:
        leading: What the tokenizer puts before a text (a BOS token, or nothing).
        eos: The id that ends a text, None where the tokenizer has none.
        ends: All ids that count as an end.
    """

    def __init__(self, tokenizer: Any, eos_token: str | None = None, eos_token_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.eos = _eos_id(tokenizer, eos_token)
        self.ends = frozenset(eos_token_ids) | ({self.eos} if self.eos is not None else frozenset())
        self._end_texts = tuple(tokenizer.convert_ids_to_tokens(sorted(self.ends)))
        self.leading = _leading_ids(tokenizer)
        self.special_tokens: list[str] = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self._boundary = Boundary(tokenizer)

    def encode(self, texts: Iterable[str]) -> list[Ids]:
        """Ids of each text without special tokens around them; equal texts are tokenized once, all in one call."""
        texts = list(texts)
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return []
        out = self.tokenizer(distinct, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids = out["input_ids"]
        if len(distinct) == len(texts):
            return ids
        known = dict(zip(distinct, ids))
        return [known[text] for text in texts]

    def open(self, ids: Ids) -> Ids:
        """`ids` after what the tokenizer writes before a text, unless they begin with it."""
        return ids if ids[: len(self.leading)] == self.leading else [*self.leading, *ids]

    def close(self, text: str, ids: Ids) -> Ids:
        """`ids` of `text`, ended: with the EOS id added unless the text ends with an end token.

        Raises:
            ConfigError: the tokenizer has no EOS token.
        """
        if self.eos is None:
            raise ConfigError(
                f"the tokenizer ({type(self.tokenizer).__name__} {self.tokenizer.name_or_path!r}) has no EOS token, "
                "and plain text ends with one. Set tokenizer.eos_token (or the option eos_token) to one of its tokens."
            )
        return ids if text.rstrip().endswith(self._end_texts) else [*ids, self.eos]

    def branches(self, prompts: Sequence[str], wholes: Sequence[Sequence[str]]) -> list[Branches]:
        """Ids of each prompt and of its answers; `wholes` are the texts of prompt + answer.

        The prompt's ids are the longest common beginning of the ids of the prompt alone and of every whole, so that
        prompt + answer are exactly the ids of the whole.
        """
        texts: list[str] = []
        apart: list[bool] = []
        for prompt, whole in zip(prompts, wholes):
            apart.append(all(self._boundary.holds(prompt, text) for text in whole))
            texts.append(prompt)
            texts.extend(text[len(prompt) :] if apart[-1] else text for text in whole)
        ids = iter(self.encode(texts))
        return [_divide(next(ids), [next(ids) for _ in whole], split) for whole, split in zip(wholes, apart)]


class Boundary:
    """Decides whether a text may be tokenized in two parts.

    Tokenizers cut a text at added tokens, then from left to right into words, and turn each word into ids by itself.
    So two parts give the ids of the whole if the words around the cut are the same with and without it. Tokenizers that
    do not work like this (no words, or a mark at the beginning of a text) are never split.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = list(tokenizer.added_tokens_decoder.values())
        contents = sorted((token.content for token in added), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        self._inside_added = {pair for content in contents for pair in zip(content, content[1:])}
        self._splits = _is_local(tokenizer) and not any(t.lstrip or t.rstrip or t.single_word for t in added)
        self._tokenizer = tokenizer

    def holds(self, prompt: str, whole: str) -> bool:
        """Whether ids(prompt) + ids(rest) are the ids of `whole`; False also where that is not certain."""
        if not whole.startswith(prompt):
            return False
        if not prompt or len(whole) == len(prompt):
            return True
        end = len(prompt)
        if not self._splits or (whole[end - 1], whole[end]) in self._inside_added:
            return False
        if not whole[end - 1].isascii() or unicodedata.combining(whole[end]):
            return False
        before = self._segment_end(prompt)
        if before is None:
            return False
        after = whole[end : end + _WINDOW]
        token = self._added.search(after)
        after = after[: token.start()] if token else after
        return self._words(before + after) == self._words(before) + self._words(after)

    def _segment_end(self, prompt: str) -> str | None:
        """The end of `prompt` from where a word is sure to begin: an added token, or a space between letters."""
        near = prompt[-_WINDOW:]
        start = max((match.end() for match in self._added.finditer(near)), default=0)
        if start or len(near) == len(prompt):
            return near[start:]
        space = re.search(r"(?<=[a-z]) (?=[A-Za-z])", near)
        return near[space.start() :] if space else None

    def _words(self, text: str) -> list[str]:
        backend = self._tokenizer.backend_tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def common_prefix_length(ids: Sequence[int], other: Sequence[int]) -> int:
    """How many items two sequences share at their beginning."""
    if ids[: len(other)] == other[: len(ids)]:
        return min(len(ids), len(other))
    return next(n for n, (a, b) in enumerate(zip(ids, other)) if a != b)


def _divide(prompt: Ids, rest: list[Ids], apart: bool) -> Branches:
    if apart:
        return Branches(prompt, rest, 0)
    shared = min((common_prefix_length(prompt, whole) for whole in rest), default=len(prompt))
    return Branches(prompt[:shared], [whole[shared:] for whole in rest], len(prompt) - shared)


def _is_local(tokenizer: Any) -> bool:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    backend = tokenizer.backend_tokenizer
    if backend.pre_tokenizer is None or not set(_kinds(backend.pre_tokenizer, "pretokenizers")) <= _LOCAL_SPLITS:
        return False
    return backend.normalizer is None or set(_kinds(backend.normalizer, "normalizers")) <= _LOCAL_NORMALIZERS


def _kinds(component: Any, parts: str) -> Iterator[str]:
    """The types of a tokenizer component, those inside a sequence one by one."""
    state = json.loads(component.__getstate__())
    pending = [state]
    while pending:
        part = pending.pop()
        if part["type"] == "Sequence":
            pending.extend(part[parts])
        else:
            yield part["type"]


def _leading_ids(tokenizer: Any) -> Ids:
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    starts = (n for n in range(len(full) - len(plain) + 1) if full[n : n + len(plain)] == plain)
    return list(full[: next(starts, 0)])


def _eos_id(tokenizer: Any, eos_token: str | None) -> int | None:
    if eos_token is None:
        return tokenizer.eos_token_id
    vocabulary = tokenizer.get_vocab()
    if eos_token not in vocabulary:
        raise ConfigError(
            f"eos_token={eos_token!r} is not in the tokenizer's vocabulary. Name a token it has (its own is "
            f"{tokenizer.eos_token!r}), or add it with tokenizer.add_tokens and resize the embeddings."
        )
    return vocabulary[eos_token]
