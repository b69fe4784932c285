"""FSDP2, ZeRO-2 and ZeRO-3 over two gloo processes: the losses, metrics and weights of one process; resume is exact.

On CPUs they run by the means of `tests/support/backends.py`; the set-ups are the ones that preftune brings along.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from preftune.cli.launch import config_path
from tests.distributed.compare import check, check_resume, check_watched
from tests.distributed.scenarios import save_models
from tests.support.backends import has_deepspeed
from tests.support.launch import accelerate_launch
from tests.support.models import tiny_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NAMES = [
    "sync", "adamw", "bema", "lora_bema", "aot", "checkpointed", "tokens", "ragged", "streaming",
    "rewards", "watched", "evaluation", "judged", "stored",
]  # fmt: skip
needs_deepspeed = pytest.mark.skipif(not has_deepspeed(), reason="deepspeed is not installed")
DEEPSPEED = ["deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3-tiny"]
SETUPS = ["fsdp2", "fsdp2-sharded", *(pytest.param(name, marks=needs_deepspeed) for name in DEEPSPEED)]


def write_setup(setup: str, folder: Path) -> Path:
    """The packaged set-up for CPUs.

    "sharded": with checkpoints of shards. "tiny": ZeRO-3 keeps no parameter whole, however small.
    """
    name, _, variant = setup.partition("-")
    content: dict[str, Any] = yaml.safe_load(config_path(name).read_text())
    content["use_cpu"] = True
    if variant == "sharded":
        content["fsdp_config"] |= {"fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_reshard_after_forward": False}
    if variant == "tiny":
        auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
        torch_adamw = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        path = folder / "deepspeed.json"
        path.write_text(json.dumps({**dict.fromkeys(auto, "auto"), **torch_adamw, "zero_optimization": zero}))
        content["deepspeed_config"] = {"deepspeed_config_file": str(path), "zero3_init_flag": True}
        del content["mixed_precision"]
    path = folder / "setup.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module", params=SETUPS)
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    """The results of both ranks, "folder" and "setup"."""
    folder = tmp_path_factory.mktemp(request.param)
    environment = {"HF_HOME": str(folder / "cache"), **save_models(folder / "models")}
    results = accelerate_launch(
        write_setup(request.param, folder), folder, *NAMES, "resume", env=environment, timeout=400
    )
    return [result | {"folder": folder, "setup": request.param} for result in results]


def test_weights_are_really_sharded(ranks):
    """accelerate falls back to plain data parallel without a word."""
    for number, rank in enumerate(ranks):
        assert (rank["rank"], rank["world"], rank["backend"]) == (number, 2, "gloo")
        if rank["setup"].startswith("fsdp2"):
            assert (rank["distributed_type"], rank["zero_stage"]) == ("FSDP", None)
        else:
            assert rank["distributed_type"] == "DEEPSPEED"
            assert rank["setup"].startswith(f"deepspeed_zero{rank['zero_stage']}")
        whole = sum(p.numel() for p in tiny_model().parameters())
        share = 1.0 if rank["setup"] == "deepspeed_zero2" else 0.5
        assert rank["shares"] == {name: pytest.approx(share * whole, rel=0.01) for name in ("policy", "reference")}


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(ranks, alone, name):
    check(name, ranks, alone)


def test_watching_changes_nothing(ranks):
    check_watched(ranks)


def test_resume_is_exact(ranks):
    check_resume(ranks)
