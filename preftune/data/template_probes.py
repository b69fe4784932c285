"""What a chat template does, found out by rendering short conversations with it: tools, prefixes, the end of a turn.

No template is known by its text: whatever renders alike is treated alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import ProcessorMixin

Messages = list[dict[str, Any]]
# What templates raise for conversations that they do not know.
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)

QUESTION, QUESTION2, ANSWER, ANSWER2 = "Zquestionz", "Zsecondquestionz", "Zanswerz", "Zsecondanswerz"
RESULT, THOUGHT = "Zresultz", "Zthoughtz"
FUNCTION, KEY, VALUE, KEY2, VALUE2 = "Zfunctionz", "Zkeyz", "Zvaluez", "Zotherkeyz", "Zothervaluez"
CALL_ID = "call00001"  # nine letters and digits, as Mistral wants


def user(text: str = QUESTION) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str = ANSWER, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calling(*arguments: Mapping[str, Any] | str, content: str = "", **more: Any) -> dict[str, Any]:
    """An assistant's turn with one call for each of `arguments`."""
    calls = [
        {"id": CALL_ID, "type": "function", "function": {"name": FUNCTION, "arguments": given}} for given in arguments
    ]
    return assistant(content, tool_calls=calls, **more)


def tool(text: str = RESULT) -> dict[str, Any]:
    return {"role": "tool", "name": FUNCTION, "tool_call_id": CALL_ID, "content": text}


class Probe:
    """Renders trial conversations with `template` (None: the tokenizer's or processor's own).

    `blocks` says whether the template wants a content in blocks (`[{"type": "text", ...}]`), as those of
    vision-language models do; it is found out at construction. `strings` says the same of arguments of calls.
    """

    def __init__(self, processing_class: Any, template: str | None = None) -> None:
        self.processing_class = processing_class
        self.template = template
        self.blocks = False
        self.strings = False
        if QUESTION not in (self.render([user()]) or ""):
            self.blocks = True
            self.blocks = QUESTION in (self.render([user()]) or "")
        call = [user(), calling({KEY: VALUE}), tool()]
        if VALUE not in (self.render(call) or ""):
            self.strings = True
            self.strings = VALUE in (self.render(call) or "")

    def render(self, messages: Messages, **how: Any) -> str | None:
        """The text, or None where the template refuses the conversation."""
        if self.template is not None:
            how["chat_template"] = self.template
        try:
            text = self.processing_class.apply_chat_template(self.fitted(messages), tokenize=False, **how)
        except REFUSALS:
            return None
        return text if isinstance(text, str) else text[0]

    def writes_tools(self) -> bool:
        """Whether a call, its arguments and its result are all written."""
        text = self.render([user(), calling({KEY: VALUE}), tool()]) or ""
        return all(word in text for word in (QUESTION, FUNCTION, VALUE, RESULT))

    def fitted(self, messages: Messages) -> Messages:
        """`messages` with contents and arguments in the form that the template reads."""
        fitted = []
        for message in messages:
            message = dict(message)
            if self.blocks and isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []
            if self.strings and "tool_calls" in message:
                calls = [call["function"] for call in message["tool_calls"]]
                calls = [{**call, "arguments": json.dumps(call["arguments"])} for call in calls]
                message["tool_calls"] = [
                    {**whole, "function": call} for whole, call in zip(message["tool_calls"], calls)
                ]
            fitted.append(message)
        return fitted


def supports_tool_calling(processing_class: Any, chat_template: str | None = None) -> bool:
    """Whether the chat template writes what a tool loop consists of: a call, its arguments and its result.

    A template that takes arguments as JSON text only supports them too.
    """
    return Probe(processing_class, chat_template).writes_tools()


def is_chat_template_prefix_preserving(processing_class: Any, chat_template: str | None = None) -> bool:
    """Whether a tool's result only adds tokens: the ids up to it are a prefix of the ids with it.

    A rollout with tools goes on behind what was sampled, so training on its whole text needs this. False also where the
    template knows no tools.
    """
    probe = Probe(processing_class, chat_template)
    if not probe.writes_tools():
        return False
    for more in ({}, {"reasoning_content": THOUGHT}):
        turn = calling({KEY: VALUE}, **more)
        without, with_result = probe.render([user(), turn]), probe.render([user(), turn, tool()])
        if without is None or with_result is None or not with_result.startswith(without):
            return False
        ids, longer = (_text_ids(processing_class, text) for text in (without, with_result))
        if longer[: len(ids)] != ids:
            return False
    return True


def is_chat_template_stop_token_trained(processing_class: Any, chat_template: str | None = None) -> bool:
    """Whether the token that ends an assistant's turn is inside `{% generation %}`, so that it is scored.

    It is where the last scored token of a turn, blanks aside, is one of the added tokens. A template that refuses a
    question and an answer cannot be judged, and counts as trained.
    """
    probe = Probe(processing_class, chat_template)
    messages = [user(), assistant()]
    if probe.render(messages) is None:
        return True
    scored = marked_text(processing_class, probe.fitted(messages), chat_template)[-2:]
    text = "".join(marked for _, marked in scored).rstrip()
    ids = _text_ids(processing_class, text)
    return bool(ids) and ids[-1] in tokenizer_of(processing_class).added_tokens_decoder


def marked_text(
    processing_class: Any, messages: Messages, chat_template: str | None = None, tools: Any = None, **options: Any
) -> list[tuple[str, str]]:
    """The rendered conversation as pairs of texts: not generated, generated, in their order.

    Raises:
        ValueError: the template has no `{% generation %}` markers, or refuses the conversation.
    """
    tokenizer = tokenizer_of(processing_class)
    out = tokenizer.apply_chat_template(
        [messages],
        chat_template=chat_template or template_of(processing_class, tools),
        tools=tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **options,
    )
    pieces: list[tuple[list[int], list[int]]] = [([], [])]
    for token, scored in zip(out["input_ids"][0], out["assistant_masks"][0]):
        if not scored and pieces[-1][1]:
            pieces.append(([], []))
        pieces[-1][int(scored)].append(token)
    return [(tokenizer.decode(plain), tokenizer.decode(scored)) for plain, scored in pieces]


def tokenizer_of(processing_class: Any) -> Any:
    """The tokenizer itself, or the one inside a processor."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def template_of(processing_class: Any, tools: Any = None) -> str:
    """The chat template in use: of several named ones `tool_use` where there are tools, else `default`."""
    if isinstance(processing_class, ProcessorMixin):
        templates = processing_class.chat_template or processing_class.tokenizer.chat_template
        return templates["default"] if isinstance(templates, Mapping) else templates
    return processing_class.get_chat_template(tools=tools)


def between(text: str | None, *words: str) -> list[str] | None:
    """The texts before, between and after `words`; None if one is not there exactly once and in order."""
    pieces: list[str] = []
    for word in words:
        if text is None or text.count(word) != 1:
            return None
        before, _, text = text.partition(word)
        pieces.append(before)
    return [*pieces, text] if text is not None else None


def _text_ids(processing_class: Any, text: str) -> Sequence[int]:
    return tokenizer_of(processing_class)(text, add_special_tokens=False)["input_ids"]
