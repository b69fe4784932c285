"""`preftune dpo --accelerate_config` really starts two CPU processes, and they train as one does with twice the batch.

A set-up that starts a single process, as accelerate's MULTI_CPU does without a word, is refused.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.dist

DROPPED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_",
    "ACCELERATE_",
    "FSDP_",
    "PREFTUNE_",
    "TORCHELASTIC_",
    "GROUP_",
)
LIMIT_SECONDS = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_tokenizer, tiny_model):
    path = tmp_path_factory.mktemp("command-line")
    make_tokenizer("plain").save_pretrained(path / "model")
    tiny_model().save_pretrained(path / "model")
    rows = [{"prompt": f"What is {i}?", "chosen": f"It is {i}." + "!" * (i % 3), "rejected": "No."} for i in range(16)]
    (path / "pairs.json").write_text(json.dumps(rows))
    (path / "alone.yaml").write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    return path


def preftune(folder: Path, *tokens: str) -> subprocess.CompletedProcess:
    """Runs the command with its output in a file, in a process group that a time-out ends as a whole."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED)}
    environment |= {
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    line = [sys.executable, "-m", "preftune.cli", *tokens]
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            line, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        output.seek(0)
        return subprocess.CompletedProcess(line, code, output.read())


def losses(folder: Path, name: str) -> list[dict[str, float]]:
    history = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return [
        {k: entry[k] for k in ("loss", "grad_norm", "rewards/margins", "num_tokens")}
        for entry in history
        if "loss" in entry
    ]


COMMON = (
    *(
        "dpo",
        "--model_name_or_path",
        "model",
        "--dataset_name",
        "pairs.json",
        "--max_steps",
        "4",
        "--logging_steps",
        "1",
    ),
    *(
        "--learning_rate",
        "0.5",
        "--optim",
        "sgd",
        "--sync_ref_model",
        "--ref_model_sync_steps",
        "2",
        "--save_strategy",
        "no",
        "--use_cpu",
    ),
)


def test_two_processes_equal_one(folder):
    two = preftune(
        folder,
        *COMMON,
        *["--per_device_train_batch_size", "2", "--output_dir", "two", "--accelerate_config", "cpu_ddp"],
    )
    assert two.returncode == 0, two.stdout[-3000:]
    one = preftune(folder, *COMMON, *["--per_device_train_batch_size", "4", "--output_dir", "one"])
    assert one.returncode == 0, one.stdout[-3000:]
    assert len(losses(folder, "two")) == 4
    for got, wanted in zip(losses(folder, "two"), losses(folder, "one"), strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    weights = [load_file(folder / name / "model.safetensors") for name in ("two", "one")]
    assert all((weights[0][name] - value).abs().max() < 1e-5 for name, value in weights[1].items())
    assert two.stdout.count("The model and its metrics are in two") == 1


def test_training_alone_is_refused(folder):
    alone = preftune(folder, *COMMON, *["--output_dir", "alone", "--accelerate_config", "alone.yaml"])
    assert alone.returncode != 0 and "2 processes were asked for" in alone.stdout, alone.stdout[-3000:]
    assert not (folder / "alone" / "trainer_state.json").exists()
