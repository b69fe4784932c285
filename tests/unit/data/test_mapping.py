"""How datasets are prepared: once (the cache), in several processes, while they stream, in dicts.

What the cache key depends on is what changes ids, and nothing else.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset
from datasets import config as datasets_config

from preftune.data import mapping
from preftune.data.mapping import cache_file, tokenizer_key
from preftune.data.prompts import prepare_prompts
from preftune.data.reward import prepare_reward
from preftune.data.tokenize import prepare_eval, prepare_preference, prepare_sft
from preftune.data.unpaired import prepare_unpaired
from preftune.errors import DataFormatError
from tests.support.tokenizers import make_tokenizer as build_tokenizer

IDS = ["prompt_ids", "chosen_ids", "rejected_ids"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def calls(monkeypatch, tokenizer):
    """The batches that the tokenizer was asked for, without the two of a word that find out what it adds."""
    seen = []
    plain = type(tokenizer).__call__

    def counting(self, text, *args, **how):
        if text != "a":
            seen.append(text)
        return plain(self, text, *args, **how)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    return seen


@pytest.fixture
def on_disk(tmp_path, preference_rows):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(preference_rows["sharegpt"]))
    return functools.partial(
        load_dataset, "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "loaded")
    )


def test_a_second_preparation_tokenizes_nothing(on_disk, preference_rows, calls, make_tokenizer):
    for load in (on_disk, lambda: Dataset.from_list(preference_rows["text"])):
        calls.clear()
        first = prepare_preference(load(), make_tokenizer())
        assert calls
        calls.clear()
        again = prepare_preference(load(), make_tokenizer())
        assert calls == []
        assert again.dataset[:] == first.dataset[:]
        assert str(again.report) == str(first.report)
        assert again.report.to_dict() == first.report.to_dict()
        assert again.dataset._fingerprint == first.dataset._fingerprint


LABELLED = [{"prompt": "q", "completion": "a", "label": n > 0} for n in range(3)]
PREPARED = {
    "sft": (prepare_sft, lambda pairs: [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]),
    "kto": (prepare_unpaired, lambda pairs: LABELLED),
    "kto_pairs": (prepare_unpaired, lambda pairs: pairs),
    "reward": (prepare_reward, lambda pairs: pairs),
    "prompts": (prepare_prompts, lambda pairs: [{"prompt": row["prompt"], "gold": "x"} for row in pairs]),
}


@pytest.mark.parametrize("kind", PREPARED)
def test_no_kind_of_rows_is_tokenized_twice(preference_rows, calls, make_tokenizer, kind):
    """R069."""
    prepare, rows_of = PREPARED[kind]
    rows, found = rows_of(preference_rows["text"]), []
    for _ in range(2):
        found.append(prepare(Dataset.from_list(rows), make_tokenizer()).dataset[:])
        assert bool(calls) is (len(found) == 1)
        calls.clear()
    assert found[0] == found[1]


def test_the_key_depends_on_what_changes_ids_only(preference_rows, calls, make_tokenizer):
    rows = Dataset.from_list(preference_rows["messages"])
    prepare_preference(rows, make_tokenizer(), max_length=50)
    assert calls
    used = make_tokenizer()
    used(["some", "texts of unequal length"], padding=True, truncation=True, max_length=3)
    used.name_or_path, used.padding_side, used.model_max_length = "elsewhere", "left", 17
    calls.clear()
    prepare_preference(rows, used, max_length=50, name="other", num_proc=None)
    assert calls == []
    grown = make_tokenizer()
    grown.add_tokens(["France"])
    changes = [
        {"max_length": 49},
        {"truncation_mode": "keep_end"},
        {"eos_token_ids": [5]},
        {"chat_template": used.chat_template + "x"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"tokenizer": grown},
        {"tokenizer": make_tokenizer("pad_is_eos")},
    ]
    for change in changes:
        calls.clear()
        prepare_preference(rows, **{"tokenizer": make_tokenizer(), "max_length": 50, **change})
        assert calls, change


def test_the_key_is_the_same_in_another_process(preference_rows, tokenizer):
    code = (
        "import sys, json, pickle\nfrom tests.support.tokenizers import make_tokenizer\n"
        "from preftune.data.mapping import digest, tokenizer_key\nfrom datasets import Dataset\n"
        "rows = json.loads(sys.stdin.read())\n"
        "print(digest(Dataset.from_list(rows)._fingerprint, tokenizer_key(make_tokenizer())))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(preference_rows["text"]),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_formatting_functions_have_their_own_key(calls, make_tokenizer):
    def field(name):
        return lambda row: row[name]

    rows = Dataset.from_list([{"q": "two", "a": "four"}])
    texts = []
    for name, cached in (("q", False), ("a", False), ("q", True)):
        calls.clear()
        texts += prepare_sft(rows, make_tokenizer(), formatting_func=field(name)).dataset["input_ids"][:]
        assert (calls == []) is cached
    assert texts[0] == texts[2] != texts[1]


def test_caching_switched_off(preference_rows, on_disk, calls, make_tokenizer):
    datasets.disable_caching()
    try:
        for rows in (Dataset.from_list(preference_rows["sharegpt"]), on_disk()):
            assert cache_file(rows, "0" * 32) is None
            for _ in range(2):
                calls.clear()
                assert len(prepare_preference(rows, make_tokenizer()).dataset) == len(preference_rows["sharegpt"])
                assert calls
    finally:
        datasets.enable_caching()


def test_folders_that_cannot_be_written(preference_rows, on_disk, monkeypatch, tmp_path, make_tokenizer):
    """Neither the working folder nor the one of the files is needed; without any cache folder, memory does."""
    locked = tmp_path / "locked"
    locked.mkdir()
    monkeypatch.chdir(locked)
    locked.chmod(0o500)
    disk = on_disk()
    beside = os.path.dirname(disk.cache_files[0]["filename"])
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in (str(locked), beside))
    for rows in (Dataset.from_list(preference_rows["sharegpt"]), disk):
        assert cache_file(rows, "f").startswith(str(tmp_path / "cache" / "preftune"))
        prepare_preference(rows, make_tokenizer())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cache_file(disk, "f") is None
    prepare_preference(Dataset.from_list(preference_rows["text"]), make_tokenizer())
    assert list(locked.iterdir()) == []


def test_several_processes_give_the_same(preference_rows, make_tokenizer, monkeypatch):
    monkeypatch.setattr(mapping, "ROWS_PER_PROCESS", 5)
    rows = Dataset.from_list(preference_rows["sharegpt"] * 3)
    alone = prepare_preference(rows, make_tokenizer(), max_length=40)
    datasets.disable_caching()
    try:
        several = prepare_preference(rows, make_tokenizer(), max_length=40, num_proc=2)
    finally:
        datasets.enable_caching()
    assert several.dataset[:] == alone.dataset[:]
    assert several.report.to_dict() == alone.report.to_dict()


def test_streams(preference_rows, make_tokenizer):
    rows = preference_rows["messages"] * 20
    rows[3] = {**rows[3], "rejected": rows[3]["chosen"]}
    whole = prepare_preference(Dataset.from_list(rows), make_tokenizer(), max_length=50)
    known = Dataset.from_list(rows).to_iterable_dataset()
    for stream in (IterableDataset.from_generator(lambda: iter(rows)), known):
        streamed = prepare_preference(stream, make_tokenizer(), max_length=50)
        assert isinstance(streamed.dataset, IterableDataset)
        assert streamed.report.rows_in == 0  # nothing is read before it is needed
        assert [dict(row) for row in streamed.dataset] == [dict(row) for row in whole.dataset]
        assert {**streamed.report.to_dict(), "streaming": False} == whole.report.to_dict()
        assert "160 rows read so far, " in str(streamed.report)
        assert sorted(streamed.dataset.column_names) == sorted(IDS)


def test_streams_keep_columns_and_name_rows(preference_rows, make_tokenizer):
    rows = [{**row, "w": float(n)} for n, row in enumerate(preference_rows["text"])]
    rows[1] = {**rows[1], "rejected": rows[1]["chosen"]}
    stream = IterableDataset.from_generator(lambda: iter(rows))
    got = list(prepare_preference(stream, make_tokenizer(), keep_columns=["w"]).dataset)
    assert [row["w"] for row in got] == [0.0, *(float(n) for n in range(2, 8))]
    broken = IterableDataset.from_generator(lambda: iter([*rows, {**rows[0], "chosen": None}]))
    with pytest.raises(DataFormatError, match="row 8, column 'chosen'"):
        list(prepare_preference(broken, make_tokenizer()).dataset)
    with pytest.raises(DataFormatError, match="has no rows"):
        prepare_sft(IterableDataset.from_generator(lambda: iter(())), make_tokenizer())


def test_dicts_of_sets(preference_rows, sft_rows, make_tokenizer):
    stream = IterableDataset.from_generator(lambda: iter(preference_rows["text"]))
    sets = {"a": Dataset.from_list(preference_rows["text"]), "b": stream}
    prepare = functools.partial(prepare_preference, tokenizer=make_tokenizer())
    got = prepare_eval(sets, prepare)
    assert {key: [dict(r) for r in part.dataset] for key, part in got.items()}["a"] == [
        dict(r) for r in got["b"].dataset
    ]
    assert [part.report.name for part in got.values()] == ["eval_a", "eval_b"]
    assert prepare_eval(sets["a"], prepare).report.name == "eval"
    with pytest.raises(DataFormatError, match="the eval_b dataset has columns"):
        prepare_eval(DatasetDict({"a": sets["a"], "b": Dataset.from_list(sft_rows["text"])}), prepare)


def test_formats_of_datasets_do_not_matter(preference_rows, make_tokenizer):
    rows = Dataset.from_list(preference_rows["text"])
    formatted = prepare_preference(rows.with_format("torch"), make_tokenizer()).dataset
    assert formatted[:] == prepare_preference(rows, make_tokenizer()).dataset[:]
    assert formatted.format["type"] is None


def test_selected_rows(preference_rows, make_tokenizer):
    rows = Dataset.from_list(preference_rows["text"])
    got = prepare_preference(rows.select([5, 2]), make_tokenizer()).dataset
    whole = prepare_preference(rows, make_tokenizer()).dataset
    assert [dict(row) for row in got] == [whole[5], whole[2]]


def test_keys_of_tokenizers(tokenizer):
    assert tokenizer_key(build_tokenizer()) == tokenizer_key(pickle.loads(pickle.dumps(tokenizer)))
    assert tokenizer_key(tokenizer) != tokenizer_key(build_tokenizer("bos"))
    used = build_tokenizer()
    used(["some", "texts of unequal length"], padding=True, truncation=True, max_length=3)
    assert tokenizer_key(used) == tokenizer_key(tokenizer)
