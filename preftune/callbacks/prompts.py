"""The prompts that are generated from while a run is watched: out of raw rows, or out of rows already tokenized.

Taken in order from the start of a data set, so a table shows the same prompts at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

ROW_KINDS = "a 'prompt' column (text or messages), 'prompt_ids', or 'input_ids' with 'labels'"


@dataclass(frozen=True)
class Prompt:
    """The ids the model sees, the text a person reads, and the name of the data set where there are several."""

    ids: list[int]
    text: str
    dataset: str | None = None


def check_has_prompts(dataset: Any) -> None:
    """Raises `ValueError` unless the first row of every data set has a prompt."""
    for name, rows in _by_name(dataset).items():
        first = next(iter(rows), None)
        where = "the eval set" if name is None else f"eval set {name!r}"
        if first is None:
            raise ValueError(f"{where} is empty; completions need at least one row with {ROW_KINDS}")
        if not _has_prompt(first):
            raise ValueError(
                f"{where} has columns {sorted(first)}; completions need {ROW_KINDS}. "
                "Give rows that have one as dataset=."
            )


def read_prompts(dataset: Any, tokenizer: PreTrainedTokenizerBase, num_prompts: int | None) -> list[Prompt]:
    """The first `num_prompts` (None: all) prompts of each data set; rows whose prompt is empty are passed over."""
    prompts: list[Prompt] = []
    for name, rows in _by_name(dataset).items():
        read = (_read_row(row, tokenizer, name) for row in rows)
        prompts += islice((prompt for prompt in read if prompt.ids), num_prompts)
    if not prompts:
        raise ValueError("no row of the eval set has a prompt that is not empty; give rows that have one as dataset=")
    return prompts


def _by_name(dataset: Any) -> dict[str | None, Iterable[Mapping[str, Any]]]:
    return dict(dataset) if isinstance(dataset, Mapping) else {None: dataset}


def _has_prompt(row: Mapping[str, Any]) -> bool:
    return "prompt_ids" in row or "prompt" in row or {"input_ids", "labels"} <= row.keys()


def _read_row(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, name: str | None) -> Prompt:
    if "prompt_ids" in row:
        ids = [int(i) for i in row["prompt_ids"]]
    elif "prompt" in row:
        ids = _encode(row, tokenizer)
    else:
        ids = _unscored_start(row["input_ids"], row["labels"])
    prompt = row.get("prompt")
    text = prompt if isinstance(prompt, str) else _decode_prompt(ids, tokenizer)
    return Prompt(ids, text, name)


def _encode(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if isinstance(row["prompt"], str):
        return list(tokenizer(row["prompt"])["input_ids"])
    text = tokenizer.apply_chat_template(
        row["prompt"],
        tools=row.get("tools"),
        tokenize=False,
        add_generation_prompt=True,
        **(row.get("chat_template_kwargs") or {}),
    )
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])  # the template wrote the special ones


def _unscored_start(input_ids: Iterable[int], labels: Iterable[int]) -> list[int]:
    """The tokens before the first scored one: what an SFT row holds of its prompt. Nothing where all are scored."""
    ids = []
    for token, label in zip(input_ids, labels, strict=True):
        if int(label) != -100:
            break
        ids.append(int(token))
    return ids


def _decode_prompt(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """With the marks of the chat template, without the beginning-of-sequence token."""
    shown = ids[1:] if ids and ids[0] == tokenizer.bos_token_id else ids
    return str(tokenizer.decode(shown))
