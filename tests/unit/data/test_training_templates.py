"""Derived training templates: what is marked, that nothing else changes, and that tool loops only grow.

What should be marked is written out by hand for each family; random texts then try the same properties.
"""

from __future__ import annotations

import copy

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ProcessorMixin

from preftune.data.model_templates import get_training_chat_template
from preftune.data.template_probes import Probe, assistant, calling, marked_text, tool, user
from preftune.data.templates import ChatRenderer, has_generation_markers, show_mask
from preftune.data.tokenize import prepare_sft
from preftune.errors import ConfigError, DataFormatError
from tests.support.chat_templates import FAMILIES, NO_SYSTEM, TOOLS, family_tokenizer

SYSTEM = {"role": "system", "content": "sys"}
PLAIN = [user("q1"), assistant("a1", reasoning_content="old"), user("q2"), assistant("a2", reasoning_content="hm")]
CALL = calling({"city": "Oslo"}, reasoning_content="look")
CALL["tool_calls"][0]["function"]["name"] = "temp"
LOOP = [user("q"), CALL, tool("3"), assistant("cold", reasoning_content="so")]
IM = "<|im_end|>"

# What the model generates in PLAIN, where thinking before the last question is history.
ANSWERS = {
    "qwen2.5": ["a1" + IM, "a2" + IM],
    "qwen3-coder": ["a1" + IM, "a2" + IM],
    "qwen3": ["a1" + IM, "<think>\nhm\n</think>\n\na2" + IM],
    "smollm": ["a1" + IM, "a2" + IM],
    "llama3": ["a1<|eot_id|>", "a2<|eot_id|>"],
    "gemma": ["a1<end_of_turn>", "a2<end_of_turn>"],
    "phi3": ["a1<|end|>", "a2<|end|>"],
    "mistral": [" a1<eos>", " a2<eos>"],
    "cohere": [f"<|START_RESPONSE|>{a}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>" for a in ("a1", "a2")],
    "deepseek": ["a1<eos>", "a2<eos>"],
    "glm4": ["\n<think></think>\na1<|user|>", "\n<think>hm</think>\na2"],
    "harmony": [
        "<|channel|>final<|message|>a1<|end|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>a2<|return|>",
    ],
    "idefics": [" a1<end_of_utterance>", " a2<end_of_utterance>"],
    "llava": [" a1 <eos>", " a2 <eos>"],
}
# What it generates in LOOP; thinking inside a loop is kept where the template shows it to the model at that time.
_JSON = '<tool_call>\n{"name": "temp", "arguments": {"city": "Oslo"}}\n</tool_call>' + IM
_THOUGHT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
LOOPS = {
    "qwen2.5": [_JSON, "cold" + IM],
    "qwen3-coder": [
        "<tool_call>\n<function=temp>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>" + IM,
        "cold" + IM,
    ],
    "qwen3": ["<think>\nlook\n</think>\n\n\n" + _JSON, "<think>\nso\n</think>\n\ncold" + IM],
    "llama3": ['{"name": "temp", "parameters": {"city": "Oslo"}}<|eot_id|>', "cold<|eot_id|>"],
    "mistral": [
        '[TOOL_CALLS] [{"name": "temp", "arguments": {"city": "Oslo"}, "id": "call00001"}]<eos>',
        " cold<eos>",
    ],
    "cohere": [
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "temp", "parameters": {"city": "Oslo"}}]<|END_ACTION|>'
        "<|END_OF_TURN_TOKEN|>",
        "<|START_RESPONSE|>cold<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>temp\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><eos>',
        "cold<eos>",
    ],
    "glm4": [
        "\n<think>look</think>\n<tool_call>temp\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
        "<|observation|>",
        "\n<think>so</think>\ncold",
    ],
    "harmony": [
        _THOUGHT.format("look") + ' to=functions.temp<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        _THOUGHT.format("so") + "<|channel|>final<|message|>cold<|return|>",
    ],
}


def render(family, messages, template=None, **how):
    return Probe(family_tokenizer(family), template).render(messages, **how)


def marked(family, messages, **how):
    """The texts that are not generated, and those that are."""
    tokenizer = family_tokenizer(family)
    template = ChatRenderer(tokenizer).marked_template()
    pieces = marked_text(tokenizer, Probe(tokenizer).fitted(messages), template, **how)
    return [plain for plain, _ in pieces], [generated for _, generated in pieces if generated]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_is_marked_from_its_prompt_to_its_end(family):
    derived = get_training_chat_template(family_tokenizer(family))
    assert has_generation_markers(derived)
    for messages in (PLAIN, [SYSTEM, *PLAIN]):
        own = render(family, messages)
        if own is None:
            assert family in NO_SYSTEM
            continue
        plain, answers = marked(family, messages)
        assert answers == ANSWERS[family]
        assert render(family, messages, derived) == own == "".join(a + b for a, b in zip(plain, [*answers, ""]))
        for turns in range(1, len(messages) + 1):
            for ask in (False, True):
                how = {"add_generation_prompt": ask}
                assert render(family, messages[:turns], derived, **how) == render(family, messages[:turns], **how)


