"""Chat templates: single rows, many conversations at once, and templates derived for training.

Derived templates are tried on templates written like those of known families; the oracle is the template itself.
"""

from __future__ import annotations

import copy
import pathlib

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from preftune.data.templates import (
    Chat,
    ChatRenderer,
    apply_chat_template,
    clone_chat_template,
    get_training_chat_template,
    has_generation_markers,
    maybe_apply_chat_template,
    show_mask,
)
from preftune.data.tokenize import prepare_sft
from preftune.errors import ConfigError, DataFormatError
from tests.support.tokenizers import CHAT_TEMPLATE, CHAT_TEMPLATE_WITH_BOS

HEAD, TURN = "<|im_start|>assistant\n", "<|im_start|>user\nq<|im_end|>\n"


def ask(content):
    return {"role": "user", "content": content}


def say(content):
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"messages": [ask("q"), say("a")]}, {"text": TURN + HEAD + "a<|im_end|>\n"}),
        ({"prompt": [ask("q")]}, {"prompt": TURN + HEAD}),
        ({"prompt": [ask("q"), say("It is")]}, {"prompt": TURN + HEAD + "It is"}),
        (
            {"prompt": [ask("q")], "completion": [say("a")], "label": True},
            {"prompt": TURN + HEAD, "completion": "a<|im_end|>\n", "label": True},
        ),
        (
            {"prompt": [ask("q")], "chosen": [say("a")], "rejected": [say("b")], "id": 7},
            {"prompt": TURN + HEAD, "chosen": "a<|im_end|>\n", "rejected": "b<|im_end|>\n"},
        ),
        (
            {"chosen": [ask("q"), say("a")], "rejected": [ask("q"), say("b")]},
            {"chosen": TURN + HEAD + "a<|im_end|>\n", "rejected": TURN + HEAD + "b<|im_end|>\n"},
        ),
    ],
)
def test_apply_chat_template(tokenizer, row, wanted):
    assert apply_chat_template(row, tokenizer) == wanted
    assert maybe_apply_chat_template(row, tokenizer) == wanted


def test_apply_chat_template_options(tokenizer):
    row = {"prompt": [ask("q")], "chat_template_kwargs": {"enable_thinking": True}}
    thinking = {"prompt": TURN + HEAD + "<think>\n"}
    assert apply_chat_template(row, tokenizer) == thinking
    assert apply_chat_template({"prompt": [ask("q")]}, tokenizer, enable_thinking=True) == thinking
    tools = [{"name": "add"}]
    assert '"add"' in apply_chat_template({"prompt": [ask("q")]}, tokenizer, tools)["prompt"]
    assert apply_chat_template({"prompt": [ask("q")]}, tokenizer, []) == {"prompt": TURN + HEAD}
    assert maybe_apply_chat_template({"prompt": "q", "completion": "a"}, tokenizer) == {
        "prompt": "q",
        "completion": "a",
    }


def test_answers_begin_where_all_renderings_agree(tokenizer):
    """The prompt alone ends with <think>; one answer has it, so that a cut within it would be easy to make."""
    template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.thought %}{{ '<think>' + m.thought }}"
        "{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"
    )
    row = {"prompt": [ask("q")], "chosen": [{**say("A"), "thought": "x"}], "rejected": [say("<thing>B")]}
    got = apply_chat_template(row, tokenizer, chat_template=template)
    start = "<|im_start|>user\nq<|im_end|><|im_start|>assistant\n"
    assert got == {"prompt": start, "chosen": "<think>xA<|im_end|>", "rejected": "<thing>B<|im_end|>"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "t"}, r"the row has columns \['text'\]"),
        ({"prompt": [ask("q")], "messages": [ask("q")]}, "the row has columns"),
        ({"messages": []}, "a list of messages is empty"),
        ({"prompt": [{"role": "system", "content": "s"}]}, "the prompt ends with the role 'system'"),
        ({"prompt": []}, "the prompt ends with the role None"),
    ],
)
def test_rows_that_have_no_rendering(tokenizer, row, message):
    with pytest.raises(DataFormatError, match=message):
        apply_chat_template(row, tokenizer)


