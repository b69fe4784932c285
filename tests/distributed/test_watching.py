"""Two processes that watch the same run: one draws and writes, both generate, and no prompt appears twice.

A plain transformers.Trainer under DDP with gloo; standard output of each process goes to a file of its own.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch.multiprocessing as mp

from tests.unit.callbacks.tiny_trainer import PROMPTS, tiny_trainer, weights_hash

pytestmark = pytest.mark.dist


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def worker(rank: int, folder: str, port: int, watched: bool) -> None:
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    from preftune.callbacks.completions import LogCompletionsCallback
    from preftune.callbacks.jsonl_log import JsonlLogCallback
    from preftune.callbacks.progress import RichProgressCallback

    sys.stdout = sys.stderr = (Path(folder) / f"rank{rank}.txt").open("w")
    trainer = tiny_trainer(Path(folder), ddp_backend="gloo")
    if watched:
        for callback in (RichProgressCallback(), JsonlLogCallback(), LogCompletionsCallback(trainer, max_new_tokens=2)):
            trainer.add_callback(callback)
    trainer.train()
    if watched:
        rounds(Path(folder) / "rounds")
    sys.stdout.close()
    (Path(folder) / f"hash{rank}.txt").write_text(weights_hash(trainer.model))


def rounds(folder: Path) -> None:
    """One GRPO step with its completions: two prompts of four completions, one group on each rank; an odd eval set."""
    from datasets import Dataset

    from tests.support.models import tiny_model
    from tests.support.tokenizers import make_tokenizer
    from tests.unit.callbacks.test_round_completions import build

    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 1}
    evals = {"eval_strategy": "steps", "eval_steps": 1, "ddp_backend": "gloo"}
    three = Dataset.from_list([{"prompt": text} for text in PROMPTS])
    build(folder, tiny_model, make_tokenizer("plain"), eval_dataset=three, **sizes, **evals).train()


def launch(folder: Path, watched: bool) -> str:
    folder.mkdir()
    mp.spawn(worker, args=(str(folder), free_port(), watched), nprocs=2, join=True)
    hashes = [(folder / f"hash{rank}.txt").read_text() for rank in (0, 1)]
    assert hashes[0] == hashes[1]
    return hashes[0]


def test_one_process_speaks_and_the_weights_are_the_same(tmp_path):
    from preftune.callbacks.trackers.jsonl import read_metrics, read_table

    watched = launch(tmp_path / "watched", True)
    rows = read_table(tmp_path / "watched" / "logs", "completions")
    assert [(row["step"], row["prompt"]) for row in rows] == [(s, p) for s in (2, 4) for p in PROMPTS]
    assert [r["step"] for r in read_metrics(tmp_path / "watched" / "logs")] == [1, 2, 2, 3, 4, 4, 4]
    main, other = ((tmp_path / "watched" / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert len([line for line in main.splitlines() if line.startswith("step ")]) == 7
    assert "step " not in other
    assert "\x1b" not in main + other
    assert launch(tmp_path / "alone", False) == watched

    rows = pq.read_table(tmp_path / "watched" / "rounds" / "completions" / "completions_00001.parquet").to_pylist()
    assert [row["prompt"] == rows[0]["prompt"] for row in rows] == [True] * 4 + [False] * 4
    for group in (rows[:4], rows[4:]):
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-5)
    held = pq.read_table(tmp_path / "watched" / "rounds" / "completions" / "eval_completions_00001.parquet")
    assert held["prompt"].to_pylist() == [prompt for prompt in PROMPTS for _ in range(4)]  # filled up, counted once
    assert "completions, step 1" in main and "completions, step 1" not in other
