"""How a vLLM server gets the policy's weights: by a folder that both see (tested here), or by NCCL (not tested here).

Either way the server replaces them in place and forgets what it has computed with the old ones.
"""

from __future__ import annotations

import base64
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.cuda import nccl

from preftune.errors import ConfigError, RolloutError
from preftune.rollouts.vllm_client import VllmClient

_FILE = "model.safetensors"
_CHUNK_BYTES = 2**30
_REFUSAL_SECONDS = 0.05


class WeightTransfer(ABC):
    """Hands weights to a server. Called on one rank only; other ranks help gather what is sharded."""

    @abstractmethod
    def push(self, client: VllmClient, weights: Iterable[tuple[str, Tensor]], timeout: float) -> None:
        """Returns once the server draws with `weights`, which have the names of a checkpoint.

        Raises:
            RolloutError: the server did not take them.
        """

    def close(self) -> None:  # noqa: B027
        """Gives back what is held."""


class ReloadTransfer(WeightTransfer):
    """Writes the weights to a folder and lets the server load them from it.

    The server replaces its weights in place, which takes VLLM_SERVER_DEV_MODE=1 (tested with vLLM 0.32 on CPU). With
    `restart` it is restarted instead; the folder is then the model that it serves.

    Args:
        folder: Seen by the server under the same path. It is made where it is missing; weights in it are replaced.
        restart: Stops the server and starts a new one on the folder; returns when the old one is gone.

    Raises:
        ConfigError: `restart` with a folder that is no model.
    """

    def __init__(self, folder: str | os.PathLike[str], *, restart: Callable[[], object] | None = None) -> None:
        self.folder = Path(folder).absolute()
        self._restart = restart
        if restart is not None and not (self.folder / "config.json").is_file():
            raise ConfigError(
                f"a server is to be restarted on {str(self.folder)!r}, which has no config.json; save model and "
                "tokenizer there first (save_pretrained) and serve that folder"
            )

    def push(self, client: VllmClient, weights: Iterable[tuple[str, Tensor]], timeout: float) -> None:
        self._write({name: tensor.cpu().contiguous() for name, tensor in weights})
        if self._restart is not None:
            self._restart()
            client.wait_until_up(timeout)
            return
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        client.post("/collective_rpc", call, timeout)
        forget(client, timeout)

    def _write(self, tensors: dict[str, Tensor]) -> None:
        """All at once: a reader finds the old weights or the new ones."""
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.folder / f".{_FILE}.new"  # no name that a loader takes for weights
        save_file(tensors, whole, metadata={"format": "pt"})
        for old in (*self.folder.glob("*.safetensors"), *self.folder.glob("*.safetensors.index.json")):
            if old.name not in (whole.name, _FILE):
                old.unlink()
        os.replace(whole, self.folder / _FILE)


class Communicator(Protocol):
    """Sends tensors to every worker of the server, this process being rank 0."""

    def broadcast(self, tensor: Tensor) -> None: ...


class NcclTransfer(WeightTransfer):
    """Sends the weights from this GPU to those of the server, by NCCL; needs CUDA on both sides.

    **Not tested on a GPU**: the sequence of requests is (against a fake server), the sending itself is not. The server
    is started with `--weight-transfer-config '{"backend": "nccl"}'` and VLLM_SERVER_DEV_MODE=1, and is vLLM 0.32 or
    later: sender and workers find one another by an id sent over HTTP, so that no port is needed.

    Args:
        device: Of the sender; None: the current one.
        connect: Makes the communicator of `(world size, id)`; for tests.

    Raises:
        ConfigError: there is no CUDA.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        connect: Callable[[int, bytes], Communicator] | None = None,
        unique_id: Callable[[], bytes] = nccl.unique_id,
    ) -> None:
        if connect is None and not torch.cuda.is_available():
            raise ConfigError(
                "weights are sent to a vLLM server by NCCL, and this process has no CUDA. Set vllm_weights_dir to a "
                "folder that the server sees, or hand a ServerBackend with a ReloadTransfer to the trainer"
            )
        self._device = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        self._connect = connect or (lambda world, key: _Nccl(world, key, self._device))
        self._unique_id = unique_id
        self._group: Communicator | None = None

    def push(self, client: VllmClient, weights: Iterable[tuple[str, Tensor]], timeout: float) -> None:
        group = self._joined(client, timeout)
        client.post("/start_weight_update", None, timeout)
        for chunk in _chunks(weights):
            sent = [tensor.to(self._device).contiguous() for _, tensor in chunk]
            update = {
                "names": [name for name, _ in chunk],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in sent],
                "shapes": [list(tensor.shape) for tensor in sent],
            }
            with _meanwhile(client.post, "/update_weights", {"update_info": update}, timeout):
                for tensor in sent:
                    group.broadcast(tensor)
        client.post("/finish_weight_update", None, timeout)
        forget(client, timeout)

    def _joined(self, client: VllmClient, timeout: float) -> Communicator:
        if self._group is None:
            workers = client.get("/get_world_size", timeout)["world_size"]
            key = self._unique_id()
            info = {
                "nccl_unique_id_b64": base64.b64encode(key).decode(),
                "rank_offset": 1,
                "world_size": workers + 1,
            }
            with _meanwhile(client.post, "/init_weight_transfer_engine", {"init_info": info}, timeout):
                self._group = self._connect(workers + 1, key)
        return self._group

    def close(self) -> None:
        self._group = None


class _Nccl:
    """Rank 0 of a group of NCCL, the workers being the others; the warm-up sum is what vLLM's side begins with."""

    def __init__(self, world: int, key: bytes, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._group: Any = nccl.init_rank(world, key, 0)
            nccl.all_reduce([torch.zeros(1, device=device)], comms=[self._group])

    def broadcast(self, tensor: Tensor) -> None:
        nccl.broadcast([tensor], root=0, comms=[self._group])


def forget(client: VllmClient, timeout: float) -> None:
    """Lets the server drop the keys and values of prompts that it has computed with other weights.

    Raises:
        RolloutError: it does not.
    """
    answer = client.post("/reset_prefix_cache", None, timeout)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RolloutError(
            f"the vLLM server at {client.url} kept its prefix cache although its weights changed: requests are under "
            "way there. Let nobody else use it while training"
        )


def _chunks(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in turn, together some `_CHUNK_BYTES`; only those of one chunk are whole at a time."""
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        chunk.append((name, tensor))
        size += tensor.nbytes
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@contextmanager
def _meanwhile(function: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Calls `function` while the block runs, and raises what it raised.

    Where the block fails nobody waits for the call: the other side of a broken transfer may never answer.
    """
    pool = ThreadPoolExecutor(1)
    call = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    if wait([call], timeout=_REFUSAL_SECONDS).done:  # refused at once: the other side does not come
        call.result()
    yield
    call.result()
