"""Which completion is a row's mismatched one: the next of another prompt in the order of reading, however it is read.

Compared with loops that walk forward from each row.
"""

from __future__ import annotations

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SkipBatchSampler
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from preftune.data import mismatched
from preftune.data.mismatched import (
    MismatchedRows,
    MismatchedSampler,
    MismatchedStream,
    next_other_prompt,
    prompt_groups,
    require_two_prompts,
)
from preftune.data.samplers import epoch_order
from preftune.errors import DataFormatError

groups = st.lists(st.integers(0, 3), min_size=2, max_size=12).filter(lambda g: len(set(g)) > 1)


def rows_of(prompts: list[int]) -> Dataset:
    """Row n has prompt [10 + prompt] and completion [100 + n]."""
    return Dataset.from_list(
        [
            {"prompt_ids": [10 + p], "completion_ids": [100 + n], "label": n % 2 == 0, "tag": n}
            for n, p in enumerate(prompts)
        ]
    )


def walk(order: list[int], prompts: list[int]) -> dict[int, int]:
    """Row -> the first row after it, in a circle, that has another prompt."""
    found = {}
    for place, row in enumerate(order):
        after = [*order[place + 1 :], *order[:place]]
        found[row] = next(other for other in after if prompts[other] != prompts[row])
    return found


def read(batches) -> dict[int, int]:
    """Row -> whose completion it was given."""
    return {row["tag"]: row["mismatched_ids"][0] - 100 for batch in batches for row in batch}


@given(groups, st.randoms(use_true_random=False))
def test_next_of_another_prompt(prompts, random):
    order = list(range(len(prompts)))
    random.shuffle(order)
    got = next_other_prompt(np.array(order), np.array(prompts))
    assert dict(zip(order, got.tolist())) == walk(order, prompts)


def test_groups():
    rows = Dataset.from_dict({"prompt_ids": [[1, 2], [1], [], [1, 2], [1, 2, 3], []]})
    assert prompt_groups(rows).tolist() == [0, 1, 2, 0, 3, 2]
    assert prompt_groups(rows.select([3, 1, 0])).tolist() == [0, 1, 0]


@pytest.mark.parametrize("prompts", [[0, 1, 2, 3, 4], [0, 0, 1, 1, 2, 2, 3], [0, 1, 0, 0, 0]])
@pytest.mark.parametrize("epoch", [0, 3])
def test_batches_ranks_and_workers_change_nothing(prompts, epoch):
    """R135, W11: batches of 1, 2, 3 and all, two ranks, a pass that goes on after a batch: always the same pairs."""
    rows = MismatchedRows(rows_of(prompts))
    sampler = MismatchedSampler(rows, seed=5)
    wanted = walk(epoch_order(len(prompts), 5, epoch), prompts)
    assert all(prompts[row] != prompts[other] for row, other in wanted.items())
    for size in (1, 2, 3, len(prompts)):
        whole = BatchSampler(sampler, size, drop_last=False)
        loader = DataLoaderShard(rows, batch_sampler=whole, collate_fn=list)
        loader.set_epoch(epoch)
        assert read(loader) == wanted
        skipped = DataLoaderShard(rows, batch_sampler=SkipBatchSampler(whole, 1), collate_fn=list)
        skipped.set_epoch(epoch)
        assert read(skipped).items() <= wanted.items()
        parts = {}
        for rank in range(2):
            sampler.set_epoch(99)  # the epoch must come through the wrappers
            shard = BatchSamplerShard(BatchSampler(sampler, size, drop_last=False), 2, rank)
            loader = DataLoaderShard(rows, batch_sampler=SkipBatchSampler(shard, 0), collate_fn=list)
            loader.set_epoch(epoch)
            parts |= read(loader)
        assert parts == wanted
    sampler.set_epoch(epoch)
    assert read(DataLoader(rows, batch_size=2, sampler=sampler, num_workers=2, collate_fn=list)) == wanted


def test_epochs_differ_and_the_own_order_is_that_of_plain_numbers():
    prompts = list(range(9))
    rows = MismatchedRows(rows_of(prompts))
    sampler = MismatchedSampler(rows, seed=0)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert len(sampler) == len(rows) == 9
    assert read([[rows[n] for n in range(9)]]) == {n: (n + 1) % 9 for n in range(9)}
    assert set(rows[0]) == {"prompt_ids", "completion_ids", "label", "tag", "mismatched_ids"}


def stream_of(prompts: list[int]) -> IterableDataset:
    return rows_of(prompts).to_iterable_dataset()


@given(groups)
def test_a_stream_looks_ahead(prompts):
    """The next row of another prompt; where none follows, the first row, or else the last one of another prompt."""
    got = list(MismatchedStream(stream_of(prompts)))
    assert [row["tag"] for row in got] == list(range(len(prompts)))
    for row, prompt in zip(got, prompts):
        later = [n for n in range(row["tag"] + 1, len(prompts)) if prompts[n] != prompt]
        earlier = [n for n in range(len(prompts)) if prompts[n] != prompt]
        wanted = later[0] if later else 0 if prompts[0] != prompt else earlier[-1]
        assert row["mismatched_ids"] == [100 + wanted]


def test_a_stream_holds_back_no_more_than_it_must(monkeypatch):
    monkeypatch.setattr(mismatched, "MOST_WAITING", 3)
    got = list(MismatchedStream(stream_of([0, 1, 1, 1, 1, 1, 2])))
    assert [row["tag"] for row in got] == list(range(7))
    assert all(row["mismatched_ids"] in ([100], [106], [101]) for row in got)
    with pytest.raises(DataFormatError, match="same prompt"):
        next(iter(MismatchedStream(stream_of([0] * 5))))


def test_one_prompt_is_refused():
    with pytest.raises(DataFormatError, match=r"all rows of the eval dataset have the same prompt.*apo_zero_unpaired"):
        require_two_prompts(rows_of([0, 0, 0]), "eval")
    require_two_prompts(rows_of([0, 0, 1]), "eval")
    with pytest.raises(DataFormatError, match="same prompt"):
        list(MismatchedStream(stream_of([0, 0])))
