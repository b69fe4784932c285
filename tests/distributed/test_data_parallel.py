"""Two gloo processes do what one process does with twice the batch: losses, metrics, weights, evaluation, resume.

One launch runs all scenarios; each test compares one of them with the same scenario run here, in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import scenarios, worker
from tests.support.launch import torchrun

pytestmark = pytest.mark.dist

EQUAL = ["sync", "adamw", "lora_bema", "aot", "accumulated", "tokens", "ragged", "streaming", "unequal"]
EVALUATED = ["evaluation", "stored"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """The results of both ranks, and "folder"."""
    folder = tmp_path_factory.mktemp("two")
    results = torchrun(
        "tests.distributed.worker", folder, *EQUAL, *EVALUATED, "resume", folder=folder,
        env={"HF_HOME": str(folder / "cache")},
    )  # fmt: skip
    return [result | {"folder": folder} for result in results]


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


def same_weights(one: Path, two: Path, tolerance: float = 1e-5) -> int:
    """Compares all weight files below two folders; how many were compared."""
    compared = 0
    for path in sorted(two.rglob("weights-*.pt")):
        a = torch.load(one / path.relative_to(two).parent / "weights-0.pt")
        b = torch.load(path)
        assert {n for n in a if n.startswith("policy.")} <= b.keys()
        for name in b:
            assert (a[name] - b[name]).abs().max() <= tolerance, (path, name)
        compared += 1
    return compared


def test_the_world_is_what_was_asked_for(ranks):
    """Several ways of launching fall back to one process without a word."""
    facts = [(r["rank"], r["world"], r["backend"], r["distributed_type"]) for r in ranks]
    assert facts == [(0, 2, "gloo", "MULTI_CPU"), (1, 2, "gloo", "MULTI_CPU")]


@pytest.mark.parametrize("name", [*EQUAL, *EVALUATED])
def test_equals_one_process(tmp_path, ranks, name):
    one = worker.run(tmp_path, [name])[name]
    for rank in ranks:
        two = rank["scenarios"][name]
        if name == "stored":
            assert (one.pop("reference", "frozen_copy"), two.pop("reference")) == ("frozen_copy", "stored")
        same(one, two, name)
    assert same_weights(tmp_path / name, ranks[0]["folder"] / name) >= 2


def test_references_moved(ranks):
    for name, form in (("sync", "frozen_copy"), ("lora_bema", "reference_adapter")):
        result = ranks[0]["scenarios"][name]
        assert result["reference"] == form
        assert result["logs"][-1]["reference/moves"] >= 2


def test_resume_is_exact(ranks):
    """Each rank ends with the same digest and the same logs, also where a log window spans the checkpoint."""
    for rank in ranks:
        for name, result in rank["scenarios"]["resume"].items():
            straight, *resumed = result["digests"]
            assert resumed == [straight] * 2, name
            logs, *after = result["logs"]
            for later in after:
                end = [entry for entry in later if entry["step"] == 7]
                assert end == [entry for entry in logs if entry["step"] == 7], name
    a, b = (rank["scenarios"]["resume"]["sync"]["digests"][0] for rank in ranks)
    assert a == b


def test_fewer_processes_go_on(tmp_path, ranks):
    """A checkpoint of two processes, resumed by one with twice the batch, in the middle of a log window."""
    checkpoint = ranks[0]["folder"] / "resume" / "sync-a" / "checkpoint-2"
    one = scenarios.dpo(tmp_path, 1, max_steps=7, logging_steps=3, **scenarios.SYNC)
    one.train(resume_from_checkpoint=str(checkpoint))
    same(scenarios.logs_of(one), ranks[0]["scenarios"]["resume"]["sync"]["logs"][0], tolerance=1e-4)
