"""Preference rows to what a reward model reads: the ids of prompt + chosen and of prompt + rejected, whole.

Where the answers part is of no concern here: the collator shares whatever both sides begin with.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from preftune.data.collate import Row
from preftune.data.columns import column_names, first_row
from preftune.data.conversations import bad_value
from preftune.data.encoding import Ids, TextEncoder
from preftune.data.formats import PAIR_IDS, preference_source
from preftune.data.mapping import EncodedRow, PreparedData, as_columns, encode_dataset, tokenizer_key
from preftune.data.preference import PreferenceEncoder, check_ids
from preftune.data.report import Outcome
from preftune.data.templates import ChatRenderer
from preftune.data.tokenize import readable
from preftune.data.tree import build_tree

REWARD_IDS = ("chosen_ids", "rejected_ids")
MARGIN = "margin"
_LEGACY = {"chosen_input_ids": "chosen_ids", "rejected_input_ids": "rejected_ids"}


def prepare_reward(
    dataset: Any,
    tokenizer: Any,
    *,
    max_length: int | None = 1024,
    overlong: str = "drop",
    truncation_mode: str = "keep_start",
    columns: Mapping[str, str] | None = None,
    num_proc: int | None = None,
    eos_token_ids: Collection[int] = (),
    keep_columns: Collection[str] = (),
    name: str = "train",
) -> PreparedData:
    """Pairs of texts or messages, with or without a prompt column, to `chosen_ids` and `rejected_ids` (each whole).

    Rows of ids (`chosen_ids` and `rejected_ids`, after `prompt_ids` where that column is there) are only checked and
    fitted. A column `margin` is carried along.

    Args:
        max_length: Most tokens of prompt + answer; None: no limit.
        overlong: What becomes of longer pairs: "drop", or "cut" as `fit_pair` does.
        truncation_mode: Which end is kept of what is cut.
        columns: The user's names of columns.
        eos_token_ids: Ids that end a text besides the tokenizer's own.
        keep_columns: More columns to carry along.
        name: What the report calls the dataset.

    Raises:
        DataFormatError: columns or values that cannot be used, or no usable row.
        ConfigError: an option that does not fit.
    """
    dataset = _modern(readable(dataset, columns, truncation_mode, name))
    encoder = TextEncoder(tokenizer, eos_token_ids=eos_token_ids)
    found = column_names(dataset)
    source = "ids" if set(REWARD_IDS) <= set(found) else preference_source(found, first_row(dataset, name), name)
    pairs = PreferenceEncoder(encoder, ChatRenderer(tokenizer), source, None, truncation_mode, needs_prompt=False)
    encode = RewardEncoder(pairs, max_length, overlong, truncation_mode)
    key = ["reward", source, max_length, overlong, truncation_mode, sorted(encoder.ends), *tokenizer_key(tokenizer)]
    keep = {*keep_columns, MARGIN}
    return encode_dataset(dataset, encode, REWARD_IDS, key=key, name=name, keep=keep, num_proc=num_proc)


def _modern(dataset: Any) -> Any:
    """The dataset with the present names of columns of ids."""
    old = [column for column in _LEGACY if column in column_names(dataset)]
    if not old:
        return dataset
    names = {column: _LEGACY[column] for column in old}
    warnings.warn(
        f"columns {old} are of an older library; they are read as {list(names.values())}. Rename them in the dataset.",
        FutureWarning,
        stacklevel=3,
    )
    return dataset.rename_columns(names)


@dataclass
class RewardEncoder:
    """Encodes batches of preference rows for a reward model; picklable, so that several processes can.

    Attributes:
        pairs: Reads rows that are no ids; it must not cut.
        max_length, overlong, truncation_mode: See `fit_pair`.
    """

    pairs: PreferenceEncoder
    max_length: int | None
    overlong: str
    truncation_mode: str

    def __call__(self, batch: Mapping[str, list], rows: list[int]) -> dict[str, list]:
        for row, margin in zip(rows, batch.get(MARGIN, ())):
            if type(margin) not in (int, float) or not math.isfinite(margin):
                raise bad_value(row, MARGIN, margin, "a finite number in every row (or no such column)")
        if self.pairs.source == "ids":
            encoded = [self._fit(*self._given(batch, place, row)) for place, row in enumerate(rows)]
        else:
            read = self.pairs(batch, rows)
            wholes = zip(*(read[column] for column in PAIR_IDS), read["_outcome"])
            encoded = [
                self._fit([*p.tolist(), *c.tolist()], [*p.tolist(), *r.tolist()], Outcome(outcome))
                for p, c, r, outcome in wholes
            ]
        return as_columns(encoded, REWARD_IDS)

    def _given(self, batch: Mapping[str, list], place: int, row: int) -> tuple[Ids, Ids]:
        sides = {column: batch[column][place] for column in PAIR_IDS if column in batch}
        for column, ids in sides.items():
            check_ids(ids, row, column)
        prompt = sides.get("prompt_ids", [])
        return [*prompt, *sides["chosen_ids"]], [*prompt, *sides["rejected_ids"]]

    def _fit(self, chosen: Ids, rejected: Ids, outcome: Outcome = Outcome.KEPT) -> EncodedRow:
        if outcome is not Outcome.KEPT:
            return EncodedRow((), outcome)
        fitted, outcome = fit_pair(chosen, rejected, self.max_length, self.overlong, self.truncation_mode)
        return EncodedRow(fitted, outcome, cut=len(chosen) + len(rejected) - sum(map(len, fitted)))


def fit_pair(
    chosen: Ids, rejected: Ids, max_length: int | None, overlong: str, truncation_mode: str
) -> tuple[tuple[Ids, Ids], Outcome]:
    """Two whole sequences of at most `max_length` tokens, and whether they can be trained on.

    With `overlong="cut"`, keep_start cuts the end of each side, which is where the score is read: the model then
    judges the beginnings of the answers. keep_end cuts the same number of tokens from the beginning of both sides, as
    many as the longer one needs, and never more than they share: the answers stay whole.
    """
    longest = max(len(chosen), len(rejected))
    if not min(len(chosen), len(rejected)):
        return (chosen, rejected), Outcome.EMPTY_ANSWER
    if chosen == rejected:
        return (chosen, rejected), Outcome.IDENTICAL
    if max_length is None or longest <= max_length:
        return (chosen, rejected), Outcome.KEPT
    if overlong == "drop":
        return (chosen, rejected), Outcome.OVERLONG
    if truncation_mode == "keep_end":
        over = longest - max_length
        if over >= shared_length(chosen, rejected):
            return (chosen, rejected), Outcome.ANSWER_FILLS
        return (chosen[over:], rejected[over:]), Outcome.KEPT
    fitted = chosen[:max_length], rejected[:max_length]
    return fitted, Outcome.PROMPT_FILLS if fitted[0] == fitted[1] else Outcome.KEPT


def shared_length(chosen: Sequence[int] | np.ndarray, rejected: Sequence[int] | np.ndarray) -> int:
    """How many tokens both sides begin with, of which each keeps its last for itself."""
    shortest = min(len(chosen), len(rejected)) - 1
    differ = np.asarray(chosen[:shortest]) != np.asarray(rejected[:shortest])
    return int(differ.argmax()) if differ.any() else max(shortest, 0)


class RewardCollator:
    """Pairs to a tree of two branches after their common beginning: chosen 0, rejected 0, chosen 1, ...

    "margin" is a float32 tensor `[rows]` where the rows have one.
    """

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        sides = [tuple(np.asarray(row[column], np.int64) for column in REWARD_IDS) for row in rows]
        shared = [shared_length(*pair) for pair in sides]
        tree = build_tree(
            [chosen[:n] for (chosen, _), n in zip(sides, shared)],
            [(chosen[n:], rejected[n:]) for (chosen, rejected), n in zip(sides, shared)],
        )
        lengths = torch.tensor([len(chosen) + len(rejected) for chosen, rejected in sides])
        batch: dict[str, Any] = {"row_lengths": lengths, "tree": tree}
        if MARGIN in rows[0]:
            batch[MARGIN] = torch.tensor([float(row[MARGIN]) for row in rows], dtype=torch.float32)
        return batch
