"""The fastest matrix product this machine does, at sizes like the model's: the yardstick of "share of peak".

Run as a process of its own (`python -m benchmarks.peak`), with nothing else running; prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time

import torch


def best_rate(rows: int, inner: int, columns: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    """Operations per second of the fastest of repeated [rows, inner] x [inner, columns] products."""
    a = torch.randn(rows, inner, device=device).to(dtype)
    b = torch.randn(columns, inner, device=device).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    fastest = float("inf")
    for _ in range(3):
        torch.mm(a, b.t(), out=out)
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, b.t(), out=out)
        if device == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="time given to each size")
    args = parser.parse_args()
    print(json.dumps(measure(**vars(args))))


if __name__ == "__main__":
    main()
