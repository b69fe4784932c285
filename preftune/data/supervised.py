"""Supervised rows to ids and labels: what is scored has its id as label, everything else -100.

Labels stand at their own token, not shifted: the collator scores token t by what stands before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preftune.data.encoding import Ids, TextEncoder, common_prefix_length
from preftune.data.formats import SUPERVISED_COLUMNS, SupervisedRow, SupervisedSource, read_supervised_row
from preftune.data.image_texts import ImageEncoder
from preftune.data.mapping import EncodedRow, as_columns
from preftune.data.preference import check_ids
from preftune.data.report import Outcome
from preftune.data.templates import Chat, ChatRenderer
from preftune.errors import DataFormatError

UNSCORED = -100
SUPERVISED_IDS = ("input_ids", "labels")
# Columns of pre-tokenized rows that say what is scored, where there are no labels.
MASKS = ("completion_mask", "assistant_masks")


@dataclass
class SupervisedEncoder:
    """Encodes batches of supervised rows; picklable, so that several processes can."""

    encoder: TextEncoder
    renderer: ChatRenderer
    source: SupervisedSource
    max_length: int | None
    truncation_mode: str
    text_field: str
    completion_only: bool
    assistant_only: bool
    formatting_func: Callable[[dict[str, Any]], str] | None = None
    images: ImageEncoder | None = None

    def __call__(self, batch: Mapping[str, list], rows: list[int]) -> dict[str, list]:
        if self.source == "ids":
            encoded = [self._given(batch, place, row) for place, row in enumerate(rows)]
        else:
            encoded = self._encode(batch, rows)
        return as_columns(encoded, SUPERVISED_IDS)

    def _encode(self, batch: Mapping[str, list], rows: list[int]) -> list[EncodedRow]:
        read = [self._read(batch, place, row) for place, row in enumerate(rows)]
        shown = self._place(self.images, read, batch, rows) if self.images is not None else {}
        if self.assistant_only:
            return self._marked(read, rows)
        chats = []
        for row, item in zip(rows, read):
            if not item.is_text:
                if item.prompt is not None:
                    chats.append(_chat(item, item.prompt, row, answer_next=True))
                chats.append(_chat(item, (item.prompt or []) + item.completion, row))
        rendered = iter(self.renderer.render(chats) if chats else ())
        prompts, wholes = [], []
        for item in read:
            if item.is_text:
                prompts.append(item.prompt or "")
                wholes.append((prompts[-1] + item.completion,))
            else:
                prompts.append(next(rendered) if item.prompt is not None else "")
                wholes.append((next(rendered),))
        tokens: list[frozenset[int]] = [frozenset()] * len(rows)
        if self.images is not None:
            expanded = [self.images.expand(p, w, shown[row], row) for row, p, w in zip(rows, prompts, wholes)]
            prompts, wholes = [text.prompt for text in expanded], [text.wholes for text in expanded]
            tokens = [self.images.ids_of(text.tokens) for text in expanded]
        branches = self.encoder.branches(prompts, wholes)
        return [
            self._finish(item, b.prompt, b.answers[0], b.moved, kept) for item, b, kept in zip(read, branches, tokens)
        ]

    @staticmethod
    def _place(
        encoder: ImageEncoder, read: Sequence[SupervisedRow], batch: Mapping[str, list], rows: list[int]
    ) -> dict[int, list[Any]]:
        """The images of each row, put into its messages."""
        images = encoder.read(batch, rows)
        for row, item in zip(rows, read):
            if not item.is_text:
                *prompt, item.completion = encoder.place(
                    [item.completion] if item.prompt is None else [item.prompt, item.completion], images[row], row
                )
                item.prompt = prompt[0] if prompt else None
        return images

    def _finish(
        self, item: SupervisedRow, prompt: Ids, answer: Ids, moved: int, images: frozenset[int] = frozenset()
    ) -> EncodedRow:
        ends = self.encoder.ends
        if item.is_text:
            opened = self.encoder.open([*prompt, *answer])
            # What the tokenizer writes before a text belongs to the prompt where there is one.
            prompt = opened[: len(opened) - len(answer)] if item.prompt is not None else []
            answer = self.encoder.close(item.completion, opened[len(prompt) :])
        unended = bool(ends) and ends.isdisjoint(answer[-8:])
        scored = [not self.completion_only] * len(prompt) + [True] * len(answer)
        return self._cut([*prompt, *answer], scored, moved, unended, images=images)

    def _marked(self, read: Sequence[SupervisedRow], rows: list[int]) -> list[EncodedRow]:
        """Conversations of which only marked tokens are scored, after the prompt if only completions are."""
        whole = [_chat(item, (item.prompt or []) + item.completion, row) for item, row in zip(read, rows)]
        encoded = self.renderer.encode_marked(whole)
        prompts: list[Ids] = [[] for _ in read]
        if self.completion_only:
            opened = [_chat(item, item.prompt, row, answer_next=True) for item, row in zip(read, rows)]
            prompts = self.encoder.encode(self.renderer.render(opened))
        result = []
        for prompt, (ids, mask) in zip(prompts, encoded):
            start = common_prefix_length(prompt, ids)
            scored = [bool(marked) and place >= start for place, marked in enumerate(mask)]
            result.append(self._cut(ids, scored, len(prompt) - start))
        return result

    def _read(self, batch: Mapping[str, list], place: int, row: int) -> SupervisedRow:
        if self.formatting_func is not None:
            text = self.formatting_func({column: values[place] for column, values in batch.items()})
            if not isinstance(text, str):
                raise DataFormatError(
                    f"row {row}: formatting_func returned {type(text).__name__} {text!r:.60}; wanted one text."
                )
            return SupervisedRow(None, text, None, {})
        values = {column: batch[column][place] for column in (*SUPERVISED_COLUMNS, self.text_field) if column in batch}
        return read_supervised_row(values, row, self.source, self.text_field)

    def _given(self, batch: Mapping[str, list], place: int, row: int) -> EncodedRow:
        ids = batch["input_ids"][place]
        check_ids(ids, row, "input_ids")
        labels = batch["labels"][place] if "labels" in batch else None
        if labels is not None:
            _check_length(labels, ids, row, "labels")
            scored = [label != UNSCORED for label in labels]
        else:
            masks = [batch[column][place] for column in MASKS if column in batch]
            for column, mask in zip((column for column in MASKS if column in batch), masks):
                _check_length(mask, ids, row, column)
            scored = [all(marks) for marks in zip(*masks)] if masks else [True] * len(ids)
        images = self.images.ids_of([self.images.token]) if self.images is not None else frozenset()
        return self._cut(ids, scored, labels=labels, images=images)

    def _cut(
        self,
        ids: Ids,
        scored: list[bool],
        moved: int = 0,
        unended: bool = False,
        labels: Ids | None = None,
        images: frozenset[int] = frozenset(),
    ) -> EncodedRow:
        if images:  # what stands for an image is nothing to learn to say
            scored = [keep and token not in images for token, keep in zip(ids, scored)]
        if labels is None:
            labels = [token if keep else UNSCORED for token, keep in zip(ids, scored)]
        lost = 0
        if self.max_length is not None and not images.isdisjoint(ids[self.max_length :]):
            return EncodedRow((ids, labels), Outcome.IMAGE_CUT)
        if self.max_length is not None and len(ids) > self.max_length:
            lost = len(ids) - self.max_length
            kept = slice(lost, None) if self.truncation_mode == "keep_end" else slice(self.max_length)
            ids, labels, scored = ids[kept], labels[kept], scored[kept]
        # Nothing predicts the first token.
        outcome = Outcome.KEPT if any(scored[1:]) else Outcome.NOTHING_SCORED
        return EncodedRow((ids, labels), outcome, lost, moved, unended)


def _chat(item: SupervisedRow, messages: list[dict[str, Any]], row: int, answer_next: bool = False) -> Chat:
    return Chat(messages, row, answer_next, item.tools, item.template_kwargs)


def _check_length(values: Any, ids: Ids, row: int, column: str) -> None:
    if not isinstance(values, (list, tuple)) or len(values) != len(ids):
        found = len(values) if isinstance(values, (list, tuple)) else repr(values)[:40]
        raise DataFormatError(
            f"row {row}: {column!r} has {found} values and 'input_ids' has {len(ids)}; wanted one for each token. Cut "
            "both alike, or leave the column out."
        )
