"""Chat templates: rendering many conversations at once, and the helpers that users call on single rows.

Rendered text is tokenized without special tokens ever after: what a template does not write is not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from preftune.data.conversations import is_conversational
from preftune.data.model_templates import (
    clone_chat_template,
    derive_training_template,
    get_training_chat_template,
    has_generation_markers,
)
from preftune.data.pairs import shared_text
from preftune.data.template_probes import (
    REFUSALS,
    is_chat_template_prefix_preserving,
    is_chat_template_stop_token_trained,
    marked_text,
    supports_tool_calling,
    template_of,
)
from preftune.errors import ConfigError, DataFormatError

__all__ = [
    "Chat",
    "ChatRenderer",
    "apply_chat_template",
    "clone_chat_template",
    "get_training_chat_template",
    "has_generation_markers",
    "is_chat_template_prefix_preserving",
    "is_chat_template_stop_token_trained",
    "maybe_apply_chat_template",
    "show_mask",
    "supports_tool_calling",
]

_CONVERSATIONAL_KEYS = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "completion", "label"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
)


@dataclass(slots=True)
class Chat:
    """One conversation to render. `row` is named in errors; `answer_next` writes the header of an assistant's turn."""

    messages: list[dict[str, Any]]
    row: int
    answer_next: bool = False
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ChatRenderer:
    """Renders conversations with the tokenizer's chat template (or `chat_template`) and fixed `options`.

    Raises:
        ConfigError: at the first use, if the tokenizer has no template.
        DataFormatError: the template refuses a conversation, with the row.
    """

    tokenizer: Any
    chat_template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    _derived: dict[str, str] = field(default_factory=dict)

    def render(self, chats: Sequence[Chat]) -> list[str]:
        """The text of each conversation; those with equal options go to the template in one call."""
        self._check_template()
        texts = [""] * len(chats)
        for group in _groups(chats):
            rendered = self._apply(group, self.chat_template, tokenize=False)
            for (place, _), text in zip(group, rendered):
                texts[place] = text
        return texts

    def encode_marked(self, chats: Sequence[Chat]) -> list[tuple[list[int], list[int]]]:
        """Ids of each conversation, and 1 for every token of what the model generates.

        A template without `{% generation %}` markers is wrapped in one that has them.

        Raises:
            ConfigError: where assistant turns begin or end cannot be told.
        """
        encoded: list[tuple[list[int], list[int]]] = [([], [])] * len(chats)
        for group in _groups(chats):
            template = self.marked_template(group[0][1].tools)
            out = self._apply(
                group, template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, verbose=False
            )
            for (place, _), ids, mask in zip(group, out["input_ids"], out["assistant_masks"]):
                encoded[place] = (ids, mask)
        return encoded

    def marked_template(self, tools: list[Any] | None = None) -> str:
        """The template with `{% generation %}` markers; of several named ones that for conversations with `tools`.

        Raises:
            ConfigError: none can be derived.
        """
        self._check_template()
        template = self.chat_template or template_of(self.tokenizer, tools)
        if has_generation_markers(template):
            return template
        if template not in self._derived:
            self._derived[template] = derive_training_template(self.tokenizer, template)
        return self._derived[template]

    def _apply(self, group: list[tuple[int, Chat]], template: str | None, **how: Any) -> Any:
        first = group[0][1]
        options = {**self.options, **first.options, **how}  # a row's own option wins
        options.update(chat_template=template, tools=first.tools, add_generation_prompt=first.answer_next)
        try:
            return self.tokenizer.apply_chat_template([chat.messages for _, chat in group], **options)
        except REFUSALS as error:
            if len(group) > 1:
                for one in group:
                    self._apply([one], template, **how)
            roles = [message.get("role") for message in first.messages]
            raise DataFormatError(
                f"row {first.row}: the chat template refuses the conversation with roles {roles}: "
                f"{type(error).__name__}: {error}. Mend or filter such rows, or give another chat template."
            ) from error

    def _check_template(self) -> None:
        if self.chat_template is None and not self.tokenizer.chat_template:
            raise ConfigError(
                f"the data is conversational and the tokenizer ({type(self.tokenizer).__name__} "
                f"{self.tokenizer.name_or_path!r}) has no chat template. Give one (chat_template_path, or "
                "tokenizer.chat_template = '...'; clone_chat_template copies another model's), or bring plain text."
            )


