"""The reference as stored numbers: one log-probability a branch, scored once and kept on disk for all runs.

The folder is named after everything that decides the numbers and each branch by its token ids, so no entry is stale.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from preftune.errors import ReferenceError
from preftune.models.adapters import peft_model
from preftune.models.attention import Layout, attention_function
from preftune.models.distributed import full_tensor, is_sharded, unwrap
from preftune.models.reference_base import LiveReference, ReferenceModel
from preftune.models.structure import attention_configs, input_device
from preftune.types import PromptTree

logger = logging.getLogger(__name__)

_VERSION = 2  # of the numbers: raise it when the scorer changes what it computes
# what the config of a model or an adapter says besides how it computes
_NOT_IN_KEY = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
_NOT_IN_ADAPTER_KEY = ("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping")


class Stored(ReferenceModel):
    """Log-probabilities of branches, at temperature 1. It cannot move and has none of single tokens.

    `fill` scores known sets beforehand. What was not filled is scored when it is first asked for, as long as there is a
    live reference that training does not change; its numbers are kept too.

    Args:
        live: Where the numbers come from.
        root: Folder of all stores; None: beside the datasets cache. Where it cannot be written, numbers stay in memory.
    """

    form = "stored"

    def __init__(self, live: LiveReference, root: str | Path | None = None) -> None:
        self.live: LiveReference | None = live
        self.module: nn.Module | None = live.module
        self._root = Path(root) if root is not None else _default_root()
        self._key: str | None = None
        self._identity = "in memory"
        self._options: tuple[Any, ...] = ()
        self._values: dict[bytes, float] = {}
        self._new: list[bytes] = []  # not shared with the other ranks, and not on disk yet
        self._together = False  # a forward needs all ranks
        self._open_ended = False

    @property
    def folder(self) -> Path | None:
        """Where this run's numbers are, once filled."""
        return self._root / self._key if self._key is not None else None

    @property
    def identity(self) -> str:
        """The weights and options behind the numbers, whatever machine and library versions computed them."""
        return self._identity

    def __len__(self) -> int:
        """Branches whose number is known."""
        return len(self._values)

    def prepare(self, accelerator: Any) -> None:
        if self.live is not None:
            self.live.prepare(accelerator)
            self.module = self.live.module

    def release(self) -> None:
        """Drops the module behind the numbers, if it has one of its own, once all rows are known."""
        if self.module is not None:
            self.live = self.module = None

    def expect_streams(self) -> None:
        """Prepares for rows that nobody knows yet: every rank then asks the others before a sharded forward.

        Raises:
            ReferenceError: there is no reference any more that could score them.
        """
        if not self._scores_on_demand:
            raise ReferenceError(
                "precompute_ref_log_probs=True has let the reference go after it stored what it knew, so the rows of a "
                "stream (IterableDataset) cannot be scored any more. Give the stream to the constructor of the "
                "trainer, pass rows that are not streamed, or set precompute_ref_log_probs=False."
            )
        self._open_ended = True

    @property
    def _scores_on_demand(self) -> bool:
        return self.live is not None and not self.live.is_policy

    # Filling

    def open(self, policy: nn.Module, *, layout: Layout, ld_alpha: float | None = None, precision: str = "no") -> None:
        """Finds the folder of these weights and options, and reads what earlier runs have put there.

        Args:
            precision: Of autocast ("no", "bf16", "fp16"); part of the key.
        """
        live = self._require_live()
        self._key, about = _store_key(live, policy, layout, ld_alpha, precision)
        self._identity = f"{about['weights'][:16]} {layout} {ld_alpha} {precision}"
        self._options = (layout, ld_alpha, precision)
        self._together = is_sharded(live.weights(policy).values())
        self._load()

    def fill(
        self,
        trees: Iterable[PromptTree],
        policy: nn.Module,
        *,
        layout: Layout,
        ld_alpha: float | None = None,
        precision: str = "no",
    ) -> int:
        """Scores the branches that are not known yet and saves them; how many prompts this rank scored.

        Every rank calls it with as many trees. It may be called again for other data.

        Raises:
            ReferenceError: rows are missing, and the reference was released, or the policy has been trained since the
                first call and was the reference.
        """
        options = (layout, ld_alpha, precision)
        fresh = self._key is None
        if fresh:
            self.open(policy, layout=layout, ld_alpha=ld_alpha, precision=precision)
        elif options != self._options:
            raise ReferenceError(f"log-probabilities were stored with {self._options}, asked for {options}.")
        scored = 0
        for tree in trees:
            keys = branch_keys(tree, ld_alpha)
            missing = any(key not in self._values for key in keys)
            if not _any_rank(missing, tree.input_ids.device):
                continue
            if not fresh:
                self._check_unchanged(policy)
                fresh = True
            if missing or self._together:
                self._score(tree, keys, policy)
                scored += tree.num_prompts
        self.save()
        return scored

    def branch_logps(
        self, policy: nn.Module, tree: PromptTree, *, layout: Layout, ld_alpha: float | None = None
    ) -> Float[Tensor, " B"]:
        """The stored values, whatever the policy has become; any number of prompts and of branches a prompt.

        Raises:
            ReferenceError: a row that is not stored and cannot be scored any more, or another layout or `ld_alpha`
                than the stored one.
        """
        if (layout, ld_alpha) != self._options[:2]:
            raise ReferenceError(
                f"log-probabilities were stored with {self._options[:2]} (layout, ld_alpha), asked for "
                f"{(layout, ld_alpha)}."
            )
        keys = branch_keys(tree, ld_alpha)
        missing = any(key not in self._values for key in keys)
        if self._open_ended and self._together:
            if _any_rank(missing, tree.input_ids.device):
                self._score(tree, keys, policy)
        elif missing and self._scores_on_demand and not self._together:
            self._score(tree, keys, policy)
        elif missing:
            first = next(number for number, key in enumerate(keys) if key not in self._values)
            raise ReferenceError(
                f"branch {first} of the batch has no stored reference log-probability ({len(self)} are known), and the "
                "reference is not there any more. Give the dataset to the constructor of the trainer, or set "
                "precompute_ref_log_probs=False."
            )
        values = [self._values[key] for key in keys]
        return torch.tensor(values, dtype=torch.float32, device=tree.input_ids.device)

    def _score(self, tree: PromptTree, keys: list[bytes], policy: nn.Module) -> None:
        layout, ld_alpha, _ = self._options
        values = self._require_live().branch_logps(policy, tree, layout=layout, ld_alpha=ld_alpha).tolist()
        for key, value in zip(keys, values, strict=True):
            if key not in self._values:
                self._values[key] = value
                self._new.append(key)

    def _require_live(self) -> LiveReference:
        if self.live is None:
            raise ReferenceError(
                "rows without a stored log-probability were given, and the reference behind them is gone: it was "
                "released when all rows of the constructor were stored. Give every dataset to the constructor, or set "
                "precompute_ref_log_probs=False."
            )
        return self.live

    def _check_unchanged(self, policy: nn.Module) -> None:
        if _store_key(self._require_live(), policy, *self._options)[0] != self._key:
            raise ReferenceError(
                "log-probabilities of the reference were stored before training, and the policy has changed since, so "
                "that rows without one cannot be scored any more. Give every eval set to the constructor, or set "
                "precompute_ref_log_probs=False."
            )

    # The disk

    def save(self) -> None:
        """Gives every rank the new numbers of all, and writes them to a file of their own (a collective)."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, [(key, self._values[key]) for key in self._new])
            gathered = {key: value for part in parts for key, value in part}
            self._values |= {key: value for key, value in gathered.items() if key not in self._values}
            self._new = list(gathered) if dist.get_rank() == 0 else []
        if self._new:
            self._write(self._new)
        self._new = []

    def _write(self, keys: list[bytes]) -> None:
        folder = self._root / str(self._key)
        tensors = {
            "keys": torch.from_numpy(np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1).copy()),
            "values": torch.tensor([self._values[key] for key in keys], dtype=torch.float32),
        }
        name = hashlib.sha256(b"".join(keys)).hexdigest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f".{name}.{os.getpid()}"
            save_file(tensors, partial)
            os.replace(partial, folder / f"{name}.safetensors")
        except OSError as error:
            logger.warning("reference log-probabilities stay in memory: %s cannot be written (%s)", folder, error)

    def _load(self) -> None:
        for path in sorted((self._root / str(self._key)).glob("*.safetensors")):
            try:
                stored = load_file(path)
            except (OSError, SafetensorError) as error:
                logger.warning("%s cannot be read (%s); its reference log-probabilities are computed anew", path, error)
                continue
            keys = [key.tobytes() for key in stored["keys"].numpy()]
            self._values |= dict(zip(keys, stored["values"].tolist(), strict=True))
        known: list[Any] = [len(self)] * (dist.get_world_size() if dist.is_initialized() else 1)
        if len(known) > 1:
            dist.all_gather_object(known, len(self))
        if len(set(known)) > 1:  # nodes with disks of their own: what one of them knows all must know
            self._new = list(self._values)


def branch_keys(tree: PromptTree, ld_alpha: float | None = None) -> list[bytes]:
    """A hash of each branch with its prompt: ids, images, lengths and scored tokens; the same in every batch.

    With `ld_alpha` a branch's number depends on the lengths of its siblings, which are then part of it.
    """
    ids, targets = tree.input_ids.cpu().numpy().astype(np.int64), tree.target_index.cpu().numpy()
    keys, start = [], 0
    images: Any = [{}] * tree.num_prompts if tree.images is None else tree.images.prompts
    for (prompt, branches), shown in zip(tree.layout, images, strict=True):
        whole_prompt = hashlib.sha256(np.int64(prompt).tobytes() + ids[start : start + prompt].tobytes())
        for name in sorted(shown):
            whole_prompt.update(f"{name}{tuple(shown[name].shape)}".encode() + shown[name].cpu().numpy().tobytes())
        start += prompt
        bounds = np.searchsorted(targets, start + np.cumsum([0, *branches]))
        siblings = np.diff(bounds).astype(np.int64).tobytes()
        for number, length in enumerate(branches):
            digest = whole_prompt.copy()
            digest.update(np.int64(length).tobytes() + ids[start : start + length].tobytes())
            digest.update((targets[bounds[number] : bounds[number + 1]] - start).astype(np.int64).tobytes())
            if ld_alpha is not None:
                digest.update(np.int64(number).tobytes() + siblings)
            keys.append(digest.digest()[:16])
            start += length
    return keys


def _store_key(
    live: LiveReference, policy: nn.Module, layout: str, ld_alpha: float | None, precision: str
) -> tuple[str, dict[str, Any]]:
    """The name of the folder, and what it is made of. All ranks call it."""
    digest = hashlib.sha256()
    for name, tensor in live.weights(policy).items():
        digest.update(f"{name} {tensor.dtype} ".encode())
        digest.update(full_tensor(tensor).reshape(-1).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    model = live.module if live.module is not None else policy
    about = {
        "version": _VERSION,
        "libraries": _libraries(),
        "device": input_device(model).type,
        "matmul": torch.get_float32_matmul_precision(),
        "weights": digest.hexdigest(),
        "model": _how_it_computes(model),
        "adapter": live.adapter_name,
        "layout": layout,
        "ld_alpha": ld_alpha,
        "precision": precision,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest(), about


def _how_it_computes(model: nn.Module) -> dict[str, Any]:
    inner: Any = unwrap(model)
    with attention_function(inner, None):  # what computes the padded layout, also inside `scoring`
        attention = sorted({str(config._attn_implementation_internal) for config in attention_configs(inner)})
    peft = peft_model(inner)
    adapters = {name: c.to_dict() for name, c in peft.peft_config.items()} if peft is not None else {}
    return {
        "class": type(inner).__name__,
        "config": {k: v for k, v in inner.config.to_dict().items() if k not in _NOT_IN_KEY},
        "adapters": {
            name: {k: v for k, v in config.items() if k not in _NOT_IN_ADAPTER_KEY} for name, config in adapters.items()
        },
        "attention": attention,
    }


def _libraries() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("torch", "transformers", "peft")}


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Whether any rank says yes (a collective)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    votes = torch.tensor(float(flag), device=device)
    dist.all_reduce(votes)
    return votes.item() > 0


def _default_root() -> Path:
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / "preftune_reference_logps"
