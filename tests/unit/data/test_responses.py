"""Generated text to messages: schemas derived from templates, and texts written by hand read with them.

The texts are those of `test_training_templates.LOOPS`, which were not made by the code under test.
"""

from __future__ import annotations

import copy
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preftune.data.model_templates import get_training_chat_template
from preftune.data.responses import add_response_schema, parse_response
from preftune.data.template_probes import (
    Probe,
    calling,
    is_chat_template_prefix_preserving,
    is_chat_template_stop_token_trained,
    marked_text,
    supports_tool_calling,
    user,
)
from preftune.errors import ConfigError
from tests.support.chat_templates import FAMILIES, TOOLS, family_tokenizer
from tests.unit.data.test_training_templates import ANSWERS, LOOPS

THINKERS = ("qwen3", "glm4", "harmony")


@functools.cache
def reader(family):
    tokenizer = copy.deepcopy(family_tokenizer(family))
    assert add_response_schema(tokenizer) is tokenizer
    return tokenizer


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers(family):
    tokenizer = reader(family)
    wanted = [{"role": "assistant", "content": "a1"}, {"role": "assistant", "content": "a2"}]
    if family in THINKERS:
        wanted[1]["reasoning_content"] = "hm"
    assert [parse_response(tokenizer, ids(tokenizer, text)) for text in ANSWERS[family]] == wanted


@pytest.mark.parametrize("family", TOOLS)
def test_calls(family):
    tokenizer = reader(family)
    call, answer = (parse_response(tokenizer, ids(tokenizer, text)) for text in LOOPS[family])
    function = {"name": "temp", "arguments": {"city": "Oslo"}}
    wanted = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    assert call == (wanted | {"reasoning_content": "look"} if family in THINKERS else wanted)
    assert answer["content"] == "cold"
    assert "tool_calls" not in answer


words = st.text("abc é{}\"':,", min_size=1, max_size=6).filter(lambda text: text == text.strip())


@pytest.mark.parametrize("family", TOOLS)
@settings(max_examples=15)
@given(st.dictionaries(st.text("xyz", min_size=1, max_size=3), words, min_size=1, max_size=3))
def test_arguments_come_back(family, arguments):
    """What the template writes of a call is read back as the call, with braces and quotes in the values."""
    tokenizer = reader(family)
    messages = Probe(tokenizer).fitted([user(), calling(arguments)])
    pieces = marked_text(tokenizer, messages, get_training_chat_template(tokenizer))
    text = "".join(generated for _, generated in pieces)
    tools = [
        {"function": {"name": "Zfunctionz", "parameters": {"properties": {k: {"type": "string"} for k in arguments}}}}
    ]
    (call,) = parse_response(tokenizer, ids(tokenizer, text), tools=tools)["tool_calls"]
    assert call["function"] == {"name": "Zfunctionz", "arguments": arguments}


def test_types_of_arguments():
    """Tags carry no types: numbers are read as such unless the tool says that they are text."""
    tokenizer = reader("qwen3-coder")
    text = (
        "<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n<parameter=s>\n7\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>"
    )
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    plain, typed = (parse_response(tokenizer, ids(tokenizer, text), tools=t) for t in (None, tools))
    assert plain["tool_calls"][0]["function"]["arguments"] == {"n": 7, "s": 7}
    assert typed["tool_calls"][0]["function"]["arguments"] == {"n": 7, "s": "7"}


def test_several_calls_and_words_before_them():
    tokenizer = reader("qwen2.5")
    text = 'Let me look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", '
    text += '"arguments": {"a": [1]}}\n</tool_call><|im_end|>'
    message = parse_response(tokenizer, ids(tokenizer, text))
    assert message["content"] == "Let me look."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": {}},
        {"name": "g", "arguments": {"a": [1]}},
    ]


def test_thinking_that_the_prompt_opens():
    tokenizer = reader("deepseek")
    prompt = tokenizer.apply_chat_template([user("q")], tokenize=False, add_generation_prompt=True)
    message = parse_response(tokenizer, ids(tokenizer, "because</think>yes<eos>"), prefix=ids(tokenizer, prompt))
    assert message == {"role": "assistant", "reasoning_content": "because", "content": "yes"}


def test_what_has_no_form_is_content():
    tokenizer = reader("qwen2.5")
    broken = '<tool_call>\n{"name": "f", "argu\n</tool_call><|im_end|>'
    message = parse_response(tokenizer, ids(tokenizer, broken))
    assert message == {"role": "assistant", "content": broken.removesuffix("<|im_end|>")}
    nameless = parse_response(tokenizer, ids(tokenizer, '<tool_call>\n{"name": "f"}\n</tool_call><|im_end|>'))
    assert nameless["role"] == "assistant"
    with pytest.raises(ConfigError, match="add_response_schema"):
        parse_response(family_tokenizer("qwen2.5"), [5])


def test_schemas_survive_saving(tmp_path):
    tokenizer = reader("llama3")
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again.response_template == tokenizer.response_template


def test_templates_that_cannot_be_read_back(make_tokenizer):
    """An answer that comes back with something added is no answer."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
        "{{ m['content'] + '.' }}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    with pytest.raises(ConfigError, match=r"'Zanswerz\.<\|im_end\|>', as it writes .* was read"):
        add_response_schema(tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_and_prefixes(family):
    tokenizer = family_tokenizer(family)
    assert supports_tool_calling(tokenizer) == (family in TOOLS)
    # Qwen3 writes an empty thinking block for a call only while it is the last message.
    assert is_chat_template_prefix_preserving(tokenizer) == (family in TOOLS and family != "qwen3")
    derived = get_training_chat_template(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer, derived) == (family in TOOLS)
    assert is_chat_template_stop_token_trained(tokenizer, derived) == (family != "glm4")


def test_arguments_as_text(make_tokenizer):
    """A template that only takes arguments as JSON text supports tools too."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] + c['function']['arguments'] }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    )
    assert supports_tool_calling(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    assert not supports_tool_calling(tokenizer)
