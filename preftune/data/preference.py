"""Preference rows to ids: one prompt and two answers a row, cut to the longest length that is allowed.

Both answers always follow the same prompt ids, also where a cut shortens the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preftune.data.encoding import Branches, Ids, TextEncoder
from preftune.data.formats import (
    PAIR_IDS,
    PREFERENCE_COLUMNS,
    PreferenceRow,
    PreferenceSource,
    read_preference_row,
)
from preftune.data.image_texts import ImageEncoder
from preftune.data.mapping import EncodedRow, as_columns
from preftune.data.report import Outcome
from preftune.data.templates import Chat, ChatRenderer
from preftune.errors import DataFormatError


@dataclass
class PreferenceEncoder:
    """Encodes batches of preference rows; picklable, so that several processes can."""

    encoder: TextEncoder
    renderer: ChatRenderer
    source: PreferenceSource
    max_length: int | None
    truncation_mode: str
    needs_prompt: bool = True
    images: ImageEncoder | None = None

    def __call__(self, batch: Mapping[str, list], rows: list[int]) -> dict[str, list]:
        if self.source == "ids":
            encoded = [self._given(batch, place, row) for place, row in enumerate(rows)]
        else:
            encoded = self._encode(batch, rows)
        return as_columns(encoded, PAIR_IDS)

    def _encode(self, batch: Mapping[str, list], rows: list[int]) -> list[EncodedRow]:
        columns = [column for column in PREFERENCE_COLUMNS if column in batch]
        specials = self.encoder.special_tokens
        read = [
            read_preference_row({column: batch[column][place] for column in columns}, row, specials, self.needs_prompt)
            for place, row in enumerate(rows)
        ]
        pairs = [(row, pair) for row, pair in zip(rows, read) if isinstance(pair, PreferenceRow)]
        if self.images is not None:
            prompts, wholes = self._texts_with_images(self.images, pairs, self.images.read(batch, rows))
        else:
            prompts, wholes = self._texts(pairs)
        branches = iter(self.encoder.branches(prompts, wholes))
        return [
            EncodedRow((), outcome=pair) if isinstance(pair, Outcome) else self._finish(pair, next(branches))
            for pair in read
        ]

    def _texts(self, pairs: Sequence[tuple[int, PreferenceRow]]) -> tuple[list[str], list[tuple[str, ...]]]:
        """The text of each prompt, and the two texts of prompt + answer."""
        chats = []
        for row, pair in pairs:
            if not pair.is_text:
                options = (pair.tools, pair.template_kwargs)
                if pair.prompt:
                    chats.append(Chat(pair.prompt, row, True, *options))
                chats.extend(
                    Chat(pair.prompt + answer, row, False, *options) for answer in (pair.chosen, pair.rejected)
                )
        rendered = iter(self.renderer.render(chats) if chats else ())
        prompts: list[str] = []
        wholes: list[tuple[str, ...]] = []
        for _, pair in pairs:
            if pair.is_text:
                prompts.append(pair.prompt)
                wholes.append((pair.prompt + pair.chosen, pair.prompt + pair.rejected))
            else:
                prompts.append(next(rendered) if pair.prompt else "")
                wholes.append((next(rendered), next(rendered)))
        return prompts, wholes

    def _texts_with_images(
        self, encoder: ImageEncoder, pairs: Sequence[tuple[int, PreferenceRow]], images: Mapping[int, list[Any]]
    ) -> tuple[list[str], list[tuple[str, ...]]]:
        """The same with the placeholders of images spelled out."""
        for row, pair in pairs:
            if not pair.is_text:
                pair.prompt, chosen = encoder.place([pair.prompt, pair.chosen], images[row], row)
                pair.rejected = encoder.place([pair.rejected], [], row)[0]
                pair.chosen = chosen
        prompts, wholes = self._texts(pairs)
        expanded = [
            encoder.expand(prompt, whole, images[row], row) for (row, _), prompt, whole in zip(pairs, prompts, wholes)
        ]
        return [text.prompt for text in expanded], [text.wholes for text in expanded]

    def _finish(self, pair: PreferenceRow, branches: Branches) -> EncodedRow:
        prompt, (chosen, rejected) = branches.prompt, branches.answers
        if pair.is_text:
            prompt = self.encoder.open(prompt)
            chosen = self.encoder.close(pair.chosen, chosen)
            rejected = self.encoder.close(pair.rejected, rejected)
        ends = self.encoder.ends
        unended = bool(ends) and (ends.isdisjoint(chosen[-8:]) or ends.isdisjoint(rejected[-8:]))
        return self._cut(prompt, chosen, rejected, branches.moved, unended)

    def _cut(self, prompt: Ids, chosen: Ids, rejected: Ids, moved: int = 0, unended: bool = False) -> EncodedRow:
        cut, outcome = cut_pair(prompt, chosen, rejected, self.max_length, self.truncation_mode)
        lost = len(prompt) + len(chosen) + len(rejected) - sum(map(len, cut))
        return EncodedRow(cut, outcome, lost, moved, unended)

    def _given(self, batch: Mapping[str, list], place: int, row: int) -> EncodedRow:
        for column in PAIR_IDS:
            check_ids(batch[column][place], row, column)
        return self._cut(*(batch[column][place] for column in PAIR_IDS))


def cut_pair(
    prompt: Ids, chosen: Ids, rejected: Ids, max_length: int | None, truncation_mode: str
) -> tuple[tuple[Ids, Ids, Ids], Outcome]:
    """A pair of which prompt + answer has at most `max_length` tokens, and whether it can be trained on.

    keep_start cuts the ends of the answers; keep_end cuts the beginning of the prompt, by as much as the longer answer
    needs, since both answers follow one prompt.
    """
    if max_length is not None and len(prompt) + max(len(chosen), len(rejected)) > max_length:
        room = max_length - max(len(chosen), len(rejected))
        if truncation_mode == "keep_end":
            if room <= 0:
                return (prompt, chosen, rejected), Outcome.ANSWER_FILLS
            prompt = prompt[-room:]
        else:
            if len(prompt) >= max_length:
                return (prompt, chosen, rejected), Outcome.PROMPT_FILLS
            chosen, rejected = chosen[: max_length - len(prompt)], rejected[: max_length - len(prompt)]
    # Without a prompt nothing predicts the first token.
    unscored = 0 if len(prompt) else 1
    if min(len(chosen), len(rejected)) <= unscored:
        return (prompt, chosen, rejected), Outcome.NOTHING_SCORED
    outcome = Outcome.IDENTICAL if list(chosen) == list(rejected) else Outcome.KEPT
    return (prompt, chosen, rejected), outcome


def check_ids(ids: Any, row: int, column: str) -> None:
    """Refuses what is no list of token ids.

    Raises:
        DataFormatError: with row and column.
    """
    if not isinstance(ids, (list, tuple)) or any(type(token) is not int or token < 0 for token in ids):
        raise DataFormatError(
            f"row {row}, column {column!r}: found {ids!r:.80}; wanted a list of token ids (whole numbers from 0). "
            "Tokenize the rows anew, or remove the id columns and bring text."
        )
