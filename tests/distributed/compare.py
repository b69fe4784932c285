"""Whether a run of several processes is that of one: names and texts equal, numbers within a tolerance.

`check` compares one scenario of every rank, with the weights, the saved model and the saved average.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Alone = Callable[[str], tuple[dict[str, Any], Path]]


def same(one: Any, two: Any, path: str = "", tolerance: float = 1e-5) -> None:
    """Equal names and texts; numbers within `tolerance`, relative above 1."""
    if isinstance(one, dict):
        assert set(one) == set(two), path
        for key in one:
            same(one[key], two[key], f"{path}/{key}", tolerance)
    elif isinstance(one, list):
        assert len(one) == len(two), path
        for i, pair in enumerate(zip(one, two, strict=True)):
            same(*pair, f"{path}[{i}]", tolerance)
    elif isinstance(one, float):
        assert two == pytest.approx(one, rel=tolerance, abs=tolerance), path
    else:
        assert one == two, path


def same_weights(one: Path, two: Path, parts: tuple[str, ...], tolerance: float = 1e-5) -> None:
    """Compares the weight files of every run below two folders; `parts` are those that must be there."""
    paths = sorted(two.rglob("weights-*.pt"))
    assert paths
    for path in paths:
        a = torch.load(one / path.relative_to(two).parent / "weights-0.pt")
        b = torch.load(path)
        assert {name for name in a if name.startswith(parts)} <= b.keys(), path
        assert b.keys() <= a.keys(), path
        for name, value in b.items():
            assert (a[name] - value).abs().max() <= tolerance, (path, name)


def check(name: str, ranks: list[dict[str, Any]], alone: Alone) -> None:
    one, folder = alone(name)
    for rank in ranks:
        two = dict(rank["scenarios"][name])
        if name == "stored":  # one process has the model itself, which gives the same numbers
            assert two.pop("reference") == "stored"
            same({k: v for k, v in one.items() if k != "reference"}, two, name)
        else:
            same(one, two, name)
    if name != "judged":
        parts = {"stored": ("policy", "model"), "tokens": ("policy", "model")}
        default = ("policy", "reference", "model", "bema")
        same_weights(folder / name, ranks[0]["folder"] / name, parts.get(name, default))


def check_watched(ranks: list[dict[str, Any]]) -> None:
    """Observers changed no weight on any rank, and one process alone wrote, each row once."""
    for rank in ranks:
        result = rank["scenarios"]["watched"]
        assert result["unchanged"] and result["written by the first alone"]
        assert [(row["step"], row["dataset"]) for row in result["rows"]] == [(s, d) for s in (2, 4) for d in "aaabb"]
        assert all(row["implicit_reward"] is not None for row in result["rows"])
        assert [(row["step"], row["dataset"]) for row in result["written to the file"]] == [(3, "a"), (3, "b")]


def check_resume(ranks: list[dict[str, Any]]) -> None:
    """Each rank ends with the digest and the logs of the run at once, also where a log spans the checkpoint."""
    for rank in ranks:
        for name, result in rank["scenarios"]["resume"].items():
            straight, *resumed = result["digests"]
            assert resumed == [straight] * 2, name
            logs, *after = result["logs"]
            assert after == [logs, logs], name
        first = rank["scenarios"]["resume"]["bfloat16"]["logs"][0][0]
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-3)
