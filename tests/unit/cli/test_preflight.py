"""Checks before anything is loaded: each wrong thing is named, with what to do, and right things pass.

Files are made by hand in a temporary folder; nothing of datasets or transformers is used.
"""

from __future__ import annotations

import json
import os

import pytest

from preftune.cli import preflight
from preftune.cli.commands import COMMANDS
from preftune.cli.options import load_options
from preftune.cli.parse import parse
from preftune.errors import ConfigError, DataFormatError

ROW = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "pairs.json").write_text(json.dumps([ROW, ROW], indent=1))
    (tmp_path / "pairs.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(ROW))
    (tmp_path / "other.jsonl").write_text(json.dumps({"question": "a", "good": "b", "bad": "c"}))
    (tmp_path / "half.csv").write_text("prompt,chosen\na,b\n")
    (tmp_path / "nothing.json").write_text("")
    (tmp_path / "notes.md").write_text("hello")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(name: str, *tokens: str) -> None:
    command = COMMANDS[name]
    preflight.check(command, parse(tokens, load_options(command.option_classes)))


def dpo(*tokens: str, model: str = "model", dataset: str = "pairs.json") -> None:
    check("dpo", "--model_name_or_path", model, "--dataset_name", dataset, *tokens)


@pytest.mark.parametrize("dataset", ["pairs.json", "pairs.jsonl", "./pairs.json", "owner/name", "empty_folder"])
@pytest.mark.parametrize("model", ["model", "adapter", "owner/name", "gpt2"])
def test_right_things_pass(model, dataset):
    dpo(model=model, dataset=dataset)


def test_renamed_columns_pass():
    dpo("--columns", "prompt=question", "chosen=good", "rejected=bad", dataset="other.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "./modle"}, r"model_name_or_path='\./modle': there is no such folder; did you mean 'model'"),
        ({"model": "empty_folder"}, "without config.json"),
        ({"model": "pairs.json"}, "is a file"),
        ({"model": "/no/such/place"}, "no such folder"),
        ({"dataset": "pair.json"}, "no such file or folder; did you mean 'pairs.json'"),
        ({"dataset": "./pairs"}, "no such file"),
        ({"dataset": "notes.md"}, "not read. Known: .json"),
    ],
)
def test_wrong_paths(change, message):
    with pytest.raises(ConfigError, match=message):
        dpo(**change)


@pytest.mark.parametrize(
    ("dataset", "tokens", "message"),
    [
        ("half.csv", [], r"half\.csv has columns prompt, chosen; rejected is missing.*--columns rejected=YOUR_NAME"),
        ("other.jsonl", [], "chosen and rejected are missing"),
        (
            "other.jsonl",
            ["--columns", "chosen=god", "rejected=bad"],
            "which other.jsonl does not have; did you mean 'good'",
        ),
        ("pairs.json", ["--columns", "chosen=better"], "maps 'chosen' to 'better'.*It has: prompt, chosen, rejected"),
        ("nothing.json", [], "is empty"),
    ],
)
def test_wrong_columns(dataset, tokens, message):
    with pytest.raises(DataFormatError, match=message):
        dpo(*tokens, dataset=dataset)


def test_what_must_be_given():
    with pytest.raises(ConfigError, match="no model is given.*--model_name_or_path"):
        check("dpo", "--dataset_name", "pairs.json")
    with pytest.raises(ConfigError, match="no dataset is given.*--dataset_name"):
        check("dpo", "--model_name_or_path", "model")
    with pytest.raises(ConfigError, match="both given"):
        dpo("--datasets", '{"path": "pairs.json"}')
    with pytest.raises(ConfigError, match="datasets='pair.json'.*did you mean"):
        check("dpo", "--model_name_or_path", "model", "--datasets", '{"path": "pair.json"}')
    check("dpo", "--model_name_or_path", "model", "--datasets", '{"path": "pairs.json"}', '{"path": "owner/name"}')


def test_output_folder(folder):
    dpo("--output_dir", "new/deep/folder")
    assert not (folder / "new").exists()  # checking makes nothing
    dpo("--output_dir", str(folder))
    with pytest.raises(ConfigError, match="output_dir='pairs.json/out': 'pairs.json' is a file"):
        dpo("--output_dir", "pairs.json/out")


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_output_folder_that_cannot_be_written(folder, monkeypatch):
    """The superuser may write anywhere, so the answer of the system is replaced."""
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written"):
        dpo("--output_dir", "out")


def test_checkpoint_to_resume_from(folder):
    (folder / "checkpoint-5").mkdir()
    dpo("--resume_from_checkpoint", "checkpoint-5")
    dpo("--resume_from_checkpoint", "true")
    with pytest.raises(ConfigError, match="no such folder; did you mean 'checkpoint-5'"):
        dpo("--resume_from_checkpoint", "checkpoint-6")


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("a.json", '[{"a": 1, "b": {"c": [1, 2]}}, {"a": 2}]', ["a", "b"]),
        ("a.json", ' \n[\n {"a": "}", "b": "\\"{"}\n]', ["a", "b"]),
        ("a.jsonl", '{"a": 1}\n{"a": 2}\n', ["a"]),
        ("a.jsonl", '\ufeff{"a": 1, "b": 2}', ["a", "b"]),
        ("a.json", '{"data": [{"a": 1}]}', []),
        ("a.json", "[]", []),
        ("a.json", "[1, 2]", []),
        ("a.json", '[{"a": ', []),
        ("a.csv", 'a,"b, c",d\n1,2,3\n', ["a", "b, c", "d"]),
        ("a.tsv", "a\tb\n", ["a", "b"]),
        ("a.csv", "", []),
        ("a.txt", "hello", []),
    ],
)
def test_columns_in(folder, name, text, columns):
    (folder / name).write_text(text, encoding="utf-8")
    assert preflight.columns_in(folder / name) == columns


def test_a_file_in_another_encoding(folder):
    (folder / "a.csv").write_bytes("prompt,größe\n".encode("latin-1"))
    with pytest.raises(DataFormatError, match="UTF-8"):
        preflight.columns_in(folder / "a.csv")
