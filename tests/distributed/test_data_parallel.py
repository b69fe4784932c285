"""Two gloo processes do what one process does with twice the batch: losses, metrics, weights, evaluation, resume.

One launch runs all scenarios; each test compares one of them with the same scenario run here, in one process.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import scenarios
from tests.distributed.compare import check, check_resume, check_watched, same
from tests.support.launch import torchrun

pytestmark = pytest.mark.dist

TRAINED = [
    "sync", "adamw", "bema", "lora_bema", "aot", "checkpointed", "accumulated", "tokens", "ragged", "streaming",
    "unequal", "rewards", "kto", "online", "distilled", "watched",
]  # fmt: skip
EVALUATED = ["evaluation", "judged", "stored"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """The results of both ranks, and "folder"."""
    folder = tmp_path_factory.mktemp("two")
    # a cache of its own: stored log-probabilities of the run in one process must not be found
    environment = {"HF_HOME": str(folder / "cache")}
    results = torchrun(folder, *TRAINED, *EVALUATED, "resume", env=environment)
    return [result | {"folder": folder} for result in results]


def test_the_world_is_what_was_asked_for(ranks):
    """Several ways of launching fall back to one process without a word."""
    facts = [(r["rank"], r["world"], r["backend"], r["distributed_type"]) for r in ranks]
    assert facts == [(0, 2, "gloo", "MULTI_CPU"), (1, 2, "gloo", "MULTI_CPU")]


@pytest.mark.parametrize("name", [*TRAINED, *EVALUATED])
def test_equals_one_process(ranks, alone, name):
    check(name, ranks, alone)


def test_references_moved(ranks):
    forms = {"sync": "frozen_copy", "bema": "frozen_copy", "lora_bema": "reference_adapter"}
    for name, form in forms.items():
        result = ranks[0]["scenarios"][name]
        assert result["reference"] == form
        assert result["logs"][-1]["reference/moves"] >= 2


def test_watching_changes_nothing(ranks):
    check_watched(ranks)


def test_resume_is_exact(ranks):
    check_resume(ranks)
    a, b = (rank["scenarios"]["resume"]["sync"]["digests"][0] for rank in ranks)
    assert a == b


def test_fewer_processes_go_on(tmp_path, ranks):
    """A checkpoint of two processes, resumed by one with twice the batch, in the middle of a log window."""
    checkpoint = ranks[0]["folder"] / "resume" / "sync-a" / "checkpoint-2"
    one = scenarios.dpo(tmp_path, 1, max_steps=7, logging_steps=3, **scenarios.SYNC)
    one.train(resume_from_checkpoint=str(checkpoint))
    same(ranks[0]["scenarios"]["resume"]["sync"]["logs"][0], scenarios.logs_of(one), tolerance=1e-4)
