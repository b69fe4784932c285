"""The bench: `python -m benchmarks.run` measures both sides and writes results.json and RESULTS.md.

Parts that are measured again replace their entry; the others stay. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import callbacks, environments, memory, models, preparation, report, rows, speed, startup
from benchmarks.kinds import ANSWER_TOKENS, KINDS
from benchmarks.link import WorkerError
from benchmarks.setup import Setup

HERE = Path(__file__).resolve().parent
PARTS = ("startup", "preparation", "callbacks", "memory", "speed")
VARIANTS = ("default", "tuned")
ONLINE_MODELS = ("main", "tiny")
PROFILE = "short"
"""Of all trainers but DPO, which are measured in their default settings."""
FULL = {"steps": 10, "warmup": 2, "rows": 2000, "repeats": 3}
QUICK = {"steps": 3, "warmup": 1, "rows": 200, "repeats": 1, "pairs": 2}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--trainers", nargs="+", choices=KINDS, default=list(KINDS), help="of speed and memory")
    parser.add_argument(
        "--profiles", nargs="+", choices=rows.PROFILES, default=list(rows.PROFILES), help="of DPO; others: short"
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="of DPO; others: default"
    )
    parser.add_argument(
        "--online-models", nargs="+", choices=ONLINE_MODELS, default=list(ONLINE_MODELS), help="of GRPO and RLOO"
    )
    parser.add_argument("--sides", nargs="+", choices=("trl", "ours"), default=["trl", "ours"])
    parser.add_argument("--steps", type=int, help="measured steps of a speed run (10; quick: 3)")
    parser.add_argument("--warmup", type=int, help="steps before them (2; quick: 1)")
    parser.add_argument("--pairs", type=int, help="pairs, rows or prompts a step (default: each trainer's own)")
    parser.add_argument("--answer-tokens", type=int, default=ANSWER_TOKENS, help="of each completion (GRPO, RLOO)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", help=f"model folder (or ${models.MODEL_VARIABLE}; absent: random weights)")
    parser.add_argument("--data", help=f"file of real pairs (or ${rows.DATA_VARIABLE}; absent: generated ones)")
    parser.add_argument("--rows", type=int, help="rows of the preparation part (2000; quick: 200)")
    parser.add_argument("--repeats", type=int, help="repeats of the preparation and start-up parts (3; quick: 1)")
    parser.add_argument("--wide-vocabulary", type=int, default=memory.WIDE_VOCABULARY, help="0: leave it out")
    parser.add_argument("--trl-python", type=Path, help="interpreter that has TRL (default: an environment made here)")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache")
    parser.add_argument("--results", type=Path, help="folder of results.json and RESULTS.md (default: this one)")
    parser.add_argument("--quick", action="store_true", help="a short trial of everything; results go to the cache")
    args = parser.parse_args(arguments)
    defaults = QUICK if args.quick else FULL
    for name, value in defaults.items():
        if vars(args)[name] is None:
            vars(args)[name] = value
    args.results = args.results or (args.cache / "quick" if args.quick else HERE)
    return args


def pythons(args: argparse.Namespace) -> dict[str, Path]:
    """Interpreter of each side that can take part; a side that cannot is said aloud and left out."""
    found: dict[str, Path] = {}
    if "trl" in args.sides and args.only != ["callbacks"]:
        found["trl"] = args.trl_python or environments.trl_python(HERE / ".venv-trl")
    if "ours" in args.sides:
        if importlib.util.find_spec("preftune.trainers.dpo") is None:
            print("bench: preftune.DPOTrainer cannot be imported here; TRL alone is measured", file=sys.stderr)
        else:
            found["ours"] = Path(sys.executable)
    return found


class Results:
    """results.json, saved after every part, so that a broken run keeps what it has measured."""

    def __init__(self, folder: Path, origin: dict[str, Any]) -> None:
        self._folder, self._origin = folder, origin
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "results.json"
        self._content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.failed: list[str] = []

    def take(self, part: str, key: str | None, measure: Callable[[], dict[str, Any]]) -> None:
        """Measures and stores one entry; a failure is printed, kept in `failed`, and does not stop the others."""
        try:
            entry = {**measure(), "origin": {**self._origin, "date": time.strftime("%Y-%m-%d")}}
        except (WorkerError, RuntimeError, ValueError) as error:
            print(f"bench: {part} {key or ''} failed: {error}", file=sys.stderr, flush=True)
            self.failed.append(f"{part} {key or ''}".strip())
            return
        if key is None:
            self._content[part] = entry
        else:
            self._content.setdefault(part, {})[key] = entry
        (self._folder / "results.json").write_text(json.dumps(self._content, indent=1), encoding="utf-8")
        (self._folder / "RESULTS.md").write_text(report.render(self._content), encoding="utf-8")


def measure(args: argparse.Namespace, setup: Setup, results: Results) -> None:
    """All parts asked for, the quick ones first."""
    if "startup" in args.only:
        results.take("startup", None, lambda: startup.measure(setup, args.repeats))
    if "preparation" in args.only:
        for num_proc in sorted({1, setup.threads}):
            workers = None if num_proc == 1 else num_proc
            results.take(
                "preparation",
                f"short/{workers}",
                lambda n=workers: preparation.measure(setup, "short", args.rows, n, args.repeats),
            )
    if "callbacks" in args.only and "ours" in setup.pythons:
        results.take("callbacks", "dpo", lambda: callbacks.measure(setup, PROFILE))
    if "memory" in args.only:
        measure_memory(args, setup, results)
    if "speed" in args.only:
        measure_speed(args, setup, results)


def measure_memory(args: argparse.Namespace, setup: Setup, results: Results) -> None:
    own, wide = setup.shape.vocabulary, args.wide_vocabulary
    if "dpo" in args.trainers:
        for variant in args.variants:
            results.take("memory", f"real/{variant}/{own}", lambda v=variant: memory.measure(setup, "real", v, own))
        if wide:
            results.take("memory", f"real/default/{wide}", lambda: memory.measure(setup, "real", "default", wide))
    if "grpo" in args.trainers:
        results.take("memory", f"grpo/default/{own}", lambda: memory.measure(setup, PROFILE, "default", own, "grpo"))


def keyed(name: str, setup: Setup) -> str:
    """Entries of both precisions stand beside each other."""
    return name if setup.precision == "float32" else f"{name}/{setup.precision}"


def measure_speed(args: argparse.Namespace, setup: Setup, results: Results) -> None:
    if "dpo" in args.trainers:
        for profile in args.profiles:
            for variant in args.variants:
                key = keyed(f"{profile}/{variant}", setup)
                results.take("speed", key, lambda p=profile, v=variant: speed.measure(setup, p, v))
    others = [kind for kind in args.trainers if kind != "dpo"]
    for kind in others:
        if not KINDS[kind].is_online:
            results.take("trainers", keyed(kind, setup), lambda k=kind: speed.measure(setup, PROFILE, "default", k))
            continue
        for model in args.online_models:
            chosen = setup.tiny_online() if model == "tiny" else setup
            length = "" if setup.answer_tokens == ANSWER_TOKENS else f"/{setup.answer_tokens}"
            key = keyed(f"{kind}/{model}{length}", setup)
            results.take("online", key, lambda k=kind, c=chosen: speed.measure(c, PROFILE, "default", k))


def main() -> int:
    # A run that is told to stop leaves no worker and no scratch folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = parse(sys.argv[1:])
    args.cache = args.cache.resolve()
    args.cache.mkdir(parents=True, exist_ok=True)
    (args.cache / ".gitignore").write_text("*\n")
    sides = pythons(args)
    if not sides:
        return 2
    model, title = models.folder_of(args.model, args.cache)
    setup = Setup(
        pythons=sides,
        threads=args.threads,
        device=args.device,
        precision=args.precision,
        steps=args.steps,
        warmup=args.warmup,
        pairs=args.pairs,
        answer_tokens=args.answer_tokens,
        model=model,
        model_title=title,
        real_pairs=rows.real_path(args.data),
        cache=args.cache,
    )
    origin = {
        "machine": environments.machine(args.device),
        "versions": {side: environments.versions(python) for side, python in sides.items()},
        "code": environments.code_version(),
        "model": title,
        "threads": args.threads,
        "command": "python -m benchmarks.run " + shlex.join(public_arguments(sys.argv[1:])),
    }
    results = Results(args.results, origin)
    measure(args, setup, results)
    print(f"bench: results in {args.results}" + (f"; failed: {results.failed}" if results.failed else ""))
    return 1 if results.failed else 0


def public_arguments(arguments: list[str]) -> list[str]:
    """The command line without the folders of this machine: only the last part of an absolute path is kept."""
    return [Path(a).name if a.startswith(("/", "~")) else a for a in arguments]


if __name__ == "__main__":
    sys.exit(main())
