"""What a model is called with for a prompt tree, in either layout, and where its hidden states of interest then are.

Index arithmetic happens on plain integers of the layout, so nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from preftune.errors import ConfigError
from preftune.models.attention import TREE_KEYWORD, Layout
from preftune.models.kernels import TreeTable
from preftune.types import PromptTree, TreeImages


@dataclass(frozen=True)
class ModelInputs:
    """Keyword arguments of one model call.

    Attributes:
        keywords: For `model(**keywords)`.
        rows: `[M]` row of each position of interest.
        columns: `[M]` its column, not counting virtual tokens that prompt learning puts before a row.
        length: Columns of `input_ids`.
    """

    keywords: dict[str, Any]
    rows: Tensor | None
    columns: Tensor
    length: int

    def pick(self, states: Tensor) -> Tensor:
        """`[M, ...]` of the model's `[rows, length (+ virtual tokens), ...]`."""
        offset = states.shape[1] - self.length
        flat = self.columns + offset if offset else self.columns
        if self.rows is not None:
            flat = flat + self.rows * states.shape[1]
        return states.flatten(0, 1).index_select(0, flat.to(states.device))


def scoring_inputs(tree: PromptTree, layout: Layout) -> ModelInputs:
    """Inputs of `layout`; the positions of interest are those that predict the scored tokens."""
    if layout == "tree":
        return ModelInputs(_tree_keywords(tree), None, tree.predict_index, tree.num_tokens)
    keywords = _padded_keywords(tree)
    columns = tree.position_ids.index_select(0, tree.predict_index)
    return ModelInputs(keywords, tree.branch_index, columns, keywords["input_ids"].shape[1])


def pooling_inputs(tree: PromptTree, layout: Layout, pad_token_id: int | None) -> ModelInputs:
    """Inputs of `layout`; the position of interest of a branch is its last token that is not `pad_token_id`.

    That is where transformers' sequence classifiers pool a row of prompt + branch, also when padding is the EOS token.
    """
    index, mask = (t.to(tree.input_ids.device) for t in _rows(tree.layout))
    real = mask if pad_token_id is None else mask & (tree.input_ids[index] != pad_token_id)
    columns = (torch.arange(index.shape[1], device=index.device) * real).argmax(-1)
    if layout == "tree":
        flat = index.gather(1, columns[:, None]).squeeze(1)
        return ModelInputs(_tree_keywords(tree), None, flat, tree.num_tokens)
    keywords = _padded_keywords(tree)
    return ModelInputs(keywords, torch.arange(len(index), device=index.device), columns, index.shape[1])


def every_position(tree: PromptTree, layout: Layout) -> ModelInputs:
    """Inputs of `layout` with all flat tokens of interest; a prompt's are read in the row of its first branch."""
    if layout == "tree":
        return ModelInputs(
            _tree_keywords(tree), None, torch.arange(tree.num_tokens, device=tree.input_ids.device), tree.num_tokens
        )
    index, mask = _rows(tree.layout)
    rows, columns = mask.nonzero(as_tuple=True)
    flat, first = np.unique(index[rows, columns].numpy(), return_index=True)
    assert len(flat) == tree.num_tokens, "a prompt without branches has no row"
    rows, columns = (t[torch.from_numpy(first)].to(tree.input_ids.device) for t in (rows, columns))
    return ModelInputs(_padded_keywords(tree), rows, columns, index.shape[1])


def _tree_keywords(tree: PromptTree) -> dict[str, Any]:
    if tree.images is not None:
        raise ConfigError("rows with images are scored in the layout 'padded' alone; set attention_layout='padded'.")
    return {
        "input_ids": tree.input_ids[None],
        "position_ids": tree.position_ids[None],
        "use_cache": False,
        TREE_KEYWORD: TreeTable(tree.layout),
    }


def _padded_keywords(tree: PromptTree) -> dict[str, Any]:
    # No position_ids: rows are padded on the right, so every family's own default is right, also those that take none.
    index, mask = (t.to(tree.input_ids.device) for t in _rows(tree.layout))
    ids = torch.where(mask, tree.input_ids[index], 0)
    mask = mask.clone()
    mask[:, 0] = True
    keywords = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
    return keywords if tree.images is None else keywords | _image_keywords(tree, tree.images)


def _image_keywords(tree: PromptTree, images: TreeImages) -> dict[str, Tensor]:
    """What the rows prompt + branch are given of images: each row all those of its prompt."""
    index, mask = (t.to(tree.input_ids.device) for t in _rows(tree.layout))
    tokens = {name: torch.where(mask, values[index], 0) for name, values in images.tokens.items()}
    rows = [given for given, (_, branches) in zip(images.prompts, tree.layout, strict=True) for _ in branches]
    names = dict.fromkeys(name for given in rows for name in given)
    return tokens | {name: _stacked([given[name] for given in rows if name in given]) for name in names}


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Tensors after one another along the first axis, others filled up with zeros: models take those for no image."""
    sizes = [max(axis) for axis in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat(
        [
            F.pad(p, [n for has, wants in zip(p.shape[:0:-1], sizes[::-1], strict=True) for n in (0, wants - has)])
            for p in parts
        ]
    )


@lru_cache(maxsize=8)
def _rows(layout: tuple[tuple[int, tuple[int, ...]], ...]) -> tuple[Tensor, Tensor]:
    """`[B, L]` flat index of each token of the rows prompt + branch, and which of them are real."""
    width = max(1, max(n + max(branches, default=0) for n, branches in layout))
    total = sum(len(branches) for _, branches in layout)
    index = np.zeros((total, width), np.int64)
    mask = np.zeros((total, width), bool)
    start = row = 0
    for n, branches in layout:
        branch_start = start + n
        for m in branches:
            index[row, :n] = np.arange(start, start + n)
            index[row, n : n + m] = np.arange(branch_start, branch_start + m)
            mask[row, : n + m] = True
            branch_start += m
            row += 1
        start = branch_start
    return torch.from_numpy(index), torch.from_numpy(mask)
