"""Rounds: every epoch has its own order, made of seed and epoch alone; streams and maps give the same shape."""

from __future__ import annotations

import pytest
from accelerate import skip_first_batches
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from preftune.data.rounds import RoundSampler, eval_loader, round_loader
from preftune.data.samplers import epoch_order
from preftune.errors import DataFormatError


def rows(count: int) -> Dataset:
    return Dataset.from_list([{"prompt_ids": [n], "n": n} for n in range(count)])


def seen(loader, epoch: int) -> list[list[int]]:
    loader.set_epoch(epoch)
    return [[row["n"] for row in item.rows] for item in loader]


@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 3), st.integers(0, 3))
def test_a_round_is_some_rows_once(count, prompts, steps, epoch):
    sampler = RoundSampler(count, prompts, steps, seed=1, shuffle=True)
    sampler.set_epoch(epoch)
    keys = [key for (key,) in sampler]
    assert len(keys) == len(sampler) == count // prompts * steps
    used = [n for _, _, step, of_round in keys if step == 0 for n in of_round]
    assert used == epoch_order(count, 1, epoch)[: len(used)]
    assert all(len(of_round) == (prompts if step == 0 else 0) for _, _, step, of_round in keys)
    assert [(e, r, s) for e, r, s, _ in keys] == [(epoch, n // steps, n % steps) for n in range(len(keys))]


def test_epochs_differ_and_repeat():
    loader = round_loader(rows(10), round_prompts=4, steps_per_round=2, seed=3, shuffle=True)
    first, second = seen(loader, 0), seen(loader, 1)
    assert len(first) == 4 and first[1] == first[3] == []
    assert first != second
    assert seen(loader, 0) == first
    plain = round_loader(rows(10), round_prompts=4, steps_per_round=1, seed=3, shuffle=False)
    assert seen(plain, 5) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_resumed_epoch_has_its_own_order():
    """What transformers does: skip batches, then tell the epoch to the batch sampler inside."""
    loader = round_loader(rows(9), round_prompts=3, steps_per_round=1, seed=3, shuffle=True)
    whole = seen(loader, 2)
    fresh = round_loader(rows(9), round_prompts=3, steps_per_round=1, seed=3, shuffle=True)
    rest = skip_first_batches(fresh, 1)
    rest.batch_sampler.batch_sampler.set_epoch(2)
    assert [[row["n"] for row in item.rows] for item in rest] == whole[1:]


def test_a_stream_is_cut_alike():
    stream = rows(10).to_iterable_dataset()
    loader = round_loader(stream, round_prompts=4, steps_per_round=2, seed=3, shuffle=False)
    assert seen(loader, 0) == [[0, 1, 2, 3], [], [4, 5, 6, 7], []]
    shuffled = round_loader(stream, round_prompts=5, steps_per_round=1, seed=3, shuffle=True)
    first, second = seen(shuffled, 0), seen(shuffled, 1)
    assert first != second and sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(10))
    assert seen(shuffled, 0) == first


def test_too_few_rows_are_an_error():
    with pytest.raises(DataFormatError, match="3 usable rows and a generation round takes 4 distinct prompts"):
        round_loader(rows(3), round_prompts=4, steps_per_round=1, seed=0, shuffle=True)


def test_too_short_a_stream_is_an_error():
    loader = round_loader(rows(3).to_iterable_dataset(), round_prompts=4, steps_per_round=1, seed=0, shuffle=False)
    with pytest.raises(DataFormatError, match="gave 3 usable rows and a generation round takes 4 distinct prompts"):
        list(loader)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_evaluation_reads_every_row_once(count, prompts, world):
    """Over all ranks, each row once; ranks take equally many batches, those without rows of their own say so."""
    found, batches = [], set()
    for rank in range(world):
        loader = list(eval_loader(rows(count), prompts=prompts, rank=rank, world=world))
        batches.add(len(loader))
        found += [n for batch in loader if not batch["repeated"] for n in batch["numbers"]]
        assert all(row["n"] == n for batch in loader for row, n in zip(batch["rows"], batch["numbers"]))
    assert sorted(found) == list(range(count))
    assert len(batches) == 1
