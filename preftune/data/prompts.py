"""Prompt rows to ids: what a policy is asked to complete, with every other column kept for the reward functions.

The prompt column itself stays as it was given; its ids are beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from preftune.data.columns import check_plain, column_names, first_row, missing_column, rename_columns
from preftune.data.conversations import to_messages
from preftune.data.encoding import TextEncoder
from preftune.data.formats import template_options
from preftune.data.mapping import EncodedRow, PreparedData, as_columns, encode_dataset, tokenizer_key
from preftune.data.preference import check_ids
from preftune.data.report import Outcome
from preftune.data.templates import Chat, ChatRenderer

PROMPT_IDS = ("prompt_ids",)


@dataclass
class PromptEncoder:
    """Encodes batches of prompt rows; picklable, so that several processes can."""

    encoder: TextEncoder
    renderer: ChatRenderer

    def __call__(self, batch: Mapping[str, list], rows: list[int]) -> dict[str, list]:
        if "prompt_ids" in batch:
            for ids, row in zip(batch["prompt_ids"], rows):
                check_ids(ids, row, "prompt_ids")
            encoded = batch["prompt_ids"]
        else:
            encoded = self.ids(batch, rows)
        outcomes = [Outcome.KEPT if ids else Outcome.NO_PROMPT for ids in encoded]
        return as_columns([EncodedRow((ids,), outcome) for ids, outcome in zip(encoded, outcomes)], PROMPT_IDS)

    def ids(self, batch: Mapping[str, list], rows: list[int]) -> list[list[int]]:
        """The ids of each `prompt` of a batch, text or messages."""
        prompts = [read_prompt(value, row) for value, row in zip(batch["prompt"], rows)]
        chats = []
        for place, (prompt, row) in enumerate(zip(prompts, rows)):
            if isinstance(prompt, list) and prompt:
                values = {
                    column: batch[column][place] for column in ("tools", "chat_template_kwargs") if column in batch
                }
                chats.append(Chat(prompt, row, True, *template_options(values, row)))
        rendered = iter(self.renderer.render(chats) if chats else ())
        texts = [prompt if isinstance(prompt, str) else next(rendered) if prompt else "" for prompt in prompts]
        ids = self.encoder.encode(texts)
        return [self.encoder.open(i) if isinstance(prompt, str) else i for prompt, i in zip(prompts, ids)]


def read_prompt(value: Any, row: int) -> str | list[dict[str, Any]]:
    """A prompt as text or as messages with `role` and `content`.

    Raises:
        DataFormatError: it is neither.
    """
    return value if isinstance(value, str) else to_messages(value, row, "prompt")


def prepare_prompts(
    dataset: Any,
    tokenizer: Any,
    *,
    columns: Mapping[str, str] | None = None,
    num_proc: int | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    keep_columns: Collection[str] | None = None,
    name: str = "train",
) -> PreparedData:
    """Adds `prompt_ids` to rows with a `prompt`, text or messages. Messages end where the model is to answer.

    Args:
        keep_columns: Columns to keep; None keeps all.

    The other arguments are those of `prepare_preference`.

    Raises:
        DataFormatError: columns or values that cannot be used, or no usable row.
    """
    check_plain(dataset, name)
    dataset = rename_columns(dataset, columns)
    names = column_names(dataset)
    first_row(dataset, name)
    if not {"prompt", "prompt_ids"} & set(names):
        raise missing_column(name, names, ["prompt"], "a dataset of prompts")
    encoder = TextEncoder(tokenizer)
    options = dict(chat_template_kwargs or {})
    encode = PromptEncoder(encoder, ChatRenderer(tokenizer, chat_template, options))
    keep = {*(names if keep_columns is None else keep_columns)} & set(names) - {"prompt_ids"}
    key = ["prompts", options, sorted(keep), *tokenizer_key(tokenizer, chat_template)]
    return encode_dataset(dataset, encode, PROMPT_IDS, key=key, name=name, keep=keep, num_proc=num_proc)
