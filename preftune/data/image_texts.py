"""Texts with images to texts whose placeholders are spelled out, so that ids are prepared as those of any text.

What the processor hands to its tokenizer is looked at, so that no family's rules are known here.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from preftune.data.columns import column_names
from preftune.data.multimodal import (
    IMAGE_COLUMNS,
    Message,
    has_images,
    is_multimodal,
    prepare_multimodal_messages,
    process_images,
    row_images,
)
from preftune.errors import ConfigError, DataFormatError

BATCH_IMAGES = 32  # rows read at a time: their images are decoded together


@dataclass
class Expanded:
    """Texts with each placeholder spelled out as the tokens that stand for its image.

    Attributes:
        prompt: The prompt, "" where there is none.
        wholes: Prompt + answer, for each answer.
        tokens: Added tokens that stand for images; never scored and never cut off.
    """

    prompt: str
    wholes: tuple[str, ...]
    tokens: frozenset[str] = frozenset()


@dataclass
class ImageEncoder:
    """What an encoder of rows asks about their images; picklable.

    Args:
        processor: Of the model, with a tokenizer and an image processor.
        shows_images: The rows may have images. Otherwise their messages are still given to the template as blocks.
    """

    processor: Any
    shows_images: bool = True
    token: str = field(init=False)

    def __post_init__(self) -> None:
        token = _placeholder(self.processor)
        if token is None:
            raise ConfigError(
                f"{type(self.processor).__name__} names no image_token, so nobody knows where images are in a text. "
                "Set processor.image_token to the placeholder that its chat template writes."
            )
        self.token = token

    def read(self, batch: Mapping[str, list], rows: Sequence[int]) -> dict[int, list[Any]]:
        """The images of each row of a batch, by row number."""
        columns = [column for column in IMAGE_COLUMNS if column in batch]
        values = {column: batch[column] for column in columns}  # decoded once
        return {row: row_images({c: values[c][place] for c in columns}, row) for place, row in enumerate(rows)}

    def place(self, parts: Sequence[list[Message]], images: Sequence[Any], row: int) -> list[list[Message]]:
        """`prepare_multimodal_messages` of a conversation given in parts (prompt, answer)."""
        try:
            whole = prepare_multimodal_messages([message for part in parts for message in part], images)
        except DataFormatError as error:
            raise DataFormatError(f"row {row}: {error}") from None
        ends = [sum(map(len, parts[: n + 1])) for n in range(len(parts))]
        return [whole[end - len(part) : end] for end, part in zip(ends, parts)]

    def expand(self, prompt: str, wholes: Sequence[str], images: Sequence[Any], row: int) -> Expanded:
        """Spells out the placeholders of a prompt and of the same prompt with its answers after it.

        Without a prompt the images are anywhere in the one whole. Each image is processed once.

        Raises:
            DataFormatError: other numbers of placeholders than of images, or images in answers.
            ConfigError: a processor that does more to a text than spell out its placeholders.
        """
        base = prompt or wholes[0]
        counts = [text.count(self.token) for text in (base, *wholes)]
        if set(counts) != {len(images)}:
            raise DataFormatError(
                f"row {row}: {len(images)} images, and the text has {counts[0]} placeholders {self.token!r} "
                f"({max(counts)} with the answer); wanted one in the prompt for each image. Messages get theirs from "
                "the chat template, which must write one for an image block; plain text must hold them."
            )
        if not images:
            return Expanded(prompt, tuple(wholes))
        expanded = self._expanded(base, images)
        cut = base.rindex(self.token) + len(self.token)
        head, tail = expanded[: len(expanded) - len(base) + cut], base[cut:]
        if not expanded.endswith(tail) or any(whole[:cut] != base[:cut] for whole in wholes):
            raise ConfigError(
                f"row {row}: {type(self.processor).__name__} or its chat template changes the text around an image "
                "when an answer follows, so the prompt is not how prompt + answer begin. Such models are not supported."
            )
        added = self.processor.tokenizer.added_tokens_decoder.values()
        before, after = (Counter({t.content: text.count(t.content) for t in added}) for text in (base, expanded))
        tokens = {self.token} | {content for content in after if after[content] > before[content]}
        return Expanded(head + tail if prompt else "", tuple(head + whole[cut:] for whole in wholes), frozenset(tokens))

    def _expanded(self, text: str, images: Sequence[Any]) -> str:
        """What the processor hands to its tokenizer."""
        processor = copy.copy(self.processor)
        processor.tokenizer = spy = _Spy(self.processor.tokenizer)
        process_images(processor, text, images)
        return spy.text

    def ids_of(self, tokens: Collection[str]) -> frozenset[int]:
        """The ids of added tokens."""
        return frozenset(self.processor.tokenizer.convert_tokens_to_ids(sorted(tokens)))

    @property
    def how(self) -> dict[str, Any]:
        """How `encode_dataset` goes through the rows: images stay where they are, and are decoded a few at a time."""
        return {"beside": IMAGE_COLUMNS, "batch_rows": BATCH_IMAGES} if self.shows_images else {}

    @property
    def key(self) -> str:
        """All that the ids depend on besides the tokenizer."""
        return json.dumps(self.processor.to_dict(), sort_keys=True, default=str)

    @property
    def chat_template(self) -> str | None:
        """The processor's own template; None where the tokenizer's is meant."""
        template = self.processor.chat_template
        return template.get("default") if isinstance(template, dict) else template


def _placeholder(processor: Any) -> str | None:
    try:
        return str(processor.image_token) if processor.image_token else None
    except AttributeError:
        return None


class _Spy:
    """A tokenizer that keeps the text it was last called with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def image_encoder(
    dataset: Any, processor: Any, max_length: int | None, truncation_mode: str, name: str
) -> ImageEncoder | None:
    """What encodes the images of a dataset; None where neither its rows nor the chat template know of any.

    Rows of text alone need it too: templates of such models take contents of blocks, and many drop plain text.

    Raises:
        ConfigError: a tokenizer alone, or cutting at the beginning, where the images are.
    """
    if not has_images(dataset):
        speaks = processor is not None and processor.chat_template is not None and _placeholder(processor) is not None
        return ImageEncoder(processor, shows_images=False) if speaks else None
    if processor is None or not is_multimodal(processor):
        raise ConfigError(
            f"the {name} dataset has images (columns {column_names(dataset)}), and the processing class only knows "
            "text. Train a vision-language model, with processing_class=AutoProcessor.from_pretrained(...), or remove "
            "the column."
        )
    if truncation_mode == "keep_end" and max_length is not None:
        raise ConfigError(
            "truncation_mode='keep_end' is not supported for vision-language models: it would cut off images. Use "
            "keep_start."
        )
    return ImageEncoder(processor)