def show_mask(
    processing_class: Any, messages: list[dict[str, Any]], chat_template: str | None = None, **options: Any
) -> str:
    """The rendered conversation with what `assistant_only_loss` scores in `[[` and `]]`, to check a template by eye.

    Args:
        chat_template: Looked at instead of the own template.
        options: `tools`, and options of the template such as `enable_thinking`.

    Raises:
        ConfigError: the template has no markers, and none can be derived.
    """
    template = ChatRenderer(processing_class, chat_template).marked_template(options.get("tools"))
    pieces = marked_text(processing_class, messages, template, **options)
    return "".join(plain + (f"[[{marked}]]" if marked else "") for plain, marked in pieces)


def apply_chat_template(
    example: Mapping[str, Any], processing_class: Any, tools: list[Any] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """Renders the messages of one row to text: `messages` to `text`, other columns under their own names.

    A prompt that ends with the user or a tool gets the header of an answer; one that ends with the assistant is left
    open. Answers are what follows the prompt; where the template renders the prompt alone otherwise, the prompt is what
    all renderings share, and no special token is cut. `chat_template_kwargs` of the row is merged in.

    Raises:
        DataFormatError: columns that make no known row, an empty list of messages, or a prompt that ends with another
            role.
    """
    keys = set(example) & {"messages", "prompt", "completion", "chosen", "rejected", "label"}
    if keys not in _CONVERSATIONAL_KEYS:
        wanted = ", ".join(str(sorted(known)) for known in _CONVERSATIONAL_KEYS)
        raise DataFormatError(f"the row has columns {sorted(example)}; wanted the messages of one of {wanted}.")

    def render(messages: list[dict[str, Any]], **how: Any) -> str:
        if not messages:
            raise DataFormatError(f"a list of messages is empty in the row with columns {sorted(example)}.")
        options = {**template_kwargs, **(example.get("chat_template_kwargs") or {}), **how}
        return processing_class.apply_chat_template(messages, tools=tools or None, tokenize=False, **options)

    if "messages" in keys:
        return {"text": render(example["messages"])}
    sides = [side for side in ("completion", "chosen", "rejected") if side in keys]
    if "prompt" not in keys:
        return {side: render(example[side]) for side in sides}
    texts = {"prompt": render(example["prompt"], **_ending(example["prompt"]))}
    prompt = texts["prompt"]
    whole = {side: render(example["prompt"] + example[side]) for side in sides}
    for text in whole.values():
        prompt = prompt[: shared_text(prompt, text, processing_class.all_special_tokens)]
    texts = {"prompt": prompt, **{side: text[len(prompt) :] for side, text in whole.items()}}
    return {**texts, "label": example["label"]} if "label" in keys else texts


def maybe_apply_chat_template(
    example: Mapping[str, Any], processing_class: Any, tools: list[Any] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """`apply_chat_template` for conversational rows; others come back with equal values."""
    if is_conversational(example):
        return apply_chat_template(example, processing_class, tools, **template_kwargs)
    return dict(example)


def _ending(prompt: list[dict[str, Any]]) -> dict[str, bool]:
    role = prompt[-1]["role"] if prompt else None
    if role in ("user", "tool"):
        return {"add_generation_prompt": True}
    if role == "assistant":
        return {"continue_final_message": True}
    raise DataFormatError(f"the prompt ends with the role {role!r}; wanted user, tool or assistant.")


def _groups(chats: Sequence[Chat]) -> list[list[tuple[int, Chat]]]:
    groups: dict[Any, list[tuple[int, Chat]]] = {}
    for place, chat in enumerate(chats):
        key: Any = chat.answer_next
        if chat.tools or chat.options:
            key = (key, json.dumps([chat.tools, chat.options], default=repr, sort_keys=True))
        groups.setdefault(key, []).append((place, chat))
    return list(groups.values())
