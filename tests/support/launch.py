"""Starts programs of several processes for tests, and never leaves one behind.

Each start costs about 25 seconds of CPU, nearly all of it imports: put several checks into one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_MARK = "RESULT "
_DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PREFTUNE_LAUNCHED")
_DROPPED_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PYTEST_XDIST")


def clean_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what a launcher or pytest put there: CPU, one thread, offline, loopback."""
    kept = {k: v for k, v in os.environ.items() if k not in _DROPPED and not k.startswith(_DROPPED_PREFIXES)}
    kept.update(
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME="lo",
        PYTHONPATH=str(ROOT),
    )
    return kept | dict(changes or {})


def run_command(
    command: Sequence[str], folder: Path, *, timeout: float, env: Mapping[str, str] | None = None, code: int = 0
) -> str:
    """What a command wrote, once it has ended with exit code `code`; a command that does not end is killed, and fails.

    It gets a process group of its own, so that nothing it started survives, and writes to a file, which cannot fill up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, env=clean_environment(env), cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            ended = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            pytest.fail(f"no end after {timeout} s: {' '.join(command)}\n{log.read_text()[-6000:]}")
    text = log.read_text()
    assert ended == code, f"exit code {ended}: {' '.join(command)}\n{text[-8000:]}"
    return text


def _end(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGTERM)  # the launcher ends its workers on this
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


WORKER = "tests.distributed.worker"


def torchrun(folder: Path, *names: str, env: Mapping[str, str] | None = None, timeout: float = 300) -> list[dict]:
    """The results of scenarios in two processes, in order of rank; files go to `folder`."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", WORKER]
    return _results(line, folder, names, env, timeout)


def accelerate_launch(
    setup: Path, folder: Path, *names: str, env: Mapping[str, str] | None = None, timeout: float = 300
) -> list[dict]:
    """The same with a set-up of accelerate."""
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(setup), "--num_processes", "2"]
    return _results([*line, "--main_process_port", "0", "-m", WORKER], folder, names, env, timeout)


def _results(
    line: Sequence[str], folder: Path, names: Sequence[str], env: Mapping[str, str] | None, timeout: float
) -> list[dict]:
    output = run_command([*line, str(folder), *names], folder, timeout=timeout, env=env)
    return sorted(read_results(output), key=lambda result: result["rank"])


def give_result(result: Mapping[str, Any]) -> None:
    """Writes a result in one piece, so that those of several processes do not mix."""
    sys.stdout.flush()
    os.write(1, f"\n{_MARK}{json.dumps(result)}\n".encode())


def read_results(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(_MARK)) for line in text.splitlines() if line.startswith(_MARK)]
