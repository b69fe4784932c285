"""Checkpoints are whole or absent; extras come back with every bit."""

from __future__ import annotations

import json

import pytest
import torch

from preftune.errors import CheckpointError
from preftune.trainers import state


def written(root, name: str) -> str:
    folder = root / ".partial" / name
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"0123456789")
    (folder / "sub").mkdir()
    (folder / "sub" / "more").write_text("text")
    return str(folder)


def test_publish_makes_a_whole_checkpoint(tmp_path):
    final = tmp_path / "checkpoint-3"
    state.publish(written(tmp_path, "checkpoint-3"), str(final))
    assert state.damage(str(final)) is None
    listing = json.loads((final / state.MANIFEST).read_text())["files"]
    assert sorted(listing) == ["sub/more", "weights"]
    # sha256 of "0123456789", from `printf 0123456789 | sha256sum`
    assert listing["weights"]["sha256"] == "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882"


def test_the_same_step_again_replaces_it(tmp_path):
    final = str(tmp_path / "checkpoint-3")
    for _ in range(2):
        state.publish(written(tmp_path, "checkpoint-3"), final)
    assert state.damage(final) is None
    assert list((tmp_path / ".partial").iterdir()) == []


def test_extras_round_trip(tmp_path):
    nan = float("nan")
    saved = {
        "a": {"w": torch.tensor([1.0, nan], dtype=torch.bfloat16), "n": 3, "none": None},
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "x": 0.1 + 0.2,
        "list": [1, "two", 3.5],
        "empty": {},
    }
    state.save_extras(str(tmp_path), saved)
    loaded = state.load_extras(str(tmp_path))
    assert loaded["x"] == saved["x"] and loaded["list"] == saved["list"] and loaded["empty"] == {}
    assert loaded["a"]["n"] == 3 and loaded["a"]["none"] is None
    for got, want in ((loaded["a"]["w"], saved["a"]["w"]), (loaded["scalar"], saved["scalar"])):
        assert got.dtype == want.dtype and torch.equal(got.nan_to_num(7), want.nan_to_num(7))


def test_shared_storage_is_saved_twice(tmp_path):
    weight = torch.arange(4.0)
    state.save_extras(str(tmp_path), {"a": weight, "b": weight})
    assert torch.equal(state.load_extras(str(tmp_path))["b"], weight)


def test_a_foreign_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="not written by preftune"):
        state.load_extras(str(tmp_path))


def test_the_newest_whole_one_is_chosen(tmp_path):
    for step in (2, 10):
        state.publish(written(tmp_path, f"checkpoint-{step}"), str(tmp_path / f"checkpoint-{step}"))
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-notes").mkdir()
    chosen = state.resolve_checkpoint(True, str(tmp_path))
    assert chosen == str(tmp_path / "checkpoint-10")
    assert state.skipped_checkpoints(chosen, str(tmp_path)) == ["checkpoint-11"]
    assert state.resolve_checkpoint(None, str(tmp_path)) is None
