"""Starts a command in several processes through `accelerate launch`.

Each process checks that the world has the size asked for: several set-ups fall back to one process without a word.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from preftune.configs.fields import did_you_mean, option
from preftune.errors import ConfigError

LAUNCHED = "PREFTUNE_LAUNCHED"  # set for the processes that we start, to the number of them


@dataclass
class LaunchArguments:
    """How many processes run, and where."""

    accelerate_config: str | None = option(
        None,
        "A set-up for accelerate: cpu_ddp, multi_gpu, deepspeed_zero2, deepspeed_zero3, fsdp2, or your own YAML "
        "file. With other options of this group alone: multi_gpu, or cpu_ddp where there is no GPU.",
    )
    num_processes: int | None = option(None, "Processes in all, over all machines. Unset: one for each GPU.", low=1)
    num_machines: int | None = option(None, "Machines that take part.", low=1)
    machine_rank: int | None = option(None, "The number of this machine, from 0.", low=0)
    main_process_ip: str | None = option(None, "Address of machine 0.")
    main_process_port: int | None = option(None, "Port on machine 0; 0 picks a free one on a single machine.", low=0)
    mixed_precision: str | None = option(
        None,
        "Precision that accelerate sets up (bf16 and fp16 of the training options go first).",
        choices=("no", "fp16", "bf16", "fp8"),
    )
    gpu_ids: str | None = option(None, "The GPUs to use on this machine, for instance 0,1; all: all of them.")
    num_cpu_threads_per_process: int | None = option(None, "CPU threads of each process.", low=1)
    rdzv_backend: str | None = option(None, "How machines find one another: static or c10d.")


def config_names() -> list[str]:
    """Names of the set-ups that come with preftune."""
    found = files("preftune.cli").joinpath("accelerate_configs").iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in found if entry.name.endswith(".yaml"))


def config_path(name: str) -> Path:
    """The file of a set-up given by name or as a file.

    Raises:
        ConfigError: There is neither such a name nor such a file.
    """
    packaged = Path(str(files("preftune.cli").joinpath("accelerate_configs", f"{name}.yaml")))
    if "/" not in name and packaged.is_file():
        return packaged
    if Path(name).is_file():
        return Path(name).resolve()
    names = config_names()
    raise ConfigError(
        f"accelerate_config={name!r} is neither a file nor a known set-up{did_you_mean(name, names) or '.'} "
        f"Known: {', '.join(names)}."
    )


def already_launched(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several started together, by us or by another launcher."""
    return LAUNCHED in environment or "LOCAL_RANK" in environment


def launch_command(command: str, settings: Mapping[str, Any], tokens: Sequence[str]) -> tuple[list[str], int]:
    """The command line that starts all processes, and how many there will be.

    Args:
        command: The preftune command, such as "dpo".
        settings: The launch options given.
        tokens: The other options, as typed.
    """
    chosen = dict(settings)
    name = chosen.pop("accelerate_config", None) or ("multi_gpu" if _num_devices() else "cpu_ddp")
    path = config_path(name)
    processes = chosen.pop("num_processes", None) or _processes_in(path) or _num_devices() or 1
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    line += ["--num_processes", str(processes)]
    machines = int(chosen.get("num_machines") or _machines_in(path))
    if machines == 1 and "main_process_port" not in chosen and not _setting_in(path, "main_process_port"):
        line += ["--main_process_port", "0"]  # a free one: two runs on one machine do not meet
    for key, value in chosen.items():
        if value is not None:
            line += [f"--{key}", str(value)]
    return [*line, "-m", "preftune.cli", command, *tokens], processes


def launch(line: Sequence[str], processes: int) -> int:
    """Start the processes, in place of this one where the system can; the exit code where it cannot."""
    environment = {**os.environ, LAUNCHED: str(processes)}
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execve(line[0], list(line), environment)  # signals and exit code are then the launcher's own
    return subprocess.run(line, env=environment, check=False).returncode


def check_world_size(environment: Mapping[str, str], world_size: int) -> None:
    """Refuse to train alone where several processes were asked for.

    Args:
        environment: That of this process.
        world_size: Of the process group that training will use.

    Raises:
        ConfigError: It is another number than was launched.
    """
    wanted = int(environment.get(LAUNCHED) or environment.get("WORLD_SIZE") or 1)
    if world_size != wanted:
        raise ConfigError(
            f"{wanted} processes were asked for, but this one is in a group of {world_size}: each would train alone. "
            "On CPUs use --accelerate_config cpu_ddp, or distributed_type MULTI_GPU with use_cpu true in your own file."
        )


def _setting_in(path: Path, key: str) -> Any:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: it is not YAML. {' '.join(str(error).split())}") from error
    return content.get(key) if isinstance(content, dict) else None


def _processes_in(path: Path) -> int:
    return int(_setting_in(path, "num_processes") or 0)


def _machines_in(path: Path) -> int:
    return int(_setting_in(path, "num_machines") or 1)


def _num_devices() -> int:
    import torch

    return torch.accelerator.device_count()
