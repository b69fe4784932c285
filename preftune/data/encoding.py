"""Text to token ids, many at a time: the special tokens around a text, and where a prompt ends and its answer begins.

A prompt is tokenized once and its answers apart from it, but only where that provably gives the ids of the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from preftune.data.words import Ids, WordMemo, Words, encode_whole
from preftune.errors import ConfigError


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
        self._words = Words(tokenizer)
        self._memo = WordMemo(tokenizer, self._words)

    def encode(self, texts: Iterable[str]) -> list[Ids]:
        """Ids of each text without special tokens around it; equal texts are tokenized once, all in one call."""
        texts = list(texts)
        distinct = list(dict.fromkeys(texts))
        ids = self._memo.encode(distinct)
        if ids is None:
            ids = encode_whole(self.tokenizer, distinct)
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
            apart.append(all(self._words.boundary_holds(prompt, text) for text in whole))
            texts.append(prompt)
            texts.extend(text[len(prompt) :] if apart[-1] else text for text in whole)
        ids = iter(self.encode(texts))
        return [_divide(next(ids), [next(ids) for _ in whole], split) for whole, split in zip(wholes, apart)]


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
