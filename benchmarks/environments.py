"""The two Python environments of a comparison, and what to say about the machine.

TRL gets a virtual environment of its own, with the same versions of everything both sides share.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRL_VERSION = "1.16.0"
SHARED = ("transformers", "accelerate", "peft", "datasets", "tokenizers", "numpy")
STAMP = "ready.json"
SITE_VARIABLE = "PREFTUNE_BENCH_SITE"
"""Folder of packages that both sides import before the installed ones (a borrowed machine: see gpu.sh)."""


def trl_requirements() -> list[str]:
    """What TRL's environment holds: this interpreter's versions of the shared packages, and TRL itself."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in SHARED] + [f"trl=={TRL_VERSION}"]


def torch_requirement() -> str:
    """This interpreter's torch without its build tag (2.13.0+cpu -> 2.13.0)."""
    return "torch==" + importlib.metadata.version("torch").split("+")[0]


def trl_python(folder: Path) -> Path:
    """The interpreter of TRL's environment, built on first use; later calls only compare the stamp."""
    python = folder / "bin" / "python"
    wanted = [torch_requirement(), *trl_requirements()]
    stamp = folder / STAMP
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return python
    print(f"bench: making TRL's environment ({', '.join(wanted)})", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    # torch first: a resolver that meets it as a mere dependency may pick another build.
    for packages in ([wanted[0]], wanted):
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    stamp.write_text(json.dumps(wanted))
    return python


def worker_environment(threads: int, cache: Path) -> dict[str, str]:
    """The environment of a worker process: threads fixed, no hub, no telemetry, caches in `cache` alone."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_DATASETS_CACHE": str(cache / "datasets"),
        "HF_HOME": str(cache / "hf"),
        "XDG_CACHE_HOME": str(cache / "xdg"),
        "TMPDIR": str(cache),
        "TQDM_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get(SITE_VARIABLE)])),
        "PYTHONUNBUFFERED": "1",
    }


def versions(python: Path) -> dict[str, str]:
    """Installed versions of what matters in the environment of `python` (absent packages left out)."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "have = {d.name.lower(): d.version for d in m.distributions()}\n"
        "names = ['torch', 'transformers', 'accelerate', 'datasets', 'peft', 'tokenizers', 'trl', 'preftune']\n"
        "print(json.dumps({'python': sys.version.split()[0], **{n: have[n] for n in names if n in have}}))"
    )
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def _first_match(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(key):
            return line.split(":", 1)[1].strip()
    return "unknown"


def machine(device: str) -> dict[str, Any]:
    """Processor, cores, memory, kernel and, where it is used, GPU of this machine; no host name, no path."""
    gpu: dict[str, str] = {}
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu["gpu"] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    return {
        **gpu,
        "cpu": _first_match("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "amx": "amx_bf16" in _first_match("/proc/cpuinfo", "flags"),
        "memory_gib": round(int(_first_match("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def code_version() -> str:
    """The commit that was measured, with "+changes" where the working tree differed from it."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode != 0:
        return "not committed"
    dirty = subprocess.run(["git", "status", "--porcelain", "preftune"], cwd=ROOT, capture_output=True, text=True)
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
