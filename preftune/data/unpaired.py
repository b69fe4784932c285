"""Labelled single completions to ids: `prompt_ids`, `completion_ids` and `label`, from four forms of rows.

Preference pairs become two rows each, the chosen one first, so that no stretch of rows has one label only.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value

from preftune.data.columns import column_names, missing_column
from preftune.data.conversations import bad_value, says_nothing, to_messages
from preftune.data.encoding import Branches, Ids, TextEncoder
from preftune.data.formats import (
    PAIR_IDS,
    SUPERVISED_COLUMNS,
    SupervisedRow,
    read_supervised_row,
    template_options,
)
from preftune.data.image_texts import ImageEncoder, image_encoder
from preftune.data.mapping import STREAM_ROWS, EncodedRow, PreparedData, as_columns, encode_dataset, tokenizer_key
from preftune.data.pairs import unpair_batch
from preftune.data.preference import check_ids, cut_pair
from preftune.data.report import Outcome
from preftune.data.templates import Chat, ChatRenderer
from preftune.data.tokenize import prepare_preference, readable
from preftune.errors import ConfigError

UNPAIRED_IDS = ("prompt_ids", "completion_ids")
LABEL = "label"

UnpairedSource = Literal["ids", "completions", "messages", "pairs"]


def prepare_unpaired(
    dataset: Any,
    tokenizer: Any,
    *,
    max_length: int | None = 1024,
    truncation_mode: str = "keep_start",
    columns: Mapping[str, str] | None = None,
    num_proc: int | None = None,
    eos_token_ids: Collection[int] = (),
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    keep_columns: Collection[str] = (),
    processor: Any = None,
    name: str = "train",
) -> PreparedData:
    """Rows with a label to `prompt_ids`, `completion_ids` and `label`.

    Taken are `prompt, completion, label`; `messages, label`, whose last message is the completion; pairs as
    `prepare_preference` takes them, which become two rows each (the report counts pairs); and rows of ids. A label is a
    bool, or 0 or 1. The arguments are those of `prepare_preference`.

    Raises:
        DataFormatError: columns or values that cannot be used, or no usable row.
        ConfigError: an option that does not fit.
    """
    dataset = readable(dataset, columns, truncation_mode, name)
    source = unpaired_source(column_names(dataset), name)
    images = image_encoder(dataset, processor, max_length, truncation_mode, name)
    common: dict[str, Any] = {"name": name, "num_proc": num_proc}
    if source == "pairs":
        if images is not None and images.shows_images:
            raise ConfigError(
                f"the {name} dataset holds preference pairs with images, which are not made into labelled rows here. "
                "Use unpair_preference_dataset(dataset), which makes two rows of each pair, or train with DPOTrainer."
            )
        options = {"eos_token_ids": eos_token_ids, "chat_template": chat_template, "keep_columns": keep_columns}
        options |= {"chat_template_kwargs": chat_template_kwargs, "truncation_mode": truncation_mode}
        options["processor"] = processor
        pairs = prepare_preference(dataset, tokenizer, max_length=max_length, **options, **common)
        return PreparedData(_unpair(pairs.dataset), pairs.report)
    encoder = TextEncoder(tokenizer, eos_token_ids=eos_token_ids)
    kwargs = dict(chat_template_kwargs or {})
    if images is not None:
        chat_template = chat_template or images.chat_template
        common |= images.how
    renderer = ChatRenderer(tokenizer, chat_template, kwargs)
    encode = UnpairedEncoder(encoder, renderer, source, max_length, truncation_mode, images)
    key = ["unpaired", source, max_length, truncation_mode, sorted(encoder.ends), kwargs]
    key += [*tokenizer_key(tokenizer, chat_template), *([images.key] if images is not None else [])]
    return encode_dataset(dataset, encode, UNPAIRED_IDS, key=key, keep={*keep_columns, LABEL}, **common)


def unpaired_source(columns: Collection[str], name: str) -> UnpairedSource:
    """What form the rows have, by their columns; ids win, then completions, messages, pairs.

    Raises:
        DataFormatError: none of them, with the columns found and those wanted.
    """
    found = set(columns)
    if {*UNPAIRED_IDS, LABEL} <= found:
        return "ids"
    if {"prompt", "completion", LABEL} <= found:
        return "completions"
    if LABEL in found and {"messages", "conversations"} & found and "completion" not in found:
        return "messages"
    if set(PAIR_IDS) <= found or {"chosen", "rejected"} <= found:
        return "pairs"
    whole = {"messages", "conversations"} & found
    missing = [column for column in ("prompt", "completion") if column not in found and not whole]
    missing += [LABEL] if LABEL not in found else []
    hint = "Rows without a label are for SFTTrainer." if missing == [LABEL] else ""
    raise missing_column(name, columns, missing, "labelled single completions (or pairs: 'chosen', 'rejected')", hint)


def read_label(value: Any, row: int) -> bool:
    """The label of a row: True is desirable.

    Raises:
        DataFormatError: it is no bool and neither 0 nor 1.
    """
    if isinstance(value, (int, float, np.bool_, np.integer)) and value in (0, 1):
        return bool(value)
    remedy = "Make labels true (good) or false (bad), for instance label = rating >= 4."
    raise bad_value(row, LABEL, value, "true or false (or 1 or 0)", remedy)


@dataclass
class UnpairedEncoder:
    """Encodes batches of labelled rows; picklable, so that several processes can."""

    encoder: TextEncoder
    renderer: ChatRenderer
    source: UnpairedSource
    max_length: int | None
    truncation_mode: str
    images: ImageEncoder | None = None

    def __call__(self, batch: Mapping[str, list], rows: list[int]) -> dict[str, list]:
        for label, row in zip(batch[LABEL], rows):
            read_label(label, row)
        if self.source == "ids":
            encoded = [self._given(batch, place, row) for place, row in enumerate(rows)]
        else:
            encoded = self._encode(batch, rows)
        return as_columns(encoded, UNPAIRED_IDS)

    def _encode(self, batch: Mapping[str, list], rows: list[int]) -> list[EncodedRow]:
        columns = [column for column in SUPERVISED_COLUMNS if column in batch]
        read = [self._read({column: batch[column][place] for column in columns}, row) for place, row in enumerate(rows)]
        usable = [(row, item) for row, item in zip(rows, read) if isinstance(item, SupervisedRow)]
        shown = self.images.read(batch, rows) if self.images is not None else {}
        if self.images is not None:
            for row, item in usable:
                if not item.is_text:
                    item.prompt, item.completion = self.images.place([item.prompt, item.completion], shown[row], row)
        chats = []
        for row, item in usable:
            if not item.is_text:
                options = (item.tools, item.template_kwargs)
                chats.append(Chat(item.prompt, row, True, *options))
                chats.append(Chat(item.prompt + item.completion, row, False, *options))
        rendered = iter(self.renderer.render(chats) if chats else ())
        texts = [
            (item.prompt, item.prompt + item.completion) if item.is_text else (next(rendered), next(rendered))
            for _, item in usable
        ]
        if self.images is not None:
            expanded = [self.images.expand(p, (w,), shown[row], row) for (row, _), (p, w) in zip(usable, texts)]
            texts = [(text.prompt, *text.wholes) for text in expanded]
        branches = iter(self.encoder.branches([prompt for prompt, _ in texts], [(whole,) for _, whole in texts]))
        return [
            EncodedRow((), outcome=item) if isinstance(item, Outcome) else self._finish(item, next(branches))
            for item in read
        ]

    def _read(self, values: Mapping[str, Any], row: int) -> SupervisedRow | Outcome:
        if self.source == "messages":
            column = next((c for c in ("messages", "conversations") if values.get(c) is not None), "messages")
            messages = to_messages(values.get(column), row, column)
            if not messages or messages[-1]["role"] != "assistant":
                return Outcome.EMPTY_ANSWER
            item = SupervisedRow(messages[:-1], messages[-1:], *template_options(values, row))
        else:
            item = read_supervised_row(values, row, "completions", "")
        if item.is_text:
            return item if item.completion.strip() else Outcome.EMPTY_ANSWER
        if says_nothing(item.completion):
            return Outcome.EMPTY_ANSWER
        return item if item.prompt else Outcome.NO_PROMPT

    def _finish(self, item: SupervisedRow, branches: Branches) -> EncodedRow:
        prompt, (completion,) = branches.prompt, branches.answers
        if item.is_text:
            prompt, completion = self.encoder.open(prompt), self.encoder.close(item.completion, completion)
        ends = self.encoder.ends
        return self._cut(prompt, completion, branches.moved, bool(ends) and ends.isdisjoint(completion[-8:]))

    def _given(self, batch: Mapping[str, list], place: int, row: int) -> EncodedRow:
        for column in UNPAIRED_IDS:
            check_ids(batch[column][place], row, column)
        return self._cut(*(batch[column][place] for column in UNPAIRED_IDS))

    def _cut(self, prompt: Ids, completion: Ids, moved: int = 0, unended: bool = False) -> EncodedRow:
        # a pair of one completion with itself is cut as one, and only a pair can be of equals
        cut, outcome = cut_pair(prompt, completion, completion, self.max_length, self.truncation_mode)
        lost = len(prompt) + len(completion) - len(cut[0]) - len(cut[1])
        return EncodedRow(cut[:2], Outcome.KEPT if outcome is Outcome.IDENTICAL else outcome, lost, moved, unended)


def _unpair(pairs: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Two rows of ids of each pair of ids: chosen, rejected, chosen, rejected, ..."""
    kept = [column for column in column_names(pairs) if column not in PAIR_IDS]
    features = None
    if pairs.features is not None:
        features = Features({column: pairs.features[column] for column in kept})
        features |= Features({column: List(Value("int32")) for column in UNPAIRED_IDS})
        features |= Features({LABEL: Value("bool")})
    is_stream = isinstance(pairs, IterableDataset)
    how: dict[str, Any] = {"batch_size": STREAM_ROWS} if is_stream else {"desc": "Making two rows of each pair"}
    return pairs.map(
        functools.partial(unpair_batch, suffix="_ids"),
        batched=True,
        remove_columns=column_names(pairs),
        features=features,
        **how,
    )
