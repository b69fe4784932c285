"""Which rows of a batch are this rank's own: the last batches of a pass are filled up with rows that were there before.

A run of several processes then takes the same steps as one process does, and every row counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import datasets
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler
from accelerate.state import GradientState
from torch import Tensor
from torch.utils.data import IterableDataset

from preftune.data.tree import select_prompts
from preftune.types import PromptTree

Batch = dict[str, Any]


class CountedRows(IterableDataset):
    """A stream that knows, after a pass over it, how many rows there were.

    It hides that a `datasets.IterableDataset` has shards: accelerate gives whole shards to ranks, whose numbers of rows
    then differ, and the rank with more waits for the others for ever. Any other stream is dealt out row by row.
    """

    def __init__(self, rows: datasets.IterableDataset) -> None:
        self.source = rows
        self.rows: int | None = None  # unknown in this process where dataloader workers read

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for row in self.source:
            yield row
            count += 1
        self.rows = count

    def set_epoch(self, epoch: int) -> None:
        self.source.set_epoch(epoch)


def own_rows(rows: int, batch_size: int, state: GradientState, rank: int, world: int) -> int:
    """How many of the `rows` of the batch just read are not repeated, counted from the first.

    Args:
        rows: In this rank's batch.
        batch_size: Rows of a full batch of one rank.
        state: accelerate's, which knows the dataloader that was read and whether it has ended.
        rank: Of this process.
        world: The number of processes.
    """
    if world == 1 or not state.end_of_dataloader:
        return rows
    total = _rows_dealt_out(state.active_dataloader)
    rest = 0 if total is None else total % (batch_size * world)
    return rows if rest == 0 else max(0, min(rows, rest - rank * batch_size))


def _rows_dealt_out(loader: Any) -> int | None:
    """Rows of a whole pass over all ranks, or None where none is repeated or nobody knows."""
    dealer = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.batch_sampler
    while isinstance(dealer, SkipBatchSampler):  # the rest of an epoch after a resume
        dealer = dealer.batch_sampler
    if not isinstance(dealer, BatchSamplerShard | IterableDatasetShard):
        return None
    if dealer.drop_last or dealer.split_batches or dealer.num_processes == 1:
        return None
    if isinstance(dealer, BatchSamplerShard):
        return len(cast(Any, loader.dataset))
    return dealer.dataset.rows if isinstance(dealer.dataset, CountedRows) else None


def first_rows(batch: Batch, rows: int) -> Batch:
    """The batch of its first `rows` rows; a packed row has several prompts."""
    tree: PromptTree = batch["tree"]
    lengths = batch.get("row_lengths")
    prompts, tokens = rows, 0
    if lengths is not None and len(lengths) != tree.num_prompts:
        room = int(lengths[:rows].sum())
        prompts = 0
        for prompt, branches in tree.layout:
            tokens += prompt + sum(branches)
            prompts += tokens <= room
    return select_rows(batch, list(range(prompts)))


def select_rows(batch: Batch, prompts: list[int]) -> Batch:
    """The batch of some of its prompts: the tree's, and the entries of every tensor that has one entry a prompt."""
    tree: PromptTree = batch["tree"]
    index = torch.tensor(prompts)
    picked: Batch = {}
    for name, value in batch.items():
        if name == "tree":
            picked[name] = select_prompts(tree, prompts)
        elif isinstance(value, Tensor) and value.ndim > 0 and len(value) == tree.num_prompts:
            picked[name] = value[index.to(value.device)]
        elif name != "row_lengths":
            picked[name] = value
    return picked
