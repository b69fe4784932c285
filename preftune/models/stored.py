"""The reference as stored numbers: one log-probability a branch, filled before training and kept on disk.

The folder is named after everything that decides the numbers and each row by its token ids, so an entry is never stale.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from preftune.errors import ReferenceError
from preftune.models.adapters import peft_model
from preftune.models.attention import Layout
from preftune.models.distributed import full_tensor, is_sharded, unwrap
from preftune.models.reference_base import LiveReference, ReferenceModel
from preftune.types import PromptTree

logger = logging.getLogger(__name__)

_VERSION = 1  # of the numbers: raise it when the scorer changes what it computes
_ROWS = "rows.safetensors"
# what a model's config says besides how it computes
_NOT_IN_KEY = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")


class Stored(ReferenceModel):
    """Log-probabilities of known rows. It cannot move and has none of single tokens.

    Args:
        live: Where the numbers come from; let go with `release`.
        root: Folder of all stores; None: beside the datasets cache. Where it cannot be written, numbers stay in memory.
    """

    form = "stored"

    def __init__(self, live: LiveReference, root: str | Path | None = None) -> None:
        self.live: LiveReference | None = live
        self.module: nn.Module | None = live.module
        self._root = Path(root) if root is not None else _default_root()
        self._key: str | None = None
        self._ld_alpha: float | None = None
        self._start: dict[bytes, tuple[int, int]] = {}  # row -> where its values are, and how many
        self._values = array("f")

    @property
    def folder(self) -> Path | None:
        """Where this run's numbers are, once filled."""
        return self._root / self._key if self._key is not None else None

    def __len__(self) -> int:
        return len(self._start)

    def prepare(self, accelerator: Any) -> None:
        if self.live is not None:
            self.live.prepare(accelerator)
            self.module = self.live.module

    def release(self) -> None:
        """Drops the model behind the numbers, once all rows are known."""
        self.live = self.module = None

    def fill(
        self,
        trees: Iterable[PromptTree],
        policy: nn.Module,
        *,
        layout: Layout,
        ld_alpha: float | None = None,
        precision: str = "no",
    ) -> int:
        """Scores the rows that are not known yet and saves all; how many this rank scored.

        Every rank calls it with as many trees. It may be called again for other data.

        Args:
            precision: Of autocast ("no", "bf16", "fp16"); part of the key.

        Raises:
            ReferenceError: the reference was released, or the policy has been trained since the first call.
        """
        if self.live is None:
            raise ReferenceError(
                "the reference behind the stored log-probabilities is gone; fill all data before release."
            )
        key = _store_key(self.live, policy, layout, ld_alpha, precision)
        if self._key is None:
            self._key, self._ld_alpha = key, ld_alpha
            self._load()
        elif key != self._key:
            raise ReferenceError(
                "log-probabilities of the reference were stored before training, and the policy or an option has "
                "changed since. Give every eval set to the constructor, or set precompute_ref_log_probs=False."
            )
        scored = 0
        together = is_sharded(self.live.weights(policy).values())
        for tree in trees:
            rows = row_keys(tree)
            if _is_needed(any(row not in self._start for row in rows), tree.input_ids.device, together):
                values = self.live.branch_logps(policy, tree, layout=layout, ld_alpha=ld_alpha).tolist()
                self._add(rows, [len(branches) for _, branches in tree.layout], values)
                scored += len(rows)
        self._share()
        self._save()
        return scored

    def branch_logps(
        self, policy: nn.Module, tree: PromptTree, *, layout: Layout, ld_alpha: float | None = None
    ) -> Float[Tensor, " B"]:
        """The stored values, whatever the policy has become.

        Raises:
            ReferenceError: a row that was not stored, or another `ld_alpha` than the stored one.
        """
        if ld_alpha != self._ld_alpha:
            raise ReferenceError(f"log-probabilities were stored with ld_alpha={self._ld_alpha}, asked for {ld_alpha}.")
        values: list[float] = []
        for number, row in enumerate(row_keys(tree)):
            if row not in self._start:
                raise ReferenceError(
                    f"row {number} of the batch has no stored reference log-probability ({len(self)} rows are known). "
                    "Give the dataset to the constructor of the trainer, or set precompute_ref_log_probs=False."
                )
            start, count = self._start[row]
            values.extend(self._values[start : start + count])
        return torch.tensor(values, dtype=torch.float32, device=tree.input_ids.device)

    def _add(self, rows: list[bytes], counts: list[int], values: list[float]) -> None:
        start = 0
        for row, count in zip(rows, counts, strict=True):
            if row not in self._start:
                self._start[row] = (len(self._values), count)
                self._values.extend(values[start : start + count])
            start += count

    def _share(self) -> None:
        """Every rank gets the rows of all."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (list(self._start), [n for _, n in self._start.values()], self._values.tolist()))
        for rows, counts, values in parts:
            self._add(rows, counts, values)

    def _load(self) -> None:
        path = self._root / str(self._key) / _ROWS
        if path.is_file():
            stored = load_file(path)
            rows = [row.tobytes() for row in stored["rows"].numpy()]
            self._add(rows, stored["counts"].tolist(), stored["values"].tolist())

    def _save(self) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        folder = self._root / str(self._key)
        rows = np.frombuffer(b"".join(self._start), np.uint8).reshape(len(self._start), 32)
        tensors = {
            "rows": torch.from_numpy(rows.copy()),
            "counts": torch.tensor([count for _, count in self._start.values()], dtype=torch.int64),
            "values": torch.tensor(self._values, dtype=torch.float32),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f".{_ROWS}.{os.getpid()}"
            save_file(tensors, partial)
            os.replace(partial, folder / _ROWS)
            (folder / "about.json").write_text(json.dumps({"version": _VERSION, "rows": len(self)}))
        except OSError as error:
            logger.warning("reference log-probabilities stay in memory: %s cannot be written (%s)", folder, error)


def row_keys(tree: PromptTree) -> list[bytes]:
    """sha256 of each prompt with its branches: ids, lengths and which tokens are scored; the same in every batch."""
    ids, targets = tree.input_ids.cpu().numpy(), tree.target_index.cpu().numpy()
    keys, start = [], 0
    for prompt, branches in tree.layout:
        end = start + prompt + sum(branches)
        scored = targets[np.searchsorted(targets, start) : np.searchsorted(targets, end)] - start
        digest = hashlib.sha256(np.array([prompt, *branches], np.int64).tobytes())
        digest.update(ids[start:end].astype(np.int64).tobytes())
        digest.update(scored.astype(np.int64).tobytes())
        keys.append(digest.digest())
        start = end
    return keys


def _store_key(live: LiveReference, policy: nn.Module, layout: str, ld_alpha: float | None, precision: str) -> str:
    digest = hashlib.sha256()
    for name, tensor in live.weights(policy).items():
        digest.update(f"{name} {tensor.dtype} ".encode())
        digest.update(full_tensor(tensor).reshape(-1).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    about = {
        "version": _VERSION,
        "weights": digest.hexdigest(),
        "model": _how_it_computes(live.module if live.module is not None else policy),
        "adapter": live.adapter_name,
        "layout": layout,
        "ld_alpha": ld_alpha,
        "precision": precision,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def _how_it_computes(model: nn.Module) -> dict[str, Any]:
    inner: Any = unwrap(model)
    config = {k: v for k, v in inner.config.to_dict().items() if k not in _NOT_IN_KEY}
    peft = peft_model(inner)
    adapters = {name: c.to_dict() for name, c in peft.peft_config.items()} if peft is not None else {}
    return {"class": type(inner).__name__, "config": config, "adapters": adapters}


def _is_needed(flag: bool, device: torch.device, together: bool) -> bool:
    """Whether this rank says yes, or any rank where a sharded forward needs all of them."""
    if not together or not dist.is_initialized():
        return flag
    votes = torch.tensor(float(flag), device=device)
    dist.all_reduce(votes)
    return votes.item() > 0


def _default_root() -> Path:
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / "preftune_reference_logps"
