"""Checkpoints that are whole or absent, and the extra state that a run needs to go on bit for bit.

A checkpoint is written under `.partial/`, listed with checksums in `manifest.json`, flushed to disk and then renamed.
Only the rename makes it a `checkpoint-N`; what a killed process leaves behind is never resumed from.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from preftune.errors import CheckpointError, ConfigError

MANIFEST = "manifest.json"
PARTIAL = ".partial"
_BLOCK = 1 << 22


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output_dir(folder: str) -> None:
    """Refuses, before anything is loaded, a folder that could not be written at the end."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        kind = "a folder that cannot be written" if existing.is_dir() else "a file"
        raise ConfigError(f"output_dir={folder!r}: {existing} is {kind}. Give a folder that you may write.")


def partial_dir(run_dir: str) -> str:
    """Where checkpoints of this run are written before they are whole."""
    return os.path.join(run_dir, PARTIAL)


def clear_partial(run_dir: str) -> None:
    """Removes what a killed run left half-written."""
    shutil.rmtree(partial_dir(run_dir), ignore_errors=True)


def publish(partial: str, final: str) -> None:
    """Turns a folder of written files into a checkpoint: manifest, flush, rename.

    An older checkpoint of the same step is replaced.
    """
    root = Path(partial)
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name != MANIFEST)
    listing = {str(p.relative_to(root)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
    (root / MANIFEST).write_text(json.dumps({"files": listing}, indent=1))
    for path in [*files, root / MANIFEST, root]:
        _flush(path)
    target = Path(final)
    if target.exists():
        retired = root.parent / f"replaced-{target.name}"
        shutil.rmtree(retired, ignore_errors=True)
        target.rename(retired)
        root.rename(target)
        shutil.rmtree(retired, ignore_errors=True)
    else:
        root.rename(target)
    _flush(target.parent)


def damage(checkpoint: str) -> str | None:
    """What is wrong with a checkpoint, or None if all its files are as they were written."""
    root = Path(checkpoint)
    if not root.is_dir():
        return "there is no such folder"
    if not (root / MANIFEST).is_file():
        return f"it has no {MANIFEST}: it was not finished, or not written by preftune"
    try:
        listing = json.loads((root / MANIFEST).read_text())["files"]
    except (ValueError, KeyError):
        return f"its {MANIFEST} cannot be read"
    for name, expected in listing.items():
        path = root / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written"
    for name, expected in listing.items():
        if _sha256(root / name) != expected["sha256"]:
            return f"{name} does not have the checksum that was written"
    return None


def resolve_checkpoint(resume: str | bool | None, output_dir: str) -> str | None:
    """The folder to resume from: `True` means the newest whole checkpoint of `output_dir`.

    Raises:
        CheckpointError: the folder named is not a whole checkpoint, or `True` finds none. The message says what is
            wrong and which other checkpoints there are.
    """
    if resume is None or resume is False:
        return None
    found = sorted(
        (p for p in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)),
        key=lambda p: int(p.name.rsplit("-", 1)[1]),
    )
    if resume is not True:
        wrong = damage(resume)
        if wrong is not None:
            others = ", ".join(str(p) for p in found if str(p) != str(resume)) or "none"
            raise CheckpointError(
                f"cannot resume from {resume}: {wrong}. Other checkpoints of {output_dir}: {others}. "
                "Name one of them, or pass resume_from_checkpoint=True for the newest whole one."
            )
        return str(resume)
    reasons = []
    for path in reversed(found):
        wrong = damage(str(path))
        if wrong is None:
            return str(path)
        reasons.append(f"{path.name}: {wrong}")
    detail = "; ".join(reasons) if reasons else "there is no checkpoint-N folder"
    raise CheckpointError(
        f"resume_from_checkpoint=True, but {output_dir} holds no whole checkpoint ({detail}). "
        "Start without resume_from_checkpoint, or give the right output_dir."
    )


def skipped_checkpoints(chosen: str, output_dir: str) -> list[str]:
    """Names of newer checkpoints that were passed over because they are not whole."""
    step = int(Path(chosen).name.rsplit("-", 1)[1]) if re.search(r"-\d+$", Path(chosen).name) else -1
    names = [p.name for p in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(n for n in names if int(n.rsplit("-", 1)[1]) > step)


def save_extras(folder: str, state: Mapping[str, Any], name: str = "preftune_state") -> None:
    """Writes nested dictionaries of tensors and plain values as `{name}.safetensors` and `{name}.json`."""
    tensors: dict[str, torch.Tensor] = {}

    def split(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[path] = value.detach().cpu().contiguous().clone()
            return {"__tensor__": path}
        if isinstance(value, Mapping):
            return {k: split(v, f"{path}/{k}") for k, v in value.items()}
        return value

    plain = split(state, "")
    save_file(tensors, os.path.join(folder, f"{name}.safetensors"))
    Path(folder, f"{name}.json").write_text(json.dumps(plain))


def load_extras(folder: str, name: str = "preftune_state") -> dict[str, Any]:
    """The inverse of `save_extras`, exact for every dtype and float.

    Raises:
        CheckpointError: the folder holds no such files.
    """
    path = Path(folder, f"{name}.json")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {path.name}: it was not written by preftune, so reference and running state are unknown. "
            "Load its weights as `model` and start a new run instead."
        )
    tensors = load_file(os.path.join(folder, f"{name}.safetensors"))

    def join(value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) == {"__tensor__"}:
                return tensors[value["__tensor__"]]
            return {k: join(v) for k, v in value.items()}
        return value

    return join(json.loads(path.read_text()))
