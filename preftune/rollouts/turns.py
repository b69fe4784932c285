"""What a chat template writes around tools: prompts that list them, and what follows a turn that called some.

What the model wrote is never tokenized again: a turn's results are the text that the template adds behind it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from preftune.data.encoding import TextEncoder
from preftune.data.model_templates import get_training_chat_template, turn_marks
from preftune.data.responses import add_response_schema, parse_response
from preftune.data.template_probes import (
    ANSWER,
    KEY,
    RESULT,
    VALUE,
    Messages,
    Probe,
    assistant,
    calling,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
    template_of,
    tokenizer_of,
    tool,
    user,
)
from preftune.data.templates import Chat, ChatRenderer
from preftune.errors import ConfigError

_NO_NAME = re.compile(r"[^\w.-]")


class ToolTurns:
    """Renders and reads conversations with tools.

    Args:
        tokenizer: Stays as it is; a `response_template` of its own is used, else one is derived from its template.
        options: `chat_template_kwargs`.

    Raises:
        ConfigError: the chat template writes no tools, its turns cannot be told apart, or calls cannot be read back.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = copy.copy(tokenizer_of(tokenizer))
        self._named = f"the chat template of {self._tokenizer.name_or_path or type(self._tokenizer).__name__!r}"
        if self._tokenizer.chat_template:  # of several the one for tools
            self._tokenizer.chat_template = template_of(self._tokenizer, tools=[])
        template = self._usable_template()
        if not self._tokenizer.response_template:
            add_response_schema(self._tokenizer)
        self._probe = Probe(self._tokenizer, template)
        self._header, self._stops = turn_marks(self._probe)
        self._options = dict(options or {})
        self._renderer = ChatRenderer(self._tokenizer, template, self._options)
        self._encoder = TextEncoder(self._tokenizer)
        self._try_out()

    def _try_out(self) -> None:
        turn, result = calling({KEY: VALUE}), tool(ANSWER)
        if self.results(turn["tool_calls"], [result], Chat([user()], 0)) is None:
            raise ConfigError(
                f"{self._named} writes results of tools where no end of the turn before can be found; its turns end "
                f"with {', '.join(map(repr, self._stops))}. Let it write one of these between a call and its result."
            )

    def _usable_template(self) -> str:
        """The own template, or the training twin where only that leaves a call as it was when its result is there."""
        if not self._tokenizer.chat_template or not supports_tool_calling(self._tokenizer):
            raise ConfigError(
                f"{self._named} does not write tools: of a call, its arguments and its result something is missing. "
                "Take a model that was made for tools, or a template that is: preftune.clone_chat_template(model, "
                "tokenizer, source)."
            )
        own = self._tokenizer.chat_template
        if is_chat_template_prefix_preserving(self._tokenizer):
            return own
        twin = get_training_chat_template(self._tokenizer)
        if twin is None or not is_chat_template_prefix_preserving(self._tokenizer, twin):
            raise ConfigError(
                f"{self._named} writes a call differently once its result is there, so a rollout would not be what the "
                "model is asked with later. Let the template write every assistant turn of a tool loop in one way "
                "(preftune.data.templates.is_chat_template_prefix_preserving says whether it does)."
            )
        return twin

    @property
    def stop_ids(self) -> list[int]:
        """The ids of the tokens that end an assistant's turn."""
        return self._tokenizer.convert_tokens_to_ids(self._stops)

    def prompts(self, chats: Sequence[Chat]) -> list[tuple[str, list[int]]]:
        """Text and ids of each conversation, up to where the model is to answer."""
        texts = self._renderer.render(chats)
        return list(zip(texts, self._encoder.encode(texts), strict=True))

    def parse(self, ids: Sequence[int], prefix: str, tools: list[Any]) -> dict[str, Any]:
        """The message that generated ids say; `prefix` is the text that they follow."""
        # only what the prompt has already written of the answer belongs to it
        opened = prefix[prefix.rfind(self._header) :] if self._header and self._header in prefix else ""
        return parse_response(self._tokenizer, ids, opened, tools)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encoder.encode(texts)

    def results(self, calls: Sequence[Mapping[str, Any]], results: Messages, chat: Chat) -> str | None:
        """What the template writes between the end of a turn with these calls and the beginning of the next turn.

        None where it refuses them, or nothing ends the turn before them.

        Args:
            calls: `tool_calls` of the turn.
            results: Its tool messages.
            chat: The conversation, for its tools and options.
        """
        shown = [_without_arguments(call) for call in calls]
        results = [{**result, "name": _NO_NAME.sub("", str(result["name"]))} for result in results]
        for few in (shown, shown[:1]):  # some templates refuse several calls, but not their results
            turn = assistant("", tool_calls=few)
            marked = self._render([user(), turn, {**results[0], "content": RESULT}, *results[1:]], chat)
            whole = self._render([user(), turn, *results], chat)
            before = marked.partition(RESULT)[0]
            starts = [before.rfind(stop) + len(stop) for stop in self._stops if stop in before]
            if starts and whole.startswith(before[: max(starts)]):
                return whole[max(starts) :]
        return None

    def _render(self, messages: Messages, chat: Chat) -> str:
        """The text, "" where the template refuses the messages."""
        options = {**self._options, **chat.options}
        return self._probe.render(messages, tools=chat.tools, add_generation_prompt=True, **options) or ""


def _without_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as it stands before its result, without what the model may have made up."""
    return {**call, "function": {"name": _NO_NAME.sub("", str(call["function"]["name"])), "arguments": {}}}