def test_equal_options_go_to_the_template_together(tokenizer, monkeypatch):
    calls = []
    plain = type(tokenizer).apply_chat_template

    def counting(self, conversations, **how):
        calls.append(len(conversations))
        return plain(self, conversations, **how)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counting)
    chats = [Chat([ask(str(n))], n, answer_next=n % 2 == 0) for n in range(6)]
    chats += [Chat([ask("t")], 6, tools=[{"name": "f"}]), Chat([ask("u")], 7, tools=[{"name": "f"}])]
    texts = ChatRenderer(tokenizer).render(chats)
    assert sorted(calls) == [2, 3, 3]
    assert texts[:2] == ["<|im_start|>user\n0<|im_end|>\n" + HEAD, "<|im_start|>user\n1<|im_end|>\n"]
    assert texts[7].endswith("<|im_start|>user\nu<|im_end|>\n")
    assert '"f"' in texts[7]


def test_markers():
    assert has_generation_markers("x{%- generation -%}y")
    assert has_generation_markers({"default": "{% generation %}", "tool_use": ""})
    assert not has_generation_markers({"tool_use": "{% generation %}"})
    assert not has_generation_markers("{% generations %} generation")
    assert not has_generation_markers(None)


DIALOGUE = [ask("one "), say(" two\n"), ask("three"), say("four")]


def test_templates_with_markers_need_no_other(tokenizer):
    assert get_training_chat_template(tokenizer) is None


def test_what_a_training_template_is_made_of(make_tokenizer):
    tokenizer = make_tokenizer()
    with pytest.raises(ConfigError, match="has no chat template"):
        get_training_chat_template(make_tokenizer("no_template"))
    with pytest.raises(TypeError, match="give one of them"):
        get_training_chat_template(tokenizer, tokenizer)
    with pytest.raises(TypeError, match="needs a tokenizer"):
        get_training_chat_template()
    with pytest.warns(FutureWarning, match="processing_class="):
        assert get_training_chat_template(tokenizer=make_tokenizer()) is None


def test_show_mask(tokenizer):
    shown = show_mask(tokenizer, [ask("q"), say("a"), ask("r"), say("b")])
    assert shown == f"{TURN}{HEAD}[[a<|im_end|>]]\n" + TURN.replace("q", "r") + f"{HEAD}[[b<|im_end|>]]\n"
    assert (
        show_mask(tokenizer, [ask("q")], enable_thinking=True, add_generation_prompt=True) == TURN + HEAD + "<think>\n"
    )


def test_clone_chat_template(make_tokenizer, tiny_model, tmp_path):
    source = make_tokenizer("bos")
    source.add_tokens(["<call>", "</call>"])
    source.eos_token = "<|im_end|>"
    source.save_pretrained(tmp_path / "source")
    target, model = make_tokenizer("no_template"), copy.deepcopy(tiny_model())
    size = len(target)
    model, target, added = clone_chat_template(model, target, str(tmp_path / "source"), resize_to_multiple_of=8)
    assert target.chat_template == CHAT_TEMPLATE_WITH_BOS
    assert target.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == target.eos_token_id
    assert model.get_input_embeddings().weight.shape[0] == len(target) == size + 8
    assert added == list(range(size, size + 8))
    assert target.convert_ids_to_tokens(added)[:3] == ["<call>", "</call>", "<extra_id_0>"]
    make_tokenizer("no_template").save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match="has no chat template to copy"):
        clone_chat_template(model, target, str(tmp_path / "bare"))


def test_the_template_of_a_real_model():
    """SmolLM2's own, where tools/smollm2.py has put it: markers are derived, and one row's answer is what is scored."""
    folder = pathlib.Path.home() / ".cache" / "smollm2-135m-instruct"
    if not folder.is_dir():
        pytest.skip("SmolLM2 is not on this machine")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    derived = get_training_chat_template(tokenizer)
    rows = Dataset.from_list([{"messages": DIALOGUE}])
    (row,) = prepare_sft(rows, tokenizer, assistant_only_loss=True, chat_template=derived).dataset
    scored = [label for label in row["labels"] if label != -100]
    assert tokenizer.decode(scored) == " two\n<|im_end|>four<|im_end|>"
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(DIALOGUE, tokenize=False)


def test_marked_and_plain_templates_give_the_same_ids(tokenizer):
    rows = Dataset.from_list([{"messages": DIALOGUE}])
    marked = prepare_sft(rows, tokenizer, assistant_only_loss=True, chat_template=CHAT_TEMPLATE).dataset
    plain = prepare_sft(rows, tokenizer).dataset
    assert marked["input_ids"][:] == plain["input_ids"][:]
