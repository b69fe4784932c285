"""The prompts that are generated from while a run is watched: out of raw rows, or out of rows already tokenized.

Taken in order from the start of a data set, so a table shows the same prompts at every step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from preftune.data.image_texts import ImageEncoder
from preftune.data.multimodal import row_images

ROW_KINDS = "a 'prompt' column (text or messages), 'prompt_ids', or 'input_ids' with 'labels'"


@dataclass(frozen=True)
class Prompt:
    """What the model sees (ids, and images whose tokens are among them) and a person reads.

    Attributes:
        dataset: The name of the data set where there are several.
    """

    ids: list[int]
    text: str
    dataset: str | None = None
    images: tuple[Any, ...] = ()


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


def read_prompts(
    dataset: Any, tokenizer: PreTrainedTokenizerBase, num_prompts: int | None, images: ImageEncoder | None = None
) -> list[Prompt]:
    """The first `num_prompts` (None: all) prompts of each data set; rows whose prompt is empty are passed over.

    Args:
        images: Of a model that sees images; without it those of the rows are not looked at.
    """
    prompts: list[Prompt] = []
    for name, rows in _by_name(dataset).items():
        read = (_read_row(row, number, tokenizer, name, images) for number, row in enumerate(rows))
        prompts += islice((prompt for prompt in read if prompt.ids), num_prompts)
    if not prompts:
        raise ValueError("no row of the eval set has a prompt that is not empty; give rows that have one as dataset=")
    return prompts


def _by_name(dataset: Any) -> dict[str | None, Iterable[Mapping[str, Any]]]:
    return dict(dataset) if isinstance(dataset, Mapping) else {None: dataset}


def _has_prompt(row: Mapping[str, Any]) -> bool:
    return "prompt_ids" in row or "prompt" in row or {"input_ids", "labels"} <= row.keys()


def _read_row(
    row: Mapping[str, Any],
    number: int,
    tokenizer: PreTrainedTokenizerBase,
    name: str | None,
    encoder: ImageEncoder | None,
) -> Prompt:
    images = row_images(row, number) if encoder is not None else []
    if "prompt_ids" in row:
        ids = [int(i) for i in row["prompt_ids"]]
    elif "prompt" in row:
        ids = _encode(row, tokenizer) if encoder is None else _encode_with_images(row, number, encoder, images)
    else:
        ids = _unscored_start(row["input_ids"], row["labels"])
    prompt = row.get("prompt")
    text = prompt if isinstance(prompt, str) else _decode_prompt(ids, tokenizer)
    return Prompt(ids, _one_mark_an_image(text, encoder) if images else text, name, tuple(images))


def _encode(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if isinstance(row["prompt"], str):
        return list(tokenizer(row["prompt"])["input_ids"])
    text = _render(row, row["prompt"], tokenizer)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template wrote the special ones


def _render(row: Mapping[str, Any], messages: list[Any], template: Any) -> str:
    """The text of a conversation, up to where an answer begins.

    Args:
        template: The tokenizer or processor whose chat template is applied.
    """
    return str(
        template.apply_chat_template(
            messages,
            tools=row.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            **(row.get("chat_template_kwargs") or {}),
        )
    )


def _encode_with_images(row: Mapping[str, Any], number: int, encoder: ImageEncoder, images: list[Any]) -> list[int]:
    """The same for a model that sees images: messages become blocks, and each placeholder is spelled out."""
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        (messages,) = encoder.place([prompt], images, number)
        prompt = _render(row, messages, encoder.processor)
    text = encoder.expand(prompt, [prompt], images, number).prompt
    is_text = isinstance(row["prompt"], str)
    return list(encoder.processor.tokenizer(text, add_special_tokens=is_text)["input_ids"])


def _one_mark_an_image(text: str, encoder: ImageEncoder | None) -> str:
    """For people: an image is not the hundreds of tokens that stand for it."""
    if encoder is None:
        return text
    mark = re.escape(encoder.token)
    return re.sub(rf"{mark}(\s*{mark})+", lambda found: encoder.token, text)


def _unscored_start(input_ids: Iterable[int], labels: Iterable[int]) -> list[int]:
    """The tokens before the first scored one: what an SFT row holds of its prompt. Nothing where all are scored."""
    ids = []
    for token, label in zip(input_ids, labels, strict=True):
        if int(label) != -100:
            break
        ids.append(int(token))
    return ids


def _decode_prompt(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """With the marks of the chat template, without a beginning-of-sequence token that is none of them."""
    begins = bool(ids) and ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in ids[1:]
    return str(tokenizer.decode(ids[1:] if begins else ids))
