"""What every part of the bench shares: the sides and their interpreters, the settings, the model and the rows."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks import kinds, models, rows
from benchmarks.environments import worker_environment
from benchmarks.link import Worker
from benchmarks.work import ModelShape


@dataclass(frozen=True)
class Setup:
    """The choices of one run of the bench; equal for both sides.

    Attributes:
        pythons: Interpreter of each side that takes part ("trl", "ours").
        pairs: Pairs (rows, prompts) a step, or None for the kind's and the profile's own number.
        answer_tokens: Tokens of each completion of an online trainer.
        cache: Folder for rows, models and the workers' own (always cold) caches.
    """

    pythons: dict[str, Path]
    threads: int
    device: str
    precision: str
    steps: int
    warmup: int
    pairs: int | None
    answer_tokens: int
    model: Path
    model_title: str
    real_pairs: Path | None
    cache: Path

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.read(self.model)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model)

    def profile(self, name: str) -> rows.Profile:
        """The named length profile; "real" is the file of pairs, or the short one where there is no file."""
        if name == "real" and self.real_pairs is not None:
            return rows.Profile(rows.REAL_TITLE, 0, None, 0, 0.0, rows.REAL_MAX_LENGTH, rows.REAL_PAIRS)
        if name == "real":
            short = rows.GENERATED["short"]
            return rows.Profile("stand-in for real pairs: " + short.title, *list(vars(short).values())[1:])
        return rows.GENERATED[name]

    def rows(self, name: str, count: int, seed: int = 0, kind: str = "dpo") -> Path:
        """A file of rows of the kind, made of `count` pairs of the profile; no side drops one."""
        profile = self.profile(name)
        if name == "real" and self.real_pairs is not None:
            fitting = [r for r in rows.read_real(self.real_pairs) if rows.fits(r, self.tokenizer, profile.max_length)]
            chosen = rows.repeat(fitting, count)
        else:
            chosen = rows.generate(profile, count, self.tokenizer, seed)
        return rows.write(kinds.rows_of(kind, chosen), self.cache / "rows" / f"{name}-{kind}-{count}-{seed}.jsonl")

    def tiny_model(self) -> Path:
        """A one-layer model with the same tokenizer, for times in which the model must not matter."""
        sizes = {"vocabulary": self.shape.vocabulary, **models.TINY}
        return models.made(f"tiny-{self.model.name}", self.cache, self.model, sizes)

    def wide_model(self, vocabulary: int) -> Path:
        """A model of the same shape and tokenizer with more output rows."""
        shape = self.shape
        sizes = {
            "vocabulary": vocabulary,
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "layers": shape.layers,
            "heads": shape.heads,
            "key_value_heads": shape.key_value_heads,
        }
        return models.made(f"wide-{vocabulary}-{self.model.name}", self.cache, self.model, sizes)

    def tiny_online(self) -> Setup:
        """The same choices with a two-layer model and a small tokenizer of its own."""
        folder = models.made("tiny-online", self.cache, None, models.TINY_ONLINE)
        pairs = self.pairs or kinds.TINY_PROMPTS
        return dataclasses.replace(self, model=folder, model_title=models.TINY_TITLE, pairs=pairs)

    def count(self, kind: str, profile: str) -> int:
        """Pairs, rows or prompts a step."""
        return self.pairs or kinds.KINDS[kind].count or self.profile(profile).pairs

    def training_job(self, kind: str, profile: str, variant: str, steps: int, model: Path | None = None) -> Any:
        """What a worker is told that is to train a kind for some steps."""
        job = self.job(profile, variant, self.cache, kind=kind, steps=steps, pairs=self.count(kind, profile))
        pairs = kinds.pairs_needed(kind, job["pairs"], steps)
        job["rows"] = str(self.rows(profile, pairs, kind=kind))
        job["model"] = str(model or self.model)
        if kinds.KINDS[kind].is_online:
            job["model"] = str(models.endless(Path(job["model"]), self.cache))
        return job

    def job(self, profile: str, variant: str, output: Path, **changes: Any) -> dict[str, Any]:
        """What a worker is told; `changes` are for parts that need another model, other rows or step counts."""
        length = self.profile(profile).max_length
        return {
            "model": str(self.model),
            "kind": "dpo",
            "variant": variant,
            "output": str(output),
            "pairs": self.pairs or self.profile(profile).pairs,
            "max_length": length,
            "answer_tokens": self.answer_tokens,
            "num_proc": None,
            "device": self.device,
            "precision": self.precision,
            "threads": self.threads,
            "watched": None,  # of our side: False nobody looks on, True all observers do
            "extra": {},
            **changes,
        }

    @contextlib.contextmanager
    def worker(self, side: str) -> Iterator[tuple[Worker, Path]]:
        """A fresh worker with cold caches, and a folder of its own; both gone afterwards, the log kept."""
        folder = Path(tempfile.mkdtemp(prefix=f"{side}-", dir=self.cache))
        environment = worker_environment(self.threads, folder)
        try:
            with Worker(side, self.pythons[side], environment, self.cache / f"{side}.log") as worker:
                yield worker, folder / "output"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
