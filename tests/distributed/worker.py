"""What each process of a distributed test runs: scenarios by name, and one RESULT line at the end.

`python -m tests.distributed.worker FOLDER NAME...` under a launcher; a test calls `run` itself for one process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from tests.distributed.scenarios import SCENARIOS, SHARES
from tests.distributed.watching import watched
from tests.support.backends import prepare_backend
from tests.support.launch import give_result


def run(folder: Path, names: list[str], processes: int = 1) -> dict[str, Any]:
    """Results of the scenarios by name; they are written for any number of processes."""
    scenarios = SCENARIOS | {"watched": watched}
    return {name: scenarios[name](folder / name, processes) for name in names}


def main() -> None:
    torch.set_num_threads(1)
    prepare_backend()
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    state = PartialState(cpu=True)
    results = run(folder, names, state.num_processes)
    state = AcceleratorState()
    give_result(
        {
            "rank": state.process_index,
            "world": state.num_processes,
            "backend": dist.get_backend(),
            "distributed_type": state.distributed_type.value,
            "zero_stage": state.deepspeed_plugin.zero_stage if state.deepspeed_plugin is not None else None,
            "shares": SHARES,
            "scenarios": results,
        }
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
