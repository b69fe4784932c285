"""Packing: which documents share a row, that no token is lost or moved, and that it is global and repeatable.

Plans are compared with a slow best fit that looks at every bin.
"""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from datasets import config as datasets_config
from hypothesis import given
from hypothesis import strategies as st

from preftune.data.packing import pack_dataset, plan_bins
from preftune.errors import ConfigError, DataFormatError

lengths_of_rows = st.lists(st.integers(0, 12), max_size=25)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path / "cache")


def documents(lengths):
    """Rows of these lengths, every token of its own, and labels that tell odd tokens apart."""
    ends = np.cumsum([0, *lengths])
    ids = [list(range(a, b)) for a, b in zip(ends, ends[1:])]
    return {"input_ids": ids, "labels": [[-100 if token % 2 else token for token in row] for row in ids]}


def packed(lengths, seq_length, strategy, **how):
    return pack_dataset(Dataset.from_dict(documents(lengths)), seq_length, strategy, **how)


def split(row):
    ends = np.cumsum([0, *row["seq_lengths"]])
    return [row["input_ids"][a:b] for a, b in zip(ends, ends[1:])]


def slow_best_fit(sizes, seq_length):
    """Longest first; of the bins with room the one with least, the oldest of those."""
    bins = []
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        fitting = [b for b in bins if sum(sizes[p] for p in b) + sizes[place] <= seq_length]
        if not fitting:
            bins.append([place])
        else:
            max(fitting, key=lambda b: sum(sizes[p] for p in b)).append(place)
    return bins


def test_bfd_by_hand():
    """Lengths 4 2 3 1 2 in rows of 5: 4+1, 3+2, 2."""
    rows = packed([4, 2, 3, 1, 2], 5, "bfd")
    assert rows["seq_lengths"][:] == [[4, 1], [3, 2], [2]]
    assert rows["input_ids"][:] == [[0, 1, 2, 3, 9], [6, 7, 8, 4, 5], [10, 11]]
    assert rows["labels"][:] == [[0, -100, 2, -100, -100], [6, -100, 8, 4, -100], [10, -100]]


@given(lengths_of_rows, st.integers(1, 12))
def test_bfd_is_best_fit_decreasing(lengths, seq_length):
    used = [(row, min(n, seq_length)) for row, n in enumerate(lengths) if n]
    bins = slow_best_fit([n for _, n in used], seq_length)
    wanted = [[(used[place][0], 0, used[place][1]) for place in one] for one in bins]
    assert plan_bins(np.array(lengths, np.int64), seq_length, "bfd") == wanted


@given(lengths_of_rows.filter(any), st.integers(1, 12))
def test_bfd_split_keeps_every_token(lengths, seq_length):
    bins = plan_bins(np.array(lengths, np.int64), seq_length, "bfd_split")
    assert all(0 < sum(end - start for _, start, end in one) <= seq_length for one in bins)
    seen = sorted((row, token) for one in bins for row, start, end in one for token in range(start, end))
    assert seen == [(row, token) for row, n in enumerate(lengths) for token in range(n)]


@given(lengths_of_rows.filter(any), st.integers(1, 12))
def test_wrapped_is_one_long_text(lengths, seq_length):
    bins = plan_bins(np.array(lengths, np.int64), seq_length, "wrapped")
    tokens = [(row, token) for one in bins for row, start, end in one for token in range(start, end)]
    assert tokens == [(row, token) for row, n in enumerate(lengths) for token in range(n)]
    assert all(sum(end - start for _, start, end in one) == seq_length for one in bins[:-1])


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("lengths", [[14, 9], [3, 0, 11, 25, 1, 1, 8], [10], [2] * 2500])
def test_tokens_and_labels_stay_together(strategy, lengths):
    given_rows = documents(lengths)
    label_of = {
        token: label
        for ids, labels in zip(given_rows["input_ids"], given_rows["labels"])
        for token, label in zip(ids, labels)
    }
    rows = packed(lengths, 10, strategy)
    seen = []
    for row in rows:
        assert 0 < len(row["input_ids"]) <= 10
        assert row["labels"] == [label_of[token] for token in row["input_ids"]]
        seen += row["input_ids"]
    whole = [token for ids in given_rows["input_ids"] for token in (ids[:10] if strategy == "bfd" else ids)]
    assert sorted(seen) == sorted(whole)
    if strategy == "bfd":  # no document begins in its middle
        whole_documents = {tuple(ids[:10]) for ids in given_rows["input_ids"]}
        assert all(tuple(document) in whole_documents for row in rows for document in split(row))
    assert ("seq_lengths" in rows.column_names) == (strategy != "wrapped")


