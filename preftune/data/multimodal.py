"""Images in rows: the messages around them, the columns they are in, and what a model is given of them.

Pixels are computed by the collator, once for all branches of a prompt, and stored nowhere.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from preftune.data.columns import column_names
from preftune.data.conversations import bad_value
from preftune.errors import ConfigError, DataFormatError
from preftune.types import PromptTree, TreeImages

IMAGE_COLUMNS = ("image", "images")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_OF_TEXT = ("input_ids", "attention_mask")
_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")

Message = dict[str, Any]


def prepare_multimodal_messages(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None = None
) -> list[Message]:
    """Messages whose contents are lists of blocks, with `images` in their `{"type": "image"}` blocks, in order.

    A text becomes one text block. Images without a block of their own go before the text of the first user turn, where
    that is a plain text. Tools bring no images of the row. The messages given stay as they are.

    Raises:
        DataFormatError: an unknown role, or more or fewer empty image blocks than images.
    """
    prepared = [_with_blocks(message) for message in messages]
    images = list(images or [])
    slots = _empty_slots(prepared)
    first = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if len(slots) < len(images) and first is not None and isinstance(messages[first].get("content"), str):
        missing: list[Any] = [{"type": "image"} for _ in range(len(images) - len(slots))]
        prepared[first]["content"] = missing + prepared[first]["content"]
        slots = _empty_slots(prepared)
    if len(slots) != len(images):
        raise DataFormatError(
            f"{len(images)} images and {len(slots)} empty {{'type': 'image'}} blocks in the messages; wanted one block "
            "for each image. Without blocks, images go before the text of the first user turn."
        )
    for slot, image in zip(slots, images):
        slot["image"] = image
    return prepared


def _with_blocks(message: Mapping[str, Any]) -> Message:
    if message.get("role") not in _ROLES:
        raise DataFormatError(f"a message has the role {message.get('role')!r}; wanted one of {', '.join(_ROLES)}.")
    content = message.get("content")
    if isinstance(content, str):
        blocks: list[Any] = [{"type": "text", "text": content}]
    else:
        blocks = [dict(block) if isinstance(block, Mapping) else block for block in content or []]
    return {**message, "content": blocks}


def _empty_slots(messages: Sequence[Message]) -> list[Message]:
    return [
        block
        for message in messages
        if message["role"] != "tool"
        for block in message["content"]
        if isinstance(block, dict) and block.get("type") == "image" and block.get("image") is None
    ]


def has_images(dataset: Any) -> bool:
    """Whether a dataset, or one of a dict of them, has a column `image` or `images`."""
    if isinstance(dataset, Mapping):
        return any(map(has_images, dataset.values()))
    return dataset is not None and bool({*IMAGE_COLUMNS} & {*column_names(dataset)})


def images_read(columns_read: Collection[str], processor: Any, *datasets: Any) -> bool:
    """Whether the prepared sets have images and the trainer, which reads `columns_read`, gives them to the model.

    Raises:
        ConfigError: they have, the model could see them, and the trainer would not show them.
    """
    if not any(map(has_images, datasets)):
        return False
    if "images" not in columns_read and processor is not None:
        raise ConfigError(
            "the dataset has images, and this trainer does not show them to the model; SFTTrainer, DPOTrainer and "
            "KTOTrainer do. Remove the image column, or pass the tokenizer alone (processor.tokenizer)."
        )
    return "images" in columns_read


def is_multimodal(processing_class: Any) -> bool:
    """Whether it is a processor that takes images, and no mere tokenizer."""
    return "image_processor" in vars(processing_class)


def row_images(row: Mapping[str, Any], number: int) -> list[Any]:
    """The images of a row (`images`, or the one of `image`) as RGB images of PIL; [] where there are none.

    Raises:
        DataFormatError: a value that is no image, with the row.
    """
    images, column = row.get("images"), "images"
    if images is None:
        images, column = row.get("image"), "image"
    if images is None:
        return []
    images = images if isinstance(images, list | tuple) else [images]
    return [_load(image, number, column) for image in images if image is not None]


def _load(image: Any, number: int, column: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    source = image
    if isinstance(image, Mapping):  # as datasets.Image(decode=False) gives them
        source = image.get("path") if image.get("bytes") is None else image["bytes"]
    try:
        if isinstance(source, bytes):
            source = Image.open(io.BytesIO(source))
        elif isinstance(source, str):
            source = Image.open(source)
    except (OSError, UnidentifiedImageError) as error:
        raise bad_value(number, column, image, f"an image ({error})") from None
    if not isinstance(source, Image.Image):
        raise bad_value(number, column, image, "an image: a PIL image, or the path or bytes of an image file")
    return source if source.mode == "RGB" else source.convert("RGB")


def with_images(tree: PromptTree, rows: Sequence[Mapping[str, Any]], processor: Any) -> PromptTree:
    """The tree of `rows`, one prompt a row, with what the model is given of their images.

    Raises:
        ConfigError: rows with images, and no processor.
    """
    images = [row_images(row, number) for number, row in enumerate(rows)]
    if not any(images):
        return tree
    if processor is None:
        raise ConfigError("the rows of a batch have images, and the collator has no processor. Give it processor=.")
    prompts: list[Mapping[str, Tensor]] = []
    types: dict[str, dict[int, int]] = {}
    for shown in images:
        given = dict(process_images(processor, " ".join([processor.image_token] * len(shown)), shown)) if shown else {}
        for name in _PER_TOKEN:
            if name in given:
                pairs = zip(given["input_ids"].flatten().tolist(), given.pop(name).flatten().tolist())
                types.setdefault(name, {}).update({token: kind for token, kind in pairs if kind})
        prompts.append({name: value for name, value in given.items() if name not in _OF_TEXT})
    tokens = {name: _types_of(tree.input_ids, kinds) for name, kinds in types.items()}
    return replace(tree, images=TreeImages(tuple(prompts), tokens))


def _types_of(ids: Tensor, kinds: Mapping[int, int]) -> Tensor:
    types = torch.zeros_like(ids)
    for token, kind in kinds.items():
        types[ids == token] = kind
    return types


def process_images(processor: Any, text: str, images: Sequence[Any]) -> Any:
    """What the processor makes of one text and its images: a batch of one, without special tokens around the text.

    Raises:
        ConfigError: a model that looks at images by cross-attention.
    """
    given = processor(text=[text], images=[list(images)], add_special_tokens=False, return_tensors="pt")
    if "cross_attention_mask" in given:
        raise ConfigError(
            f"{type(processor).__name__} is of a model that looks at images by cross-attention, which is not "
            "supported; models that see them as tokens of the text are."
        )
    return given
