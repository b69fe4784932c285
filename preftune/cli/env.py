"""`preftune env`: versions, hardware and threads, for a bug report or a look at the machine.

Nothing about the user, and nothing is sent anywhere.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence

from preftune.errors import ConfigError

REQUIRED = ("torch", "transformers", "accelerate", "datasets", "peft")
OPTIONAL = (
    "deepspeed",
    "bitsandbytes",
    "liger-kernel",
    "flash-attn",
    "vllm",
    "wandb",
    "comet-ml",
    "weave",
    "trackio",
    "mlflow",
)
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "PYTORCH_ALLOC_CONF",
)


def main(words: Sequence[str] = ()) -> int:
    """Print the environment, one `name: value` a line."""
    if words and words[0] not in ("--help", "-h"):
        raise ConfigError(f"preftune env takes no options, and {words[0]!r} was given.")
    if words:
        print("usage: preftune env\n\nShow versions, hardware and threads.")
        return 0
    for name, value in environment():
        print(f"{name}: {value}")
    return 0


def environment() -> list[tuple[str, str]]:
    """Names and values, most asked for first."""
    return [*_versions(), *_hardware(), *_variables()]


def _versions() -> list[tuple[str, str]]:
    from preftune import __version__

    lines = [("preftune", __version__), ("python", platform.python_version()), ("platform", platform.platform())]
    lines += [(package, _version(package) or "not installed") for package in REQUIRED]
    return lines + [(package, version) for package in OPTIONAL if (version := _version(package)) is not None]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware() -> list[tuple[str, str]]:
    import torch

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    lines = [("cpu", f"{_cpu_name()}, {cores} cores usable, torch threads {torch.get_num_threads()}")]
    memory = _memory()
    if memory is not None:
        lines.append(("memory", f"{memory / 2**30:.1f} GiB"))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return [*lines, ("accelerator", "none (training runs on the CPU in float32)")]
    if accelerator.type != "cuda":
        return [*lines, ("accelerator", f"{torch.accelerator.device_count()} x {accelerator.type}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append((f"gpu {index}", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"))
    return [*lines, ("cuda", str(torch.version.cuda)), ("bf16", str(torch.cuda.is_bf16_supported()))]


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # Windows has no sysconf
        return None


def _variables() -> list[tuple[str, str]]:
    return [(name, os.environ[name]) for name in VARIABLES if name in os.environ]