def test_packing_is_global():
    """Ones and nines in different thousands of rows still share bins, which batch by batch they could not."""
    rows = packed([9] * 1200 + [1] * 1200, 10, "bfd", map_kwargs={"num_proc": 2})
    assert rows["seq_lengths"][:] == [[9, 1]] * 1200


def test_packing_is_repeatable_and_cached(tmp_path):
    one, two = packed([4, 2, 3], 5, "bfd"), packed([4, 2, 3], 5, "bfd")
    assert one[:] == two[:]
    assert one._fingerprint == two._fingerprint != packed([4, 2, 3], 6, "bfd")._fingerprint
    assert len(list((tmp_path / "cache" / "preftune").iterdir())) == 2


def test_selected_rows_and_formats():
    dataset = Dataset.from_dict(documents([4, 2, 3, 1, 2])).select([4, 2]).with_format("torch", columns=["input_ids"])
    rows = pack_dataset(dataset, 5, "bfd")
    assert rows.format["type"] == "torch"
    assert rows.format["columns"] == ["input_ids", "seq_lengths"]
    assert rows[0]["input_ids"].tolist() == [6, 7, 8, 10, 11]


def test_streams_and_dicts():
    stream = Dataset.from_dict(documents([4, 2, 3, 1, 2])).to_iterable_dataset()
    rows = list(pack_dataset(stream, 5, "bfd", map_kwargs={"batch_size": 2}))
    assert [row["seq_lengths"] for row in rows] == [[4], [2], [3, 1], [2]]
    assert rows[2]["input_ids"] == [6, 7, 8, 9]
    unknown = IterableDataset.from_generator(lambda: iter([{"input_ids": [1, 2]}, {"input_ids": []}]))
    assert list(pack_dataset(unknown, 5, "wrapped")) == [{"input_ids": [1, 2]}]
    empty = IterableDataset.from_generator(lambda: iter([{"input_ids": []}] * 3 + [{"input_ids": [1]}]))
    assert len(list(pack_dataset(empty, 5, map_kwargs={"batch_size": 2}))) == 1
    both = pack_dataset(DatasetDict({"a": Dataset.from_dict(documents([4, 2]))}), 6)
    assert type(both) is DatasetDict
    assert both["a"]["seq_lengths"][:] == [[4, 2]]


@pytest.mark.parametrize(
    ("columns", "how", "error", "message"),
    [
        ({"input_ids": [[1]], "text": ["a"]}, {}, DataFormatError, "column 'text' holds string"),
        (
            {"input_ids": [[1], [1, 2]], "m": [[1], [1]]},
            {},
            DataFormatError,
            "row 1: column 'input_ids' has 2 values and",
        ),
        ({"input_ids": [[], []]}, {}, DataFormatError, "no row has a token"),
        ({"input_ids": [[1]]}, {"strategy": "ffd"}, ConfigError, "Allowed: bfd, bfd_split, wrapped"),
        ({"input_ids": [[1]]}, {"seq_length": 0}, ConfigError, "seq_length=0 is too short"),
    ],
)
def test_what_cannot_be_packed(columns, how, error, message):
    features = None
    if columns == {"input_ids": [[], []]}:
        features = Dataset.from_dict({"input_ids": [[1]]}).features
    with pytest.raises(error, match=message):
        pack_dataset(Dataset.from_dict(columns, features=features), **{"seq_length": 5, **how})
