"""The yardsticks: the fastest matrix product of this machine at sizes like the model's, and how fast it reads memory.

Run as a process of its own (`python -m benchmarks.peak`), with nothing else running; prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch


def best_rate(rows: int, inner: int, columns: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    """Operations per second of the fastest of repeated [rows, inner] x [inner, columns] products."""
    a = torch.randn(rows, inner, device=device).to(dtype)
    b = torch.randn(columns, inner, device=device).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    fastest = best_time(lambda: torch.mm(a, b.t(), out=out), device, seconds)
    return 2.0 * rows * inner * columns / fastest


def measure(
    hidden: int, intermediate: int, vocabulary: int, threads: int, device: str, seconds: float
) -> dict[str, float]:
    """Best rate over the model's own products and two square ones, in GFLOP/s, by precision."""
    torch.set_num_threads(threads)
    tokens = 16384 if device == "cuda" else 2048
    sizes = [
        (tokens, hidden, intermediate),
        (tokens, intermediate, hidden),
        (tokens // 4, hidden, vocabulary),
        (1024, 1024, 1024),
        (4096, 4096, 4096) if device == "cuda" else (2048, 2048, 2048),
    ]
    rates = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        rates[name] = max(best_rate(*size, dtype, device, seconds) for size in sizes) / 1e9
    return rates


def bandwidth(threads: int, device: str, seconds: float) -> dict[str, float]:
    """GB/s read with all threads, the best of a sum and of a matrix-vector product over more than any cache holds."""
    torch.set_num_threads(threads)
    columns = 4096
    matrix = torch.ones(2**20 if device == "cuda" else 2**15, columns, device=device)  # 16 GiB, 512 MiB
    vector = torch.ones(columns, device=device)
    reads = (lambda: matrix.sum(), lambda: torch.mv(matrix, vector))
    fastest = min(best_time(read, device, seconds) for read in reads)
    return {"gigabytes": matrix.numel() * matrix.element_size() / fastest / 1e9}


def best_time(work: Callable[[], object], device: str, seconds: float) -> float:
    """Seconds of the fastest of repeated calls, after three to warm up."""
    fastest = float("inf")
    for _ in range(3):
        work()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="time given to each size")
    parser.add_argument("--bandwidth", action="store_true", help="memory instead of matrix products")
    args = vars(parser.parse_args())
    if args.pop("bandwidth"):
        print(json.dumps(bandwidth(args["threads"], args["device"], 2 * args["seconds"])))
    else:
        print(json.dumps(measure(**args)))


if __name__ == "__main__":
    main()
