"""Online trainers under FSDP2, ZeRO-2 and ZeRO-3: rollouts in process from gathered weights, those of one process.

Two gloo processes; the set-ups are those of `test_sharded.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.compare import check
from tests.distributed.scenarios import save_models
from tests.distributed.test_sharded import SETUPS, write_setup
from tests.support.launch import accelerate_launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NAMES = ["online", "online_lora", "distilled"]


@pytest.fixture(scope="module", params=SETUPS)
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    environment = {"HF_HOME": str(folder / "cache"), **save_models(folder / "models")}
    results = accelerate_launch(
        write_setup(request.param, folder), folder, *NAMES, "online_resume", env=environment, timeout=400
    )
    kinds = {"FSDP"} if request.param.startswith("fsdp2") else {"DEEPSPEED"}
    assert {rank["distributed_type"] for rank in results} == kinds
    return [result | {"folder": folder, "setup": request.param} for result in results]


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(ranks, alone, name):
    check(name, ranks, alone)


def test_the_sampler_agrees_with_the_trainer(ranks):
    """What was drawn from the copy has the log-probabilities of the sharded forward."""
    for rank in ranks:
        for form in (rank["scenarios"]["online"]["grpo"], rank["scenarios"]["online_lora"]):
            gaps = [entry["sampling/sampling_logp_difference/max"] for entry in form["logs"] if "loss" in entry]
            assert gaps and max(gaps) < 1e-4


def test_resume_is_exact(ranks):
    for rank in ranks:
        for result in rank["scenarios"]["online_resume"].values():
            straight, *resumed = result["digests"]
            assert resumed == [straight] * 2
            logs, *after = result["logs"]
            assert after == [logs] * 2
