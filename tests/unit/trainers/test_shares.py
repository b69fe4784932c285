"""Every row counts once, whatever the number of rows, ranks and rows in a batch: by enumeration on accelerate.

The loaders are those of the trainer, made for each rank in turn in one process.
"""

from __future__ import annotations

import itertools

import datasets
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import GradientState, PartialState
from torch.utils.data import DataLoader

from preftune.data.collate import SFTCollator
from preftune.trainers.shares import CountedRows, first_rows, own_rows

CASES = list(itertools.product(range(1, 14), (1, 2, 3), (1, 2, 3)))


@pytest.fixture(autouse=True)
def _cpu():
    PartialState(cpu=True)


def loader(rows, batch_size: int, rank: int, world: int, **options):
    plain = DataLoader(rows, batch_size=batch_size, collate_fn=list, **options)
    return prepare_data_loader(plain, num_processes=world, process_index=rank, put_on_device=False)


def stream(parts: list[list[int]]) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(_numbers, gen_kwargs={"parts": parts})


def _numbers(parts):
    for part in parts:
        yield from ({"n": n} for n in part)


def own(batches, batch_size: int, rank: int, world: int) -> list[list[int]]:
    """The rows of each batch that count for a rank; at least one row is read in every batch."""
    kept = []
    for batch in batches:
        assert len(batch) > 0
        numbers = [row["n"] if isinstance(row, dict) else row for row in batch]
        kept.append(numbers[: own_rows(len(batch), batch_size, GradientState(), rank, world)])
    return kept


@pytest.mark.parametrize("streamed", [False, True])
def test_each_row_once_and_in_order(streamed):
    for total, size, world in CASES:
        ranks = []
        for rank in range(world):
            rows = CountedRows(stream([list(range(total))])) if streamed else list(range(total))
            ranks.append(own(loader(rows, size, rank, world), size, rank, world))
        assert len({len(batches) for batches in ranks}) == 1, "ranks take unlike numbers of steps"
        steps = [[row for part in parts for row in part] for parts in zip(*ranks, strict=True)]
        wanted = [list(range(total))[i : i + size * world] for i in range(0, total, size * world)]
        assert steps == wanted, (total, size, world)


def test_after_a_resume():
    for rank in range(2):
        batches = skip_first_batches(loader(list(range(7)), 2, rank, 2), 1)
        assert own(batches, 2, rank, 2) == [[[4, 5], [6]][rank]]


def test_dropped_rows_are_not_looked_for():
    for rank in range(2):
        assert own(loader(list(range(7)), 2, rank, 2, drop_last=True), 2, rank, 2) == [[2 * rank, 2 * rank + 1]]


def test_a_stream_is_dealt_out_by_rows():
    """accelerate would give rank 0 the first shard (9 rows) and rank 1 the second (2 rows), and wait for ever."""
    rows = CountedRows(stream([list(range(9)), [9, 10]]))
    assert [len(list(loader(rows, 2, rank, 2))) for rank in range(2)] == [3, 3]


def test_first_rows_of_packed_rows():
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]},
        {"input_ids": [6, 7]},
        {"input_ids": [8, 9, 10, 11], "seq_lengths": [1, 3]},
    ]
    batch = SFTCollator()(rows)
    assert batch["tree"].num_prompts == 5
    for count in (1, 2, 3):
        part, wanted = first_rows(batch, count)["tree"], SFTCollator()(rows[:count])["tree"]
        assert part.layout == wanted.layout
        assert torch.equal(part.input_ids, wanted.input_ids) and torch.equal(part.target_index, wanted.target_index)
