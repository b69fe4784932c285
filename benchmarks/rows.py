"""Preference rows for the comparison: real pairs, and generated ones of given length profiles.

Both sides read the same JSON-lines file of conversational rows, in the same order.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT

DATA_VARIABLE = "PREFTUNE_BENCH_PAIRS"
Row = dict[str, list[dict[str, str]]]


@dataclass(frozen=True)
class Profile:
    """Lengths of generated pairs, in tokens.

    Attributes:
        answer_median: Median of chosen and of rejected answers, each drawn by itself.
        prompt_median: Median of prompts; None: `prompt_per_answer` times the mean of the row's two answers.
        sigma: Standard deviation of the logarithm. Set so that batches of 8 pad as much as measured on real data of
            that kind (1.7 and 2.0 padded tokens per real token).
        max_length: Tokens of prompt and answer together; both sides get it, and no row exceeds it.
        pairs: Pairs a step on a CPU.
    """

    title: str
    answer_median: int
    prompt_median: int | None
    prompt_per_answer: int
    sigma: float
    max_length: int
    pairs: int


GENERATED = {
    "short": Profile("generated: prompts 140, answers 110 (medians)", 110, 140, 0, 0.48, 1024, 4),
    "long": Profile("generated: prompt 4x its answers (answers 110)", 110, None, 4, 0.7, 2048, 2),
}
REAL_TITLE, REAL_MAX_LENGTH, REAL_PAIRS = "real pairs", 1024, 4
PROFILES = ("real", *GENERATED)


def draw_lengths(profile: Profile, count: int, seed: int) -> list[tuple[int, int, int]]:
    """(prompt, chosen, rejected) lengths of `count` rows, seeded, cut to `max_length` with answers kept >= 16."""
    source = random.Random(seed)
    lengths = []

    def draw(median: float) -> int:
        return max(16, round(source.lognormvariate(math.log(median), profile.sigma)))

    for _ in range(count):
        chosen, rejected = draw(profile.answer_median), draw(profile.answer_median)
        if profile.prompt_median is None:
            prompt = profile.prompt_per_answer * (chosen + rejected) // 2
        else:
            prompt = draw(profile.prompt_median)
        chosen, rejected = (min(n, profile.max_length // 2) for n in (chosen, rejected))
        lengths.append((min(prompt, profile.max_length - max(chosen, rejected)), chosen, rejected))
    return lengths


def single_token_words(encode: Callable[[str], Sequence[int]], vocabulary: dict[str, int]) -> list[str]:
    """Lower-case words that are one token after a space, so that lengths in words are lengths in tokens."""
    after_space = (token[1:] for token in vocabulary if token.startswith("Ġ"))
    candidates = sorted(w for w in after_space if w.isascii() and w.isalpha() and w.islower())
    return [w for w in candidates if len(w) > 1 and len(encode(" " + w)) == 1][:4000]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def template_overhead(tokenizer: Any) -> tuple[int, int]:
    """Tokens that the chat template adds to a one-turn prompt and to an answer."""
    user, answer = message("user", "a"), message("assistant", "a")
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=True, return_dict=True)
    full = tokenizer.apply_chat_template([user, answer], tokenize=True, return_dict=True)
    return len(prompt["input_ids"]) - 1, len(full["input_ids"]) - len(prompt["input_ids"]) - 1


def generate(profile: Profile, count: int, tokenizer: Any, seed: int = 0) -> list[Row]:
    """Rows of random words whose tokenized lengths follow the profile."""

    def encode(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    words = single_token_words(encode, tokenizer.get_vocab())
    prompt_extra, answer_extra = template_overhead(tokenizer)
    source = random.Random(seed + 1)

    def text(tokens: int) -> str:
        # The first word has no space before it and may be two tokens; lengths are a profile, not a promise.
        return " ".join(source.choices(words, k=max(1, tokens)))

    return [
        {
            "prompt": [message("user", text(prompt - prompt_extra))],
            "chosen": [message("assistant", text(chosen - answer_extra))],
            "rejected": [message("assistant", text(rejected - answer_extra))],
        }
        for prompt, chosen, rejected in draw_lengths(profile, count, seed)
    ]


def real_path(given: str | None) -> Path | None:
    """The file of real pairs: the option, else the environment variable, else the neighbouring checkout's data."""
    if given or os.environ.get(DATA_VARIABLE):
        return Path(given or os.environ[DATA_VARIABLE])
    neighbour = ROOT.parent / "shared" / "data" / "dpo_en_demo.json"
    return neighbour if neighbour.exists() else None


def read_real(path: Path) -> list[Row]:
    """Pairs of a ShareGPT-like JSON list (`conversations`, `chosen`, `rejected`) as messages."""
    roles = {"human": "user", "gpt": "assistant", "system": "system"}

    def turn(entry: dict[str, str]) -> dict[str, str]:
        return message(roles[entry["from"]], entry["value"])

    return [
        {
            "prompt": [turn(t) for t in row["conversations"]],
            "chosen": [turn(row["chosen"])],
            "rejected": [turn(row["rejected"])],
        }
        for row in json.loads(path.read_text(encoding="utf-8"))
    ]


def fits(row: Row, tokenizer: Any, max_length: int) -> bool:
    """Whether both branches keep at least one answer token under `max_length`: no side drops such a row."""
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(prompt["input_ids"]) < max_length - 1


def repeat(rows: list[Row], count: int) -> list[Row]:
    """The first `count` rows, from the start again where there are fewer."""
    return [rows[i % len(rows)] for i in range(count)]


def write(rows: Sequence[Row], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
