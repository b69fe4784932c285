"""What a worker notes of its trainer while it works: the rows of each batch, positions forwarded, time in the rollout.

It uses only what is public on both sides: collators, a hook on the embedding, `generate`, a reward function.
"""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

UNSCORED = -100
Row = dict[str, Any]
Noted = dict[str, Any]


class Clock:
    """Wall and CPU time, and page faults, since it was made."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._children = resource.getrusage(resource.RUSAGE_CHILDREN)
        self._start = time.perf_counter()

    def read(self) -> dict[str, float]:
        wall = self.wall()
        usage, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        below = children.ru_utime + children.ru_stime - self._children.ru_utime - self._children.ru_stime
        return {
            "wall": wall,
            "user": usage.ru_utime - self._usage.ru_utime,
            "system": usage.ru_stime - self._usage.ru_stime,
            "children": below,
            "faults": usage.ru_minflt - self._usage.ru_minflt,
        }

    def wall(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self._start


def digest_of(ids: Any) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two lists begin with alike; each keeps one beyond."""
    limit = min(len(a), len(b)) - 1
    return next((i for i in range(limit) if a[i] != b[i]), limit)


# Rows of ids as the collators get them, to (prompt, branches) lengths, scored tokens, and ids to compare.


def _pair(row: Row, max_length: int) -> tuple[Any, int, Any]:
    prompt = list(row["prompt_ids"])[:max_length]
    answers = [list(row[k])[: max_length - len(prompt)] for k in ("chosen_ids", "rejected_ids")]
    lengths = [len(answer) for answer in answers]
    return [(len(prompt), lengths)], sum(lengths), [prompt, *answers]


def _reward_pair(row: Row, max_length: int) -> tuple[Any, int, Any]:
    sides = [list(row[k]) for k in ("chosen_ids", "rejected_ids")]
    shared = common_prefix(*sides)
    return [(shared, [len(side) - shared for side in sides])], 0, sides


def _supervised(row: Row, max_length: int) -> tuple[Any, int, Any]:
    ids, labels = list(row["input_ids"]), list(row["labels"])
    lengths = list(row.get("seq_lengths") or [len(ids)])
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    scored = [label != UNSCORED and i not in firsts for i, label in enumerate(labels)]
    return [(0, [n]) for n in lengths], sum(scored), [ids, scored, lengths]


def _labelled(row: Row, max_length: int) -> tuple[Any, int, Any]:
    prompt, answer = list(row["prompt_ids"]), list(row["completion_ids"])
    stray = next(list(row[k]) for k in ("mismatched_ids", "KL_completion_ids") if k in row)[: max_length - len(prompt)]
    return [(len(prompt), [len(answer), len(stray)])], len(answer), [prompt, answer, bool(row["label"])]


READERS = {"dpo": _pair, "reward": _reward_pair, "sft": _supervised, "sft-packed": _supervised, "kto": _labelled}


def note_of(kind: str, rows: Sequence[Row], max_length: int) -> Noted:
    """What a batch holds.

    DPO: "lengths" (prompt, chosen, rejected). Others: "trees" (prompt, branches) and "scored", tokens with a loss; of
    KTO the second branch is the mismatched completion, of rewards a prompt is whatever both sides begin with.
    """
    read = [READERS[kind](row, max_length) for row in rows]
    digest = digest_of([ids for _, _, ids in read])
    if kind == "dpo":
        return {"lengths": [(p, *branches) for trees, _, _ in read for p, branches in trees], "digest": digest}
    trees = [tree for of_row, _, _ in read for tree in of_row]
    return {"trees": trees, "scored": sum(scored for _, scored, _ in read), "digest": digest}


class CountingCollator:
    """The trainer's own collator; notes what each batch holds before passing it on."""

    def __init__(self, inner: Callable[[list[Row]], Any], kind: str, max_length: int) -> None:
        self._inner, self._kind, self._max_length = inner, kind, max_length
        self._noted: deque[Noted] = deque()

    def __call__(self, features: list[Row]) -> Any:
        self._noted.append(note_of(self._kind, features, self._max_length))
        return self._inner(features)

    def take(self) -> Noted:
        """The batch of the step that has just ended; batches are read ahead."""
        return self._noted.popleft()

    def clear(self) -> None:
        self._noted.clear()


class RolloutWatch:
    """Times the rollout of a step, and gives the rewards: `generate` is wrapped, the reward function is this object's.

    The reward of an answer is the share of its odd token ids: it costs nothing, and answers of a prompt differ in it.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._clock: Clock | None = None
        self._prompts: Any = None
        self._completions: list[list[int]] = []
        self._noted: Noted = {}
        self._decode_start: float | None = None
        self._decode_steps = 0

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self._completions = [list(ids) for ids in completion_ids]
        return [sum(i % 2 for i in ids) / max(1, len(ids)) for ids in completion_ids]

    def attach(self, trainer: Any, side: str) -> None:
        """Wraps what draws completions: the policy's `generate`, or our backend's, which gets each prompt once."""
        owner = trainer.backend if side == "ours" else trainer.model
        generate = owner.generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._prompts = args[0] if side == "ours" else (kwargs["input_ids"], kwargs["attention_mask"])
            self._clock, self._decode_start, self._decode_steps = Clock(self._device), None, 0
            try:
                return generate(*args, **kwargs)
            finally:
                spent = self._clock.read()
                start = spent["wall"] if self._decode_start is None else self._decode_start
                self._noted = {"rollout": spent, "prefill": start, "decode_steps": self._decode_steps}
                self._clock = None

        owner.generate = timed

    @property
    def is_generating(self) -> bool:
        return self._clock is not None

    def forward(self, width: int) -> None:
        """The model is called on `width` columns while it generates: one column is a step of decoding."""
        assert self._clock is not None
        if width == 1:
            if self._decode_start is None:
                self._decode_start = self._clock.wall()
            self._decode_steps += 1

    def take(self) -> Noted:
        prompts = distinct_prompts(self._prompts)
        size = len(self._completions) // len(prompts)
        groups = [self._completions[i * size : (i + 1) * size] for i in range(len(prompts))]
        trees = [(len(prompt), [len(ids) for ids in group]) for prompt, group in zip(prompts, groups, strict=True)]
        tokens = sum(map(len, self._completions))
        return {**self._noted, "trees": trees, "scored": tokens, "digest": digest_of(prompts)}

    def clear(self) -> None:
        self._noted = {}


def distinct_prompts(given: Any) -> list[list[int]]:
    """Lists of ids, each prompt once: from such lists, or from rows `(ids, mask)` in which neighbours repeat."""
    if not isinstance(given, tuple):
        return [list(map(int, prompt)) for prompt in given]
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(*given)]
    return [row for i, row in enumerate(rows) if i == 0 or row != rows[i - 1]]


class Positions:
    """Counts the positions that go through a model's embedding, with gradient and without; rollouts aside."""

    def __init__(self, model: torch.nn.Module, rollouts: RolloutWatch | None) -> None:
        self._rollouts = rollouts
        self._counts = {"forwarded": 0, "looked_at": 0}
        model.get_input_embeddings().register_forward_pre_hook(self._note)  # pyright: ignore

    def _note(self, _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if self._rollouts is not None and self._rollouts.is_generating:
            self._rollouts.forward(args[0].shape[-1])
        else:
            self._counts["forwarded" if torch.is_grad_enabled() else "looked_at"] += args[0].numel()

    def take(self) -> dict[str, int]:
        """Counts since they were last taken."""
        taken = dict(self._counts)
        self._counts = dict.fromkeys(taken, 0)
        return taken
