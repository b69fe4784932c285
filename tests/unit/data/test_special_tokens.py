"""What holds for every text and every tokenizer: one end, one beginning, labels as long as ids, streams begun once.

Ids are checked against the tokenizer's own of the whole text.
"""

from __future__ import annotations

import functools

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from preftune.data.conversations import to_messages
from preftune.data.packing import pack_dataset
from preftune.data.supervised import SupervisedEncoder
from preftune.data.templates import ChatRenderer
from preftune.data.tokenize import TextEncoder, prepare_preference, prepare_sft
from tests.support.tokenizers import make_tokenizer
from tests.unit.data.kinds import texts

shared = functools.cache(make_tokenizer)


def ask(content):
    return {"role": "user", "content": content}


def say(content):
    return {"role": "assistant", "content": content}


@functools.cache
def encoder_of(variant, source="completions", assistant_only=False):
    tokenizer = shared(variant)
    how = (source, None, "keep_start", "text", not assistant_only, assistant_only)
    return SupervisedEncoder(TextEncoder(tokenizer), ChatRenderer(tokenizer), *how)


def encoded(variant, row, **how):
    columns = encoder_of(variant, **how)({key: [value] for key, value in row.items()}, [0])
    return columns["input_ids"][0].tolist(), columns["labels"][0].tolist()


@pytest.mark.parametrize("variant", ["plain", "bos", "pad_is_eos"])
@given(texts, texts.filter(str.strip))
def test_text_has_one_end_and_one_beginning(variant, prompt, completion):
    """R047, R050, R064, R067: ids are those of the text, BOS before it if the tokenizer writes one, EOS behind it."""
    tokenizer = shared(variant)
    ids, labels = encoded(variant, {"prompt": prompt, "completion": completion})
    whole = tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
    bos = [tokenizer.bos_token_id] if variant == "bos" else []
    eos = [] if completion.rstrip().endswith("<eos>") else [tokenizer.eos_token_id]
    assert ids == [*bos, *whole, *eos]
    assert len(labels) == len(ids)
    # what is scored is one run at the end, and says the completion (and what merged with its first letter)
    scored = [label for label in labels if label != -100]
    assert ids[len(ids) - len(scored) :] == scored
    assert labels[: len(ids) - len(scored)] == [-100] * (len(ids) - len(scored))
    assert tokenizer.decode(scored).endswith(completion + "<eos>" * len(eos))


@pytest.mark.parametrize("variant", ["plain", "bos", "no_markers"])
@settings(max_examples=25)
@given(st.lists(st.tuples(texts, texts.filter(str.strip)), min_size=1, max_size=3))
def test_messages_have_one_beginning_and_labels_as_long(variant, turns):
    """R050, R147: a template that writes BOS gets no second one, and every answer is scored up to its end token."""
    tokenizer = shared(variant)
    clean = str.maketrans({"<": "(", ">": ")"})  # no control tokens in what people say
    turns = [tuple(text.translate(clean) for text in turn) for turn in turns]
    messages = [message for question, reply in turns for message in (ask(question), say(reply))]
    ids, labels = encoded(variant, {"messages": messages}, source="messages", assistant_only=True)
    assert len(labels) == len(ids)
    assert ids.count(tokenizer.bos_token_id) == (variant == "bos")
    assert (
        ids == tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    )
    scored = tokenizer.decode([label for label in labels if label != -100])
    assert scored == "".join(reply + "<|im_end|>" for _, reply in turns)


def counted(rows):
    starts = []

    def generate():
        starts.append(1)
        yield from rows

    return IterableDataset.from_generator(generate), starts


@pytest.mark.parametrize("prepare", [prepare_sft, prepare_preference])
def test_a_stream_is_begun_once_before_it_is_read(prepare):
    """P12: looking at columns and the first row does not restart it time and again."""
    stream, starts = counted([{"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}] * 3)
    prepared = prepare(stream, shared("plain")).dataset
    assert len(starts) <= 1
    assert len(list(prepared)) == 3
    assert len(starts) <= 2


def test_shuffled_streams_are_packed_whole():
    """Shuffling before and after packing loses no document, repeats with the seed and changes with it."""

    def packed(seed):
        rows = IterableDataset.from_generator(lambda: ({"input_ids": [n] * (n % 5 + 1)} for n in range(60)))
        rows = pack_dataset(rows.shuffle(seed=seed, buffer_size=20), 8, "bfd", map_kwargs={"batch_size": 20})
        return [row["input_ids"] for row in rows.shuffle(seed=seed + 1, buffer_size=10)]

    one, again, other = packed(0), packed(0), packed(1)
    assert one == again != other
    for rows in (one, other):
        assert sorted(token for row in rows for token in row) == [n for n in range(60) for _ in range(n % 5 + 1)]


def test_arguments_of_other_rows_are_not_written():
    """Arrow gives every call the arguments of all rows; None are no arguments."""
    calls = [
        [{"function": {"name": "f", "arguments": {"a": 1}}}],
        [{"function": {"name": "g", "arguments": {"b": {"c": "x"}}}}],
    ]
    rows = Dataset.from_list([{"messages": [ask("q"), {**say(""), "tool_calls": call}]} for call in calls])
    assert rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    for row, call in zip(rows, calls):
        assert to_messages(row["messages"], 0, "messages") == [ask("q"), {**say(""), "tool_calls": call}]


def test_thinking_survives():
    """A turn's thinking, under either name, is written by a template that writes thinking."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.reasoning_content %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer()
    for key in ("reasoning_content", "thinking"):
        rows = Dataset.from_list([{"messages": [ask("q"), {**say("a"), key: "hm"}, ask("r"), say("b")]}])
        (row,) = prepare_sft(rows, tokenizer, assistant_only_loss=True, chat_template=template).dataset
        scored = [label for label in row["labels"] if label != -100]
        assert tokenizer.decode(scored) == "<think>hm</think>a<|im_end|>b<|im_end|>"
