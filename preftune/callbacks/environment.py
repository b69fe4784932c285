"""What a run stands on (versions, hardware, threads) and the reader of its manifest, `{output_dir}/run.json`.

Nothing about the user. Trainers write the manifest, the report and `preftune compare` read it without loading them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

MANIFEST = "run.json"

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


def read_manifest(output_dir: str | os.PathLike[str] | None) -> dict[str, Any] | None:
    """The manifest in a folder, or None where there is none that can be read."""
    try:
        manifest = json.loads((Path(output_dir or ".") / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


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
