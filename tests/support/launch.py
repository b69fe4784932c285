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


def torchrun(
    module: str,
    *arguments: Any,
    folder: Path,
    processes: int = 2,
    timeout: float = 240,
    env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The results of all ranks, in order of rank, of `python -m module arguments` in several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["-m", module, *map(str, arguments)]
    results = read_results(run_command(command, folder, timeout=timeout, env=env))
    return sorted(results, key=lambda result: result["rank"])


def give_result(result: Mapping[str, Any]) -> None:
    """Writes a result in one piece, so that those of several processes do not mix."""
    sys.stdout.flush()
    os.write(1, f"\n{_MARK}{json.dumps(result)}\n".encode())


def read_results(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(_MARK)) for line in text.splitlines() if line.startswith(_MARK)]
