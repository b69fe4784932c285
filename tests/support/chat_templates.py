"""Chat templates of the structures that published families have, written here, each with its special tokens.

They are short: what matters is where a turn opens and closes, what is asked with, and what is rewritten in history.
"""

from __future__ import annotations

import functools

from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import make_tokenizer

_CHATML_ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_HERMES_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_HERMES_CALLS = """\
{%- for call in message.tool_calls or [] %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
"""
_HERMES_RESULT = """\
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""

QWEN25 = (
    _HERMES_TOOLS
    + """\
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
"""
    + _HERMES_CALLS
    + "{{- '<|im_end|>\\n' }}\n"
    + _HERMES_RESULT
    + "{%- endif %}\n{%- endfor %}\n"
    + _CHATML_ASK
)

# Calls as tags, one for each argument.
QWEN3_CODER = QWEN25.replace(
    _HERMES_CALLS,
    """\
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>' }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<parameter=' + key + '>\\n' }}{{- value if value is string else value | tojson }}{{- '\\n</parameter>' }}
{%- endfor %}
{{- '\\n</function>\\n</tool_call>' }}
{%- endfor %}
""",
)

# Thinking before the last question is dropped; the last turn has an empty block if it has none.
QWEN3 = (
    _HERMES_TOOLS
    + """\
{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages | length - 1) - loop.index0 %}
{%- if ns.searching and message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set ns.searching = false %}{%- set ns.last_query = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content or '' %}
{%- set thought = '' %}
{%- if message.reasoning_content is string %}
{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}
{{- content }}
{%- endif %}
"""
    + _HERMES_CALLS
    + "{{- '<|im_end|>\\n' }}\n"
    + _HERMES_RESULT
    + "{%- endif %}\n{%- endfor %}\n"
    + """\
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)

# One expression for all roles, and a default system message.
SMOLLM = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
Be helpful.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

# Contents trimmed, the system turn always there with a date, one call a turn, results in a role of their own.
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' + system_message }}
{%- if tools is defined and tools %}{{- tools | tojson }}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- else %}
{%- set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim %}
{{- text + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Another name of the role, no system message, alternation enforced.
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""

# EOS at the end of a conversation that asks for nothing.
PHI3 = """\
{% for message in messages %}{{'<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

# No header at all; the system message and the tools stand at the last question, so history is rewritten.
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set questions = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if message.role == 'user' %}
{%- if tools and message == questions[-1] %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- if loop.last and system_message is defined %}
{{- '[INST] ' + system_message + '\\n\\n' + message.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- set out = call.function | tojson %}
{{- out[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": "' + message.content + '", "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""

# Two tokens open a turn and two close an answer; calls stand in a list of their own.
COHERE = """\
{{ bos_token }}{% for message in messages %}\
{% set names = {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'} %}\
{% if message.role == 'tool' %}\
{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>' + message.content + '<|END_TOOL_RESULT|>' }}\
{% else %}{{ '<|START_OF_TURN_TOKEN|>' + names[message.role] }}\
{% if message.role == 'assistant' and message.tool_calls %}\
{{ '<|START_ACTION|>[' }}{% for call in message.tool_calls %}\
{% set f = call.function %}{% set id = loop.index0 | string %}\
{{ {'tool_call_id': id, 'tool_name': f.name, 'parameters': f.arguments} | tojson }}\
{{ ', ' if not loop.last else '' }}{% endfor %}{{ ']<|END_ACTION|>' }}\
{% elif message.role == 'assistant' %}{{ '<|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' }}\
{% else %}{{ message.content }}{% endif %}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

# The prompt opens the thinking, of which history keeps nothing.
DEEPSEEK = """\
{{ bos_token }}{% for message in messages %}\
{% if message.role == 'system' %}{{ message.content }}\
{% elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}\
{% elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}\
{% else %}{% set content = message.content or '' %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content }}\
{% for call in message.tool_calls or [] %}{{ '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}\
{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}\
{{ call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}\
{{ '<｜tool▁calls▁end｜>' if loop.last else '' }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

# Nothing closes a turn but the token that opens the next.
GLM4 = """\
[gMASK]<sop>
{%- if tools %}{{- '<|system|>\\n' + tools | tojson }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if loop.index0 > ns.last and m.reasoning_content %}{{- '\\n<think>' + m.reasoning_content + '</think>' }}
{%- else %}{{- '\\n<think></think>' }}{%- endif %}
{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>' }}
{%- endfor %}
{{- '\\n</tool_call>' }}
{%- endfor %}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# Channels: thinking is a part of its own, kept only for the last turn and in a loop that is not over.
HARMONY = """\
{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}
{%- if messages[0].role in ('system', 'developer') %}
{{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.tool_calls %}
{%- set future = namespace(final=false) %}
{%- for later in messages[loop.index:] %}
{%- if later.role == 'assistant' and not later.tool_calls %}{%- set future.final = true %}{%- endif %}
{%- endfor %}
{%- if message.thinking and not future.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- set last_call.name = call.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- elif message.role == 'tool' %}
{%- if last_call.name is none %}{{- raise_exception('no call before the result') }}{%- endif %}
{{- '<|start|>functions.' + last_call.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content + '<|end|>' }}
{%- elif message.role == 'user' %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# Contents in blocks, the words of the roles plain text.
IDEFICS = """\
<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}\
{% if message['content'][0]['type'] == 'image' %}\
{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}\
{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

LLAVA = """\
{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}\
{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

# Template, special tokens beside the shared ones, and other added tokens.
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "qwen2.5": (QWEN25, (), ("<tool_call>", "</tool_call>")),
    "qwen3-coder": (QWEN3_CODER, (), ("<tool_call>", "</tool_call>")),
    "qwen3": (QWEN3, (), ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    "smollm": (SMOLLM, (), ()),
    "llama3": (LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), ()),
    "gemma": (GEMMA, ("<start_of_turn>", "<end_of_turn>"), ()),
    "phi3": (PHI3, ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), ()),
    "mistral": (MISTRAL, ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"), ()),
    "cohere": (
        COHERE,
        (
            *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>"),
            *("<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        ),
        (),
    ),
    "deepseek": (DEEPSEEK, ("<｜User｜>", "<｜Assistant｜>"), ("<think>", "</think>", "<｜tool▁call▁end｜>")),
    "glm4": (
        GLM4,
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "harmony": (
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        (),
    ),
    "idefics": (IDEFICS, ("<end_of_utterance>",), ("<image>",)),
    "llava": (LLAVA, (), ("<image>",)),
}
BLOCKS = ("idefics", "llava")
NO_SYSTEM = ("gemma",)
TOOLS = ("qwen2.5", "qwen3-coder", "qwen3", "llama3", "mistral", "cohere", "deepseek", "glm4", "harmony")


@functools.cache
def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the template and the tokens of `family`, shared by all tests: do not change it."""
    template, specials, added = FAMILIES[family]
    tokenizer = make_tokenizer("no_template")
    tokenizer.add_tokens([*specials], special_tokens=True)
    tokenizer.add_tokens([*added])
    tokenizer.chat_template = template
    return tokenizer
