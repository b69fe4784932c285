"""Taking the shared prompt out of a pair, and making two rows of one pair.

What is taken apart is always what came in: prompt + side == side.
"""

from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from hypothesis import given
from hypothesis import strategies as st

from preftune.data.formats import (
    extract_prompt,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    unpair_preference_dataset,
)
from preftune.data.pairs import shared_text
from preftune.errors import DataFormatError

words = st.lists(
    st.sampled_from(["a", "b", " ", "<|im_end|>", "<|im_start|>", "<x>", "</s>", "[INST]", "é"]), max_size=8
)
sides = st.tuples(words, words, words).map(lambda p: ("".join(p[0] + p[1]), "".join(p[0] + p[2])))
turns = st.lists(st.sampled_from([("user", "q"), ("assistant", "a"), ("assistant", "b")]), min_size=1, max_size=5).map(
    lambda pairs: [{"role": role, "content": content} for role, content in pairs]
)


def ask(content):
    return {"role": "user", "content": content}


def say(content):
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("chosen", "rejected", "wanted"),
    [
        ("Q: 2+2? 4", "Q: 2+2? 5", ("Q: 2+2?", " 4", " 5")),  # one space goes to the answers
        ("Tea is hot", "Tea is hot and sweet", ("Tea is hot", "", " and sweet")),  # a side that the other begins with
        ("Tea is hot and sweet", "Tea is hot", ("Tea is hot", " and sweet", "")),
        ("Tea", "Tea", ("Tea", "", "")),  # equal sides
        ("a ", "b ", ("", "a ", "b ")),  # the first characters differ: no wraparound to the last space
        (" a", " b", ("", " a", " b")),
        ("hi<|im_end|>", "hi<|im_start|>", ("hi", "<|im_end|>", "<|im_start|>")),  # no token is cut
        ("hi</s>", "hi</t>", ("hi", "</s>", "</t>")),
        ("[INST] a", "[INST] b", ("[INST]", " a", " b")),
        ("[INST] a", "[INSTRUCTION] b", ("", "[INST] a", "[INSTRUCTION] b")),
    ],
)
def test_text_prompts(chosen, rejected, wanted):
    got = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert (got["prompt"], got["chosen"], got["rejected"]) == wanted


def test_special_tokens_of_a_tokenizer_are_not_cut():
    sides = {"chosen": "q ▁▁end a", "rejected": "q ▁▁eos b"}
    assert extract_prompt(sides)["prompt"] == "q ▁▁e"
    assert extract_prompt(sides, ["▁▁end", "▁▁eos"])["prompt"] == "q"


@given(sides)
def test_text_sides_come_back_whole(pair):
    chosen, rejected = pair
    if not chosen or not rejected:
        with pytest.raises(DataFormatError, match="is empty"):
            extract_prompt({"chosen": chosen, "rejected": rejected})
        return
    got = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert got["prompt"] + got["chosen"] == chosen
    assert got["prompt"] + got["rejected"] == rejected


@given(sides)
def test_text_prompt_is_the_longest_that_cuts_no_token(pair):
    """By trying every length: shared, and not strictly inside a token of either side."""
    tokens = ["<|im_end|>", "<|im_start|>", "<x>", "</s>", "[INST]"]
    possible = [0]
    for cut in range(1, min(map(len, pair)) + 1):
        inside = any(
            side[start : start + len(token)] == token and start < cut < start + len(token)
            for side in pair
            for token in tokens
            for start in range(len(side))
        )
        if pair[0][:cut] == pair[1][:cut] and not inside:
            possible.append(cut)
    assert shared_text(*pair) == max(possible)


@given(st.tuples(turns, turns, turns))
def test_message_prompts(parts):
    chosen, rejected = parts[0] + parts[1], parts[0] + parts[2]
    got = extract_prompt({"chosen": chosen, "rejected": rejected})
    prompt = got["prompt"]
    assert prompt + got["chosen"] == chosen
    assert prompt + got["rejected"] == rejected
    if got["chosen"] and got["rejected"]:
        assert got["chosen"][0] != got["rejected"][0]


def test_message_edges():
    whole, longer = [ask("q"), say("a")], [ask("q"), say("a"), ask("r")]
    assert extract_prompt({"chosen": whole, "rejected": longer}) == {
        "prompt": whole,
        "chosen": [],
        "rejected": [ask("r")],
    }
    assert extract_prompt({"chosen": whole, "rejected": whole}) == {"prompt": whole, "chosen": [], "rejected": []}
    assert extract_prompt({"chosen": [say("a")], "rejected": [say("b")]})["prompt"] == []


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ({"chosen": [], "rejected": [say("a")]}, "chosen is empty"),
        ({"chosen": "a", "rejected": ""}, "rejected is empty"),
        ({"chosen": "a", "rejected": [say("a")]}, "chosen is str and rejected is list"),
        ({"chosen": ["a"], "rejected": ["b"]}, "neither text nor a list of messages"),
    ],
)
def test_what_has_no_prompt_is_refused(sides, message):
    with pytest.raises(DataFormatError, match=message):
        extract_prompt(sides)


def test_maybe_extract_prompt():
    texts = {"chosen": "q a", "rejected": "q b", "id": 3}
    assert maybe_extract_prompt(texts) == {"prompt": "q", "chosen": " a", "rejected": " b", "id": 3}
    explicit = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert maybe_extract_prompt(explicit) == explicit
    # The text prompt is what the messages say again.
    whole = {"prompt": "q", "chosen": [ask("q"), say("a")], "rejected": [ask("q"), say("b")]}
    assert maybe_extract_prompt(whole) == {"prompt": [ask("q")], "chosen": [say("a")], "rejected": [say("b")]}
    assert maybe_extract_prompt({"text": "t"}) == {"text": "t"}


ROWS = [{"prompt": f"q{n}", "chosen": f"good{n}", "rejected": f"bad{n}", "id": n} for n in range(3)]
UNPAIRED = [
    {"prompt": f"q{n}", "completion": text, "label": label, "id": n}
    for n in range(3)
    for text, label in ((f"good{n}", True), (f"bad{n}", False))
]


def rows_of(dataset):
    return [dict(row) for row in dataset]


def test_unpair_keeps_pairs_together_and_repeats_other_columns():
    """Two rows a pair, side by side: labels alternate, so that a batch has both."""
    assert rows_of(unpair_preference_dataset(Dataset.from_list(ROWS))) == UNPAIRED
    assert rows_of(unpair_preference_dataset(Dataset.from_list(ROWS), batch_size=2)) == UNPAIRED


def test_unpair_streams_and_dicts():
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    assert rows_of(unpair_preference_dataset(stream)) == UNPAIRED
    for kind, split in ((DatasetDict, Dataset.from_list(ROWS)), (IterableDatasetDict, stream), (dict, stream)):
        unpaired = unpair_preference_dataset(kind({"train": split}))
        assert type(unpaired) is kind
        assert rows_of(unpaired["train"]) == UNPAIRED
        assert rows_of(maybe_unpair_preference_dataset(kind({"train": split}))["train"]) == UNPAIRED


def test_maybe_unpair_leaves_other_rows_alone():
    single = Dataset.from_list(UNPAIRED)
    assert maybe_unpair_preference_dataset(single) is single
