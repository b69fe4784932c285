"""How a tokenizer cuts text into words, and what follows from it: where a text may be tokenized in parts.

Nothing here guesses: a cut is used only where the tokenizer itself gives the same words with and without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Any

from transformers import PreTrainedTokenizerFast

Ids = list[int]

# Splitting steps that cut a text from left to right by what stands at the cut, and normalisers that change no ASCII.
_LOCAL_SPLITS = {"ByteLevel", "Split", "Digits", "Punctuation"}
_LOCAL_NORMALIZERS = {"NFC", "NFKC"}
_WINDOW = 64  # characters looked at before a cut
_AHEAD = 32  # and after it

# Letters, and whatever is not ASCII: no cut is ever made next to it.
_LETTER, _LETTERS = "[A-Za-z]", r"[A-Za-z\x80-\U0010ffff]"
_OTHER = r"[\x00-@\[-`{-\x7f]"
_OTHERS = [chr(code) for code in range(128) if re.match(_OTHER, chr(code))]
_VISIBLE = [chr(code) for code in range(33, 127)]


class Words:
    """The words of a tokenizer that works locally.

    Such a tokenizer cuts a text at added tokens, then from left to right into words, and turns each word into ids by
    itself. So two parts of a text give the ids of the whole if the words around the cut are the same with and without
    it. Tokenizers that do not work like this (no words, or a mark at the beginning of a text) are not `local`.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = list(tokenizer.added_tokens_decoder.values())
        contents = sorted((token.content for token in added), key=len, reverse=True)
        plain = not any(token.lstrip or token.rstrip or token.single_word for token in added)
        self.local = plain and not tokenizer.split_special_tokens and _is_local(tokenizer)
        self.added = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        self._inside_added = {pair for content in contents for pair in zip(content, content[1:])}
        self._tokenizer = tokenizer
        self._ends: dict[str, list[str]] = {}

    def boundary_holds(self, prompt: str, whole: str) -> bool:
        """Whether ids(prompt) + ids(rest) are the ids of `whole`; False also where that is not certain."""
        if not whole.startswith(prompt):
            return False
        end = len(prompt)
        if not prompt or len(whole) == end:
            return True
        if not self.local or (whole[end - 1], whole[end]) in self._inside_added:
            return False
        before = self._segment_end(prompt)
        if before is None:
            return False
        after = whole[end : end + _AHEAD]
        token = self.added.search(after)
        return self.cuts(before, after[: token.start()] if token else after)

    def cuts(self, before: str, after: str) -> bool:
        """Whether a word ends between two texts without added tokens."""
        end = self._ends.get(before)
        if end is None:
            end = self._of(before)
            if len(self._ends) < 1000:  # prompts of a chat template all end alike
                self._ends[before] = end
        return self._of(before + after) == end + self._of(after)

    def _segment_end(self, prompt: str) -> str | None:
        """The end of `prompt` from where a word is sure to begin: an added token, or a space between letters."""
        near = prompt[-_WINDOW:]
        start = max((match.end() for match in self.added.finditer(near)), default=0)
        if start or len(near) == len(prompt):
            return near[start:]
        space = re.search(r"(?<=[a-z]) (?=[A-Za-z])", near)
        return near[space.start() :] if space else None

    def _of(self, text: str) -> list[str]:
        backend = self._tokenizer.backend_tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


