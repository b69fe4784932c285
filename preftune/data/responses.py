"""Generated text back to a message: content, thinking and tool calls.

The form in which a template writes them is found out by `response_schemas`; broken text is content as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from preftune.data.response_schemas import derive_response_template
from preftune.data.template_probes import tokenizer_of
from preftune.errors import ConfigError


def add_response_schema(processing_class: Any) -> Any:
    """Gives the tokenizer (of a processor) a `response_template`, with which `parse_response` reads what it generated.

    It is derived from how the chat template writes an answer, thinking and calls, and tried on them.

    Returns:
        `processing_class` itself.

    Raises:
        ConfigError: what the template writes cannot be read back.
    """
    tokenizer_of(processing_class).response_template = derive_response_template(processing_class)
    return processing_class


def parse_response(
    tokenizer: Any, ids: Sequence[int], prefix: Sequence[int] | str | None = None, tools: list[Any] | None = None
) -> dict[str, Any]:
    """The message that generated `ids` say, `{"role": "assistant", "content": ..., ...}`.

    Text that does not have the form of the schema, such as a call whose JSON is broken, is content as it stands.

    Args:
        prefix: The prompt, where it opens the answer (`<think>`).
        tools: Schemas by which the arguments of calls get their types.

    Raises:
        ConfigError: the tokenizer has no schema.
    """
    tokenizer = tokenizer_of(tokenizer)
    if not tokenizer.response_template:
        raise ConfigError(
            "the tokenizer has no response schema. Call preftune.add_response_schema(tokenizer) first, or set "
            "tokenizer.response_template."
        )
    ids = list(ids)
    if not ids:  # transformers takes an empty list for an empty batch
        return {"role": "assistant", "content": ""}
    try:
        schema = _with_types_of(tools, tokenizer.response_template)
        message = tokenizer.parse_response(ids, schema, prefix=prefix if prefix is not None else "", tools=tools)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    content = message.get("content") or ""
    if tokenizer.eos_token:
        content = content.removesuffix(tokenizer.eos_token)
    for call in message.get("tool_calls", []):
        function = call["function"]
        function["arguments"] = {} if function.get("arguments") is None else function["arguments"]
    return {**message, "content": content}


def _with_types_of(tools: list[Any] | None, schema: dict[str, Any]) -> dict[str, Any]:
    """`schema`, which leaves values without quotes as they are where the schemas of `tools` say what they are."""
    calls = schema["fields"].get("tool_calls", {})
    if not tools or "value_parser" not in calls.get("content_args", {}):
        return schema
    arguments = {key: value for key, value in calls["content_args"].items() if key != "value_parser"}
    return {**schema, "fields": {**schema["fields"], "tool_calls": {**calls, "content_args": arguments}}}