@pytest.mark.parametrize("family", TOOLS)
def test_calls_are_marked_and_results_are_not(family):
    assert set(LOOPS) == set(TOOLS)
    _, answers = marked(family, LOOP)
    assert answers == LOOPS[family]
    _, again = marked(family, [*PLAIN[:2], *LOOP])
    assert again == [ANSWERS[family][0], *LOOPS[family]]


@pytest.mark.parametrize("family", TOOLS)
def test_tool_loops_only_grow(family):
    """Each step's text is the beginning of the next one's, also where the own template rewrites calls."""
    derived = get_training_chat_template(family_tokenizer(family))
    calls = [calling({"a": "1"}), tool("x"), CALL, tool("y"), assistant("end", reasoning_content="t")]
    messages = [*PLAIN[:2], user("q"), *calls]
    steps = [render(family, messages[:turns], derived) for turns in range(4, len(messages) + 1)]
    for before, after in zip(steps, steps[1:]):
        assert after.startswith(before.rstrip())
    # and it is what the model saw: the own prompt at the first step is where the loop begins
    assert steps[0].startswith(render(family, messages[:3], add_generation_prompt=True)) or family == "deepseek"


def test_loops_that_the_own_template_rewrites():
    """Qwen3 writes an empty thinking block for the last turn only, harmony drops the thinking of a finished loop."""
    loop = [user("q"), calling({"a": "1"}), tool("x"), assistant("end")]
    qwen, ours = (render("qwen3", loop, t) for t in (None, get_training_chat_template(family_tokenizer("qwen3"))))
    empty = "<think>\n\n</think>\n\n"
    assert (qwen.count(empty), ours.count(empty)) == (1, 2)
    harmony, ours = (
        render("harmony", LOOP, t) for t in (None, get_training_chat_template(family_tokenizer("harmony")))
    )
    assert ("look" in harmony, "look" in ours) == (False, True)


@pytest.mark.parametrize("thinks", [True, False])
def test_what_the_prompt_says_itself_is_not_marked(thinks):
    """Without thinking the prompt ends with an empty block, which the model does not generate."""
    plain, answers = marked("qwen3", [user("q1"), assistant("a1"), user("q2"), assistant("a2")], enable_thinking=thinks)
    block = "<think>\n\n</think>\n\n"
    assert answers == ["a1" + IM, (block if thinks else "") + "a2" + IM]
    assert plain[1].endswith("<|im_start|>assistant\n" + ("" if thinks else block))


def test_two_answers_in_a_row_are_two_turns():
    """The second one's header is not generated, though it follows the end of the first at once."""
    plain, answers = marked("deepseek", [user("q"), assistant("a1"), assistant("a2")])
    assert answers == ["a1<eos>", "a2<eos>"]
    assert plain == ["<bos><｜User｜>q<｜Assistant｜>", "<｜Assistant｜>"]
    _, answers = marked("deepseek", [user("q"), assistant("a1")], add_generation_prompt=True)
    assert answers == ["a1<eos>"]


def test_history_that_is_rewritten_without_a_header():
    """Mistral's system message and tools move to the last question, so no prompt of before is a prefix."""
    messages = [SYSTEM, user("a"), assistant("a"), user("c"), assistant("c")]
    tools = [{"type": "function", "function": {"name": "temp"}}]
    plain, answers = marked("mistral", messages, tools=tools)
    assert answers == [" a<eos>", " c<eos>"]
    assert plain[0] == "<bos>[INST] a[/INST]"
    assert plain[1].startswith("[AVAILABLE_TOOLS]") and plain[1].endswith("[INST] c[/INST]")


QUESTIONS, REPLIES = (st.text(alphabet, min_size=1, max_size=8) for alphabet in ("αβγ \n", "жзи \n"))
turns = st.lists(st.tuples(QUESTIONS, REPLIES), min_size=1, max_size=4)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12)
@given(turns, st.booleans())
def test_answers_are_marked_and_nothing_else(family, turns, with_system):
    """Questions are Greek and answers Cyrillic: no Greek is marked, no Cyrillic is not."""
    messages = [message for ask, reply in turns for message in (user(ask), assistant(reply))]
    messages = (
        [{"role": "system", "content": "αβγ"}, *messages] if with_system and family not in NO_SYSTEM else messages
    )
    plain, answers = marked(family, messages)
    assert len(answers) == len(turns)
    assert not set("".join(answers)) & set("αβγ")
    assert not set("".join(plain)) & set("жзи")
    for answer, (_, reply) in zip(answers, turns):
        assert reply.strip() in answer