class WordMemo:
    """Ids of texts, put together from the ids of their words, each tokenized once.

    Texts are cut into pieces of a word or a little more: after an ASCII letter, and before a space and an ASCII letter,
    where trial texts show that this tokenizer cuts there too. Of every call a few texts are also tokenized whole; if
    one differs, the memo is `off` from then on.
    """

    LIMIT = 200_000  # pieces remembered
    LONGEST = 32  # characters of a piece worth remembering
    CHECKED = 3  # texts of each call that are tokenized whole as well

    def __init__(self, tokenizer: Any, words: Words) -> None:
        self._tokenizer = tokenizer
        self._added = re.compile(f"({words.added.pattern})")
        self._ids: dict[str, Ids] = {}
        separators = [
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special and not token.normalized
        ]
        self.off = True
        if words.local and separators:
            self._separator = separators[0]
            after_letter = [c for c in _OTHERS if _is_safe(words, ("ab", " ab", "7ab"), _followed(c))]
            before_space = [c for c in _VISIBLE if _is_safe(words, ("q" + c, " " + c, "7" + c), (" ab", " Ab", " a."))]
            self._piece = _piece_pattern(after_letter, before_space)
            self.off = " " not in after_letter

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ids": {}}

    def encode(self, texts: Sequence[str]) -> list[Ids] | None:
        """Ids of each text without special tokens around it, or None where the memo is off."""
        if self.off:
            return None
        pieces = [self._cut(text) for text in texts]
        missing = list(set(chain.from_iterable(pieces)).difference(self._ids))
        self._ids.update(zip(missing, self._encode_pieces(missing)))
        encoded = [list(chain.from_iterable(map(self._ids.__getitem__, part))) for part in pieces]
        step = max(1, len(texts) // self.CHECKED)
        if encoded[::step] != encode_whole(self._tokenizer, texts[::step]):
            self.off = True
            return None
        for piece in missing:
            if len(piece) > self.LONGEST:
                del self._ids[piece]
        if len(self._ids) > self.LIMIT:
            self._ids.clear()
        return encoded

    def _cut(self, text: str) -> list[str]:
        """Pieces of `text` in order, added tokens among them."""
        pieces = []
        for place, part in enumerate(self._added.split(text)):
            if place % 2:
                pieces.append(part)
            else:
                pieces += self._piece.findall(part)
        return pieces

    def _encode_pieces(self, pieces: list[str]) -> list[Ids]:
        """Ids of each piece; many go to the tokenizer as one text, with a special token between them."""
        special = self._tokenizer.convert_tokens_to_ids(self._separator)
        plain = [piece for piece in pieces if not self._added.match(piece)]
        texts = [self._separator.join(plain[start : start + 256]) for start in range(0, len(plain), 256)]
        ids: list[Ids] = []
        for joined in encode_whole(self._tokenizer, texts):
            ids += [list(run) for is_special, run in groupby(joined, lambda token: token == special) if not is_special]
        found = dict(zip(plain, ids, strict=True))
        return [found[p] if p in found else [self._tokenizer.convert_tokens_to_ids(p)] for p in pieces]


def encode_whole(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    """Ids of each text as the tokenizer gives them, in one call, without special tokens around it."""
    if not texts:
        return []
    out = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return out["input_ids"]


def _followed(character: str) -> tuple[str, ...]:
    return (character, character + "s x", character + "1", character + "\n", character * 2 + "a", character + "'s")


def _is_safe(words: Words, befores: Sequence[str], afters: Sequence[str]) -> bool:
    return all(words.cuts(before, after) for before in befores for after in afters)


def _piece_pattern(after_letter: Sequence[str], before_space: Sequence[str]) -> re.Pattern[str]:
    """Matches one piece: up to the first place where a cut is safe.

    Letters end a piece if the last is ASCII and one of `after_letter` (or the text's end) follows; other characters end
    one if the last is in `before_space` and a space and an ASCII letter follow.
    """
    stop = f"(?=[{re.escape(''.join(after_letter))}]|\\Z)"
    visible = f"[{re.escape(''.join(before_space))}]" if before_space else "(?!)"
    goes_on = f"(?:{_OTHER}*+{_LETTERS}++(?:(?<!{_LETTER})|(?!{stop})))*+"
    ends = f"(?:{_OTHER}*{visible}(?= {_LETTER})|{_OTHER}*+{_LETTERS}++|{_OTHER}++|\\Z)"
    return re.compile(f"(?!\\Z)(?: ?{_LETTER}++{stop}|{goes_on}{ends})")


def _is_local(tokenizer: Any) -> bool:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    backend = tokenizer.backend_tokenizer
    if backend.pre_tokenizer is None or not set(_kinds(backend.pre_tokenizer, "pretokenizers")) <= _LOCAL_SPLITS:
        return False
    return backend.normalizer is None or set(_kinds(backend.normalizer, "normalizers")) <= _LOCAL_NORMALIZERS


def _kinds(component: Any, parts: str) -> Iterator[str]:
    """The types of a tokenizer component, those inside a sequence one by one."""
    pending = [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop()
        if part["type"] == "Sequence":
            pending.extend(part[parts])
        else:
            yield part["type"]
