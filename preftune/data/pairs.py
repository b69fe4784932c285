"""Preference pairs: taking the shared prompt out of both sides, and making two labelled rows of one pair.

Whatever is taken out, prompt + chosen and prompt + rejected are always the two sides that came in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from datasets import DatasetDict, IterableDataset, IterableDatasetDict

from preftune.data.columns import column_names
from preftune.data.conversations import is_turn
from preftune.errors import DataFormatError

# What control tokens look like where no tokenizer is at hand: <|im_end|>, </s>, [INST].
CONTROL_TOKEN = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{1,40}\]")


def extract_prompt(example: Mapping[str, Any], special_tokens: Collection[str] = ()) -> dict[str, Any]:
    """Splits `chosen` and `rejected` (two texts, or two lists of messages) into prompt, chosen and rejected.

    The prompt is all that both share at their beginning: a side that the other begins with leaves an empty answer.
    In text, a trailing space of the prompt goes to the answers, and no special token is cut: neither one of
    `special_tokens` nor what looks like one (`<|...|>`, `[INST]`).

    Raises:
        DataFormatError: a side is empty, or one is text and the other is not.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataFormatError(
            f"chosen is {type(chosen).__name__} and rejected is {type(rejected).__name__}; wanted two texts or two "
            "lists of messages. Bring both to the same form."
        )
    if not len(chosen) or not len(rejected):
        side = "rejected" if len(chosen) else "chosen"
        raise DataFormatError(f"{side} is empty, so it shares no prompt with the other side. Leave such rows out.")
    if isinstance(chosen, str):
        cut = shared_text(chosen, rejected, special_tokens)
        # Tokenizers write a space into the word after it.
        cut -= cut > 0 and chosen[cut - 1] == " "
    else:
        cut = _shared_messages(chosen, rejected)
    return {"prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}


def maybe_extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """`extract_prompt` where it applies: both sides are there, and no prompt of the same form (text or messages).

    Other columns are kept. Rows that are no pairs come back with equal values.
    """
    if "chosen" not in example or "rejected" not in example:
        return dict(example)
    if "prompt" in example and isinstance(example["prompt"], str) == isinstance(example["chosen"], str):
        return dict(example)
    return {**example, **extract_prompt(example)}


def unpair_preference_dataset(dataset: Any, **map_kwargs: Any) -> Any:
    """Two rows of each pair, chosen (`label` True) then rejected (False), in the order of the pairs.

    Takes a `Dataset`, an `IterableDataset` or a dict of them. Further columns are repeated for both rows.
    """
    if isinstance(dataset, (DatasetDict, IterableDatasetDict, dict)):
        return type(dataset)({name: unpair_preference_dataset(split, **map_kwargs) for name, split in dataset.items()})
    return dataset.map(unpair_batch, batched=True, remove_columns=["chosen", "rejected"], **map_kwargs)


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """`unpair_preference_dataset` where the dataset (each of a dict) has chosen and rejected, else the dataset."""
    if isinstance(dataset, (DatasetDict, IterableDatasetDict, dict)):
        splits = {name: maybe_unpair_preference_dataset(split, num_proc, desc) for name, split in dataset.items()}
        return type(dataset)(splits)
    if not {"chosen", "rejected"} <= set(column_names(dataset)):
        return dataset
    map_kwargs = {} if isinstance(dataset, IterableDataset) else {"num_proc": num_proc, "desc": desc}
    return unpair_preference_dataset(dataset, **map_kwargs)


def unpair_batch(batch: Mapping[str, list], suffix: str = "") -> dict[str, list]:
    """Columns of two rows a pair from columns of pairs; with a `suffix` those are `chosen{suffix}` and so on."""
    rows, sides = range(len(batch[f"chosen{suffix}"])), (f"chosen{suffix}", f"rejected{suffix}")
    twice = {column: [batch[column][row] for row in rows for _ in sides] for column in batch if column not in sides}
    completions = [batch[side][row] for row in rows for side in sides]
    return {**twice, f"completion{suffix}": completions, "label": [True, False] * len(rows)}


def _shared_messages(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    for side, messages in (("chosen", chosen), ("rejected", rejected)):
        if not all(is_turn(message) for message in messages):
            raise DataFormatError(f"{side} is neither text nor a list of messages: {messages!r:.80}.")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    return shared


def shared_text(one: str, other: str, special_tokens: Collection[str] = ()) -> int:
    """The length of the longest common beginning of two texts that cuts no special token of either."""
    cut = len(commonprefix([one, other]))
    # What is outside every token of one side may be inside a token of the other: until neither moves the cut.
    moved = True
    while moved:
        before = cut
        cut = min(_outside_tokens(side, cut, special_tokens) for side in (one, other))
        moved = cut < before
    return cut


def _outside_tokens(text: str, cut: int, special_tokens: Collection[str]) -> int:
    """The last position up to `cut` that is not inside a special token of `text`."""
    around = max(0, cut - 48)
    for match in CONTROL_TOKEN.finditer(text, around, cut + 48):
        if match.start() < cut < match.end():
            return match.start()
    for token in special_tokens:
        at = text.find(token, max(0, cut - len(token) + 1), cut + len(token) - 1)
        if at != -1 and at < cut < at + len(token):
            return at
    return cut