def test_edited_templates_are_known_all_the_same(make_tokenizer):
    tokenizer = make_tokenizer()
    template, specials, _ = FAMILIES["llama3"]
    tokenizer.add_tokens([*specials], special_tokens=True)
    tokenizer.chat_template = template.replace("26 Jul 2024", "1 Jan 2031").replace("{%- endif %}", "{%- endif %}{# #}")
    assert "[[a1<|eot_id|>]]" in show_mask(tokenizer, [user("q"), assistant("a1")])
    tokenizer.chat_template += "\n\n"
    assert show_mask(tokenizer, [user("q"), assistant("a1")]).endswith("[[a1<|eot_id|>]]\n")


def test_named_templates(make_tokenizer):
    """Rows with tools are written with the template called tool_use, others with the default one."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": FAMILIES["smollm"][0], "tool_use": FAMILIES["qwen2.5"][0]}
    assert get_training_chat_template(tokenizer) == ChatRenderer(tokenizer).marked_template()
    tools = [{"type": "function", "function": {"name": "temp"}}]
    rows = Dataset.from_list([{"messages": LOOP[:2], "tools": tools}, {"messages": PLAIN[:2], "tools": None}])
    prepared = prepare_sft(rows, tokenizer, max_length=None, assistant_only_loss=True).dataset
    scored = [tokenizer.decode([label for label in row["labels"] if label != -100]) for row in prepared]
    assert scored == [_JSON, "a1" + IM]
    assert "Be helpful" in tokenizer.decode(prepared[1]["input_ids"])
    assert "Be helpful" not in tokenizer.decode(prepared[0]["input_ids"])


def test_assistant_only_loss_without_markers(make_tokenizer):
    """R059, R147: the user's template needs no marks, and masks are as long as ids also where rows are cut."""
    tokenizer = make_tokenizer("no_markers")
    rows = [{"messages": PLAIN}, {"messages": [user("q"), assistant("word " * 80)]}]
    prepared = prepare_sft(Dataset.from_list(rows), tokenizer, max_length=64, assistant_only_loss=True)
    first, second = prepared.dataset
    scored = tokenizer.decode([label for label in first["labels"] if label != -100])
    assert scored == f"a1{IM}a2{IM}"
    assert len(second["labels"]) == len(second["input_ids"]) == 64
    assert prepared.report.cut.count == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ loop.index ~ m['content'] }}{% endfor %}", "no special token.*Write eos_token"),
        ("{% for m in messages %}{{ m['role'] }}<eos>{% endfor %}", "does not write a question and its answer"),
        ("{{ raise_exception('no') }}", "does not write a question and its answer, or refuses"),
        (
            "{% for m in messages %}{% if loop.last %}{{ m['content'] }}{% endif %}<eos>{% endfor %}",
            "derived: preftune cannot tell where the template begins",
        ),
    ],
)
def test_templates_of_which_none_can_be_derived(make_tokenizer, template, message):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message):
        get_training_chat_template(tokenizer)


def test_rows_whose_turns_cannot_be_found_are_named(make_tokenizer):
    """No header, and questions that are loud only while they are the last: nothing tells where an answer begins."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ m['content'] | upper if 'loud' in m['content'] and not loop.last else m['content'] }}{% else %}"
        "{{ m['content'] }}<eos>{% endif %}{% endfor %}"
    )
    rows = [{"messages": [user("q"), assistant("a")]}, {"messages": [user("loud"), assistant("a")]}]
    with pytest.raises(DataFormatError, match="row 1: .*begins the assistant turn that is message 1"):
        prepare_sft(Dataset.from_list(rows), tokenizer, assistant_only_loss=True)


def test_a_marked_template_that_leaves_the_end_out(make_tokenizer):
    tokenizer = make_tokenizer()
    inside = "{{- '<|im_end|>' -}}\n{% endgeneration %}"
    assert inside in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(inside, "{% endgeneration %}{{- '<|im_end|>' -}}")
    with pytest.warns(UserWarning, match="will not learn .* to stop"):
        prepare_sft(Dataset.from_list([{"messages": PLAIN}]), tokenizer, assistant_only_loss=True)


class Processor(ProcessorMixin):
    def __init__(self, tokenizer=None, chat_template=None):
        super().__init__(tokenizer, chat_template=chat_template)


def test_processors_with_contents_in_blocks():
    """The template is the processor's, the tokens are its tokenizer's; an image is no part of an answer."""
    tokenizer = copy.deepcopy(family_tokenizer("llava"))
    tokenizer.chat_template = None
    processor = Processor(tokenizer, chat_template=FAMILIES["llava"][0])
    assert get_training_chat_template(processor) == get_training_chat_template(family_tokenizer("llava"))
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a"}]}
    assert show_mask(processor, [question, answer]) == "USER: <image>\nq ASSISTANT:[[ a <eos>]]"
