"""Rows of ids to `PromptTree`s: what a trainer's dataloader hands to the loss.

`row_lengths` comes first in a batch: its length is the number of rows, whatever the tree looks like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preftune.data.formats import PAIR_IDS
from preftune.data.multimodal import with_images
from preftune.data.supervised import UNSCORED
from preftune.data.tree import build_tree

Row = Mapping[str, Any]
SUPERVISED_COLUMNS = ("input_ids", "labels", "seq_lengths")
UNPAIRED_COLUMNS = ("prompt_ids", "completion_ids", "mismatched_ids")


class PreferenceCollator:
    """Pairs to a tree of two branches a prompt: chosen 0, rejected 0, chosen 1, rejected 1, ...

    All branch tokens are scored. Columns of numbers (stored reference log-probabilities, weights) become float32
    tensors `[rows]`; images go into the tree; other columns are left out.

    Args:
        processor: Of a vision-language model, for rows with images.
    """

    def __init__(self, processor: Any = None) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        ids = [tuple(np.asarray(row[column], np.int64) for column in PAIR_IDS) for row in rows]
        prompts = [prompt for prompt, _, _ in ids]
        tree = build_tree(prompts, [(chosen, rejected) for _, chosen, rejected in ids])
        lengths = torch.tensor([sum(map(len, parts)) for parts in ids])
        tree = with_images(tree, rows, self.processor)
        return {"row_lengths": lengths, "tree": tree, **_numbers(rows, PAIR_IDS)}


class SFTCollator:
    """Supervised rows to a tree of one branch a document, after an empty prompt.

    A packed row gives one document for each of its `seq_lengths`. A token is scored where its label is not -100, but
    never the first of a document. Without labels every token counts. Columns of numbers become float32 tensors.

    Args:
        processor: Of a vision-language model, for rows with images, which are not packed.
    """

    def __init__(self, processor: Any = None) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        documents: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        for row in rows:
            ids = np.asarray(row["input_ids"], np.int64)
            labels = row.get("labels")
            scored = np.ones(len(ids), bool) if labels is None else np.asarray(labels, np.int64) != UNSCORED
            ends = np.cumsum(row.get("seq_lengths") or [len(ids)])
            if ends[-1] != len(ids):
                raise ValueError(f"seq_lengths sum to {ends[-1]}, and the packed row has {len(ids)} tokens")
            documents.extend(np.split(ids, ends[:-1]))
            masks.extend(np.split(scored, ends[:-1]))
        tree = build_tree([()] * len(documents), [[document] for document in documents], [[mask] for mask in masks])
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        tree = with_images(tree, rows, self.processor)
        return {"row_lengths": lengths, "tree": tree, **_numbers(rows, SUPERVISED_COLUMNS)}


class UnpairedCollator:
    """Labelled rows to a tree of one branch a prompt, or of two where the rows bring `mismatched_ids`.

    The second branch is the completion of another prompt. Labels become a bool tensor `label`, columns of numbers
    float32 tensors.

    Args:
        max_length: Most tokens of prompt + mismatched completion; what belongs together was cut before.
        processor: Of a vision-language model, for rows with images.
    """

    def __init__(self, max_length: int | None = None, processor: Any = None) -> None:
        self.max_length = max_length
        self.processor = processor

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        prompts, branches = [], []
        for row in rows:
            prompt, *answers = (np.asarray(row[column], np.int64) for column in UNPAIRED_COLUMNS if column in row)
            if self.max_length is not None:
                answers[1:] = [ids[: max(1, self.max_length - len(prompt))] for ids in answers[1:]]
            prompts.append(prompt)
            branches.append(answers)
        lengths = torch.tensor([len(p) + sum(map(len, b)) for p, b in zip(prompts, branches)])
        labels = torch.tensor([bool(row["label"]) for row in rows])
        tree = with_images(build_tree(prompts, branches), rows, self.processor)
        batch = {"row_lengths": lengths, "tree": tree, "label": labels}
        return batch | _numbers(rows, (*UNPAIRED_COLUMNS, "label"))


def _numbers(rows: Sequence[Row], used: Sequence[str]) -> dict[str, Tensor]:
    """The columns of numbers that every row has, besides those `used`."""
    first = rows[0]
    names = [name for name, value in first.items() if name not in used and isinstance(value, (Number, Tensor))]
    return {
        name: torch.tensor([float(row[name]) for row in rows], dtype=torch.float32)
        for name in names
        if all(row.get(name) is not None for row in rows)
    }
