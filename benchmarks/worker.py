"""One side of a comparison: a real trainer, held between optimizer steps until the driver says go.

Runs in either environment (`python -m benchmarks.worker ours|trl`) and never imports the other side. A step's time runs
from the driver's go to the end of the next optimizer step of `trainer.train()`: batch, collation and logging included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks import parts
from benchmarks.kinds import KINDS
from benchmarks.watch import Clock, CountingCollator, Positions, RolloutWatch

MODULES = {"ours": "preftune", "trl": "trl"}
PRECISIONS = {"bfloat16": {"bf16": True}, "float32": {"bf16": False}}


class Channel:
    """JSON lines to and from the driver, on the original descriptors; later prints go to the log."""

    def __init__(self) -> None:
        self._in = os.fdopen(os.dup(0), "r")
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any]:
        """The next command; the process ends where the driver has closed the pipe."""
        line = self._in.readline()
        if not line:
            sys.exit(0)
        return json.loads(line)

    def send(self, **answer: Any) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()


def memory() -> dict[str, float]:
    """Resident memory of this process now and at its highest, GPU memory at its highest; MiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    gpu = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
    return {
        "now": int(fields["VmRSS"].split()[0]) / 1024,
        "peak": int(fields["VmHWM"].split()[0]) / 1024,
        "gpu_peak": gpu,
    }


class Gate(TrainerCallback):
    """Stops the loop of `train()` before its first step and after each one, until the driver's next command."""

    def __init__(self, channel: Channel, device: str, vocabulary: int) -> None:
        self._channel, self._device, self._vocabulary = channel, device, vocabulary
        self.noted: CountingCollator | RolloutWatch | None = None
        self.positions: Positions | None = None
        self.logs: list[dict[str, Any]] = []
        self.observers: Any = None  # a HookClock
        self._profiler: torch.profiler.profile | None = None
        self._clock = Clock(device)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.noted is not None and self.positions is not None
        self.noted.clear()
        self.positions.take()
        self._channel.send(memory=memory())
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        spent = self._clock.read()
        profiled: dict[str, float] = {}
        if self._profiler is not None:
            self._profiler.stop()
            profiled = parts.seconds_by_part(self._profiler.events(), spent["wall"], self._vocabulary, self._device)
            self._profiler = None
        assert self.noted is not None and self.positions is not None
        noted = {**self.noted.take(), **self.positions.take()}
        noted |= {} if self.observers is None else self.observers.take()
        self._channel.send(**spent, **noted, parts=profiled, memory=memory())
        self._wait(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.logs.append({k: v for k, v in (logs or {}).items() if isinstance(v, int | float)})

    def _wait(self, control: Any) -> None:
        do = self._channel.receive()["do"]
        if do == "stop":
            control.should_training_stop = True
            return
        if do == "profile":
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if self._device == "cuda" else []
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()
        self._clock = Clock(self._device)


def side_classes(side: str, kind: str) -> tuple[Any, Any]:
    """The side's trainer and config of a kind."""
    module = importlib.import_module(MODULES[side])
    name = KINDS[kind].trainer
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def kind_options(job: dict[str, Any]) -> dict[str, Any]:
    """What a kind needs besides the common options: lengths, and how many completions a step."""
    kind = KINDS[job["kind"]]
    if kind.is_online:
        batch = job["pairs"] * kind.options["num_generations"]
        own = {"per_device_train_batch_size": batch, "max_completion_length": job["answer_tokens"]}
    else:
        own = {
            "per_device_train_batch_size": job["pairs"],
            "max_length": job["max_length"],
            "dataset_num_proc": job["num_proc"],
        }
    return {**own, **kind.options}


def config_of(side: str, config_class: Any, job: dict[str, Any]) -> Any:
    """The same settings for both; a variant changes only what its name says."""
    tuned: dict[str, Any] = {}
    if job["variant"] == "tuned":
        tuned["precompute_ref_log_probs"] = True
        if side == "trl":
            tuned["gradient_checkpointing"] = False
    return config_class(
        output_dir=job["output"],
        max_steps=job["steps"],
        learning_rate=1e-6,
        use_cpu=job["device"] == "cpu",
        dataloader_pin_memory=job["device"] != "cpu",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        **kind_options(job),
        **PRECISIONS[job["precision"]],
        **tuned,
        **job["extra"],
    )


def read_rows(path: str) -> Any:
    return load_dataset("json", data_files=path, split="train")


def observed(trainer: Any, side: str, job: dict[str, Any], rollouts: RolloutWatch | None) -> Any:
    """What notes the rows of each step, put in its place."""
    if rollouts is not None:
        rollouts.attach(trainer, side)
        return rollouts
    trainer.data_collator = CountingCollator(trainer.data_collator, job["kind"], job["max_length"])
    return trainer.data_collator


def train(channel: Channel, side: str, job: dict[str, Any]) -> None:
    """Builds the trainer, answers with what that took, then trains under the gate."""
    trainer_class, config_class = side_classes(side, job["kind"])
    dataset = read_rows(job["rows"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    vocabulary = json.loads((Path(job["model"]) / "config.json").read_text())["vocab_size"]
    gate = Gate(channel, job["device"], vocabulary)
    args = config_of(side, config_class, {**job, "extra": {**job["extra"], "model_init_kwargs": {"dtype": "float32"}}})
    rollouts = RolloutWatch(job["device"]) if KINDS[job["kind"]].is_online else None
    own = {} if rollouts is None else {"reward_funcs": odd_tokens(rollouts)}
    before, clock = memory(), Clock(job["device"])
    trainer = trainer_class(
        model=job["model"], args=args, train_dataset=dataset, processing_class=tokenizer, callbacks=[gate], **own
    )
    built = clock.read()
    gate.noted, gate.positions = observed(trainer, side, job, rollouts), Positions(trainer.model, rollouts)
    trackers: list[str] = []
    if job["watched"] is not None:
        from benchmarks import observers  # of preftune, which the other side does not have

        observers.unwatch(trainer)
        if job["watched"]:
            gate.observers, trackers = observers.watch(trainer, dataset, Path(job["output"]))
    channel.send(built=built, memory_before=before, memory=memory(), threads=torch.get_num_threads(), trackers=trackers)
    channel.receive()
    trainer.train()
    channel.send(logs=gate.logs, memory=memory())


def odd_tokens(rollouts: RolloutWatch) -> Any:
    """The reward function, under the name that both sides log it by."""

    def odd_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return rollouts.reward(completion_ids)

    return odd_tokens


def construct(side: str, job: dict[str, Any], rows: str, num_proc: int | None) -> tuple[dict[str, float], int]:
    """What a constructor with these rows costs, and the rows that were left."""
    trainer_class, config_class = side_classes(side, "dpo")
    dataset = read_rows(rows)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    args = config_of(side, config_class, {**job, "num_proc": num_proc})
    clock = Clock(job["device"])
    trainer = trainer_class(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    return clock.read(), len(trainer.train_dataset)


def prepare(channel: Channel, side: str, job: dict[str, Any]) -> None:
    """Times the constructor on many rows and, to subtract, on eight; a first, untimed one warms imports."""
    construct(side, job, job["few_rows"], None)
    many, kept = construct(side, job, job["rows"], job["num_proc"])
    few, _ = construct(side, job, job["other_few_rows"], None)
    channel.send(many=many, few=few, kept=kept, memory=memory())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=sorted(MODULES))
    side = parser.parse_args().side
    channel = Channel()
    job = channel.receive()
    torch.set_num_threads(job["threads"])
    {"train": train, "prepare": prepare}[job["do"]](channel, side, job)


if __name__ == "__main__":
    main()
