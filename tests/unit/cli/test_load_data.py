"""Loading datasets from files, folders and mixtures, and the rows held out.

Small files written by hand; which rows are held out is checked by properties, not by a list of numbers.
"""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

from preftune.cli.load_data import get_dataset, hold_out, load_rows, load_splits
from preftune.configs.script import DatasetConfig, DatasetMixtureConfig, ScriptArguments
from preftune.errors import ConfigError, DataFormatError

ROWS = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    (path / "list.json").write_text(json.dumps(ROWS))
    (path / "lines.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (path / "table.csv").write_text("prompt,chosen,rejected\n" + "\n".join(",".join(row.values()) for row in ROWS))
    (path / "table.tsv").write_text("prompt\tchosen\trejected\n" + "\n".join("\t".join(row.values()) for row in ROWS))
    Dataset.from_list(ROWS).to_parquet(path / "table.parquet")
    Dataset.from_list(ROWS).save_to_disk(path / "saved")
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:2])}).save_to_disk(path / "splits")
    (path / "folder").mkdir()
    (path / "folder" / "part.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (path / "broken.json").write_text('[{"a": 1}, {')
    (path / "empty.jsonl").write_text("\n")
    (path / "others.json").write_text(json.dumps([{"question": "q", "good": "g", "bad": "b"}]))
    return path


def load(folder, name: str, **more) -> Dataset:
    rows = load_rows(DatasetConfig(path=str(folder / name)), more.pop("split", "train"), more.pop("streaming", False))
    assert isinstance(rows, (Dataset, IterableDataset))
    return rows


@pytest.mark.parametrize(
    "name", ["list.json", "lines.jsonl", "table.csv", "table.tsv", "table.parquet", "saved", "splits", "folder"]
)
def test_each_kind_of_file(folder, name):
    assert load(folder, name).to_list() == ROWS


def test_a_part_of_a_split_and_a_stream(folder):
    assert load(folder, "list.json", split="train[:3]").to_list() == ROWS[:3]
    assert list(load(folder, "lines.jsonl", streaming=True)) == ROWS


@pytest.mark.parametrize(
    ("name", "split", "kind", "message"),
    [
        ("lst.json", "train", ConfigError, "no such file or folder; did you mean 'list.json'"),
        ("splits", "tset", ConfigError, "no split 'tset'; did you mean 'test'"),
        ("list.json", "test", ConfigError, "split 'test'"),
        ("broken.json", "train", DataFormatError, "broken.json cannot be read"),
        ("empty.jsonl", "train", (ConfigError, DataFormatError), "empty.jsonl"),
    ],
)
def test_what_cannot_be_loaded(folder, name, split, kind, message):
    with pytest.raises(kind, match=message):
        load(folder, name, split=split)


def test_a_name_that_is_nowhere():
    """Offline, a hub name that is not in the cache cannot be told from one that does not exist."""
    with pytest.raises(ConfigError, match="dataset 'nobody/nothing' was not found"):
        load_rows(DatasetConfig(path="nobody/nothing"), "train", False)


def splits(folder, name: str, *, evaluate: bool = False, test_split_size: float | None = None, **script):
    arguments = ScriptArguments(dataset_name=str(folder / name), **script)
    return load_splits(arguments, DatasetMixtureConfig(test_split_size=test_split_size), evaluate=evaluate)


def test_train_and_evaluation_rows(folder):
    assert splits(folder, "splits").evaluation is None
    assert splits(folder, "splits", evaluate=True).evaluation.to_list() == ROWS[:2]
    held = splits(folder, "list.json", test_split_size=5, evaluate=True)
    assert (len(held.train), len(held.evaluation)) == (7, 5)
    with pytest.raises(ConfigError, match="split 'test'"):
        splits(folder, "list.json", evaluate=True)


@given(st.integers(2, 60), st.data())
def test_rows_held_out(total, data):
    """Every row is on exactly one side, in its order, and the same rows go out each time."""
    size = data.draw(st.integers(1, total - 1))
    rows = Dataset.from_dict({"i": list(range(total))})
    train, out = hold_out(rows, size)
    assert len(out) == size and sorted([*train["i"], *out["i"]]) == list(range(total))
    assert list(train["i"]) == sorted(train["i"]) and list(out["i"]) == sorted(out["i"])
    assert list(hold_out(rows, size)[1]["i"]) == list(out["i"])


def test_a_share_is_held_out_from_all_over():
    train, out = hold_out(Dataset.from_dict({"i": list(range(1000))}), 0.1)
    assert len(out) == 100 and len(train) == 900
    assert 400 < sum(out["i"]) / 100 < 600  # not the first or last rows


@pytest.mark.parametrize("size", [12, 13, 0.99, 0.01])
def test_one_side_may_not_be_empty(size):
    with pytest.raises(ConfigError, match="test_split_size"):
        hold_out(Dataset.from_list(ROWS), size)


def test_a_stream_gives_its_first_rows(folder):
    stream = load(folder, "lines.jsonl", streaming=True)
    train, out = hold_out(stream, 2)
    assert list(out) == ROWS[:2] and list(train) == ROWS[2:]
    with pytest.raises(ConfigError, match="number of rows"):
        hold_out(stream, 0.5)


def test_mixture(folder):
    entries = [
        {"path": str(folder / "list.json"), "split": "train[:2]", "columns": ["prompt", "chosen", "rejected"]},
        {"path": str(folder / "others.json"), "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"}},
    ]
    mixed = get_dataset(DatasetMixtureConfig(datasets=entries))
    assert list(mixed) == ["train"]
    assert mixed["train"].to_list() == [*ROWS[:2], {"prompt": "q", "chosen": "g", "rejected": "b"}]
    held = get_dataset(DatasetMixtureConfig(datasets=entries, test_split_size=1))
    assert {name: len(rows) for name, rows in held.items()} == {"train": 2, "test": 1}


def test_mixture_of_different_columns(folder):
    entries = [{"path": str(folder / "list.json")}, {"path": str(folder / "others.json")}]
    with pytest.raises(DataFormatError, match="same columns.*others.json has bad, good, question"):
        get_dataset(DatasetMixtureConfig(datasets=entries))
    entries[1]["columns"] = ["godo"]
    with pytest.raises(DataFormatError, match="no column 'godo'; did you mean 'good'"):
        get_dataset(DatasetMixtureConfig(datasets=entries))


def test_nothing_to_evaluate_on(folder):
    mixture = DatasetMixtureConfig(datasets=[{"path": str(folder / "list.json")}])
    with pytest.raises(ConfigError, match="--test_split_size"):
        load_splits(ScriptArguments(), mixture, evaluate=True)
