"""`prepare_reward`: whole sequences of pairs in every form, fitted to a length, and the tree made of them.

The oracle tokenizes one whole text at a time; cuts are written out by hand on short lists of ids.
"""

from __future__ import annotations

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

from preftune.data.report import Outcome
from preftune.data.reward import RewardCollator, fit_pair, prepare_reward, shared_length
from preftune.errors import ConfigError, DataFormatError
from tests.unit.models.scoring_helpers import rows_of


def prepare(rows, tokenizer, **how):
    return prepare_reward(Dataset.from_list(rows), tokenizer, **{"max_length": None, **how})


def whole(tokenizer, value):
    """Ids of a text and EOS, or of a rendered conversation."""
    if isinstance(value, str):
        return [*tokenizer(value, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    text = tokenizer.apply_chat_template(value, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("form", ["text", "messages", "implicit_text", "implicit_messages"])
def test_each_form_gives_the_ids_of_the_whole(tokenizer, preference_rows, form):
    rows = preference_rows[form]
    prepared = prepare(rows, tokenizer)
    assert prepared.dataset.column_names == ["chosen_ids", "rejected_ids"]
    for row, got in zip(rows, prepared.dataset, strict=True):
        prompt = row.get("prompt", "" if isinstance(row["chosen"], str) else [])
        assert got["chosen_ids"] == whole(tokenizer, prompt + row["chosen"])
        assert got["rejected_ids"] == whole(tokenizer, prompt + row["rejected"])
    again = prepare_reward(prepared.dataset, tokenizer)
    assert again.dataset.to_list() == prepared.dataset.to_list()  # prepared rows are left as they are


def test_conversations_need_not_share_their_beginning(tokenizer):
    sides = [[{"role": "user", "content": ask}, {"role": "assistant", "content": "yes"}] for ask in ("a", "b")]
    (row,) = prepare([dict(zip(("chosen", "rejected"), sides))], tokenizer).dataset
    assert [row["chosen_ids"], row["rejected_ids"]] == [whole(tokenizer, side) for side in sides]


def test_rows_of_ids(tokenizer):
    plain = {"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4]}
    split = {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]}
    assert prepare([plain], tokenizer).dataset.to_list() == prepare([split], tokenizer).dataset.to_list() == [plain]
    legacy = {"chosen_input_ids": [1, 2, 3], "rejected_input_ids": [1, 4], "chosen_attention_mask": [1, 1, 1]}
    with pytest.warns(FutureWarning, match="chosen_input_ids.*older library"):
        assert prepare([legacy], tokenizer).dataset.to_list() == [plain]
    with pytest.raises(DataFormatError, match="row 1, column 'rejected_ids'"):
        prepare([plain, {"chosen_ids": [1], "rejected_ids": [-1]}], tokenizer)


def test_margin_is_carried_and_checked(tokenizer, preference_rows):
    rows = [row | {"margin": float(n), "source": "x"} for n, row in enumerate(preference_rows["text"])]
    prepared = prepare(rows, tokenizer).dataset
    assert prepared.column_names == ["margin", "chosen_ids", "rejected_ids"] and prepared["margin"][3] == 3.0
    assert RewardCollator()(prepared.select([1, 2]).to_list())["margin"].tolist() == [1.0, 2.0]
    for wrong in (None, float("nan"), "0.5"):
        bad = [rows[0] | {"margin": wrong}] if isinstance(wrong, str) else [*rows[:2], rows[2] | {"margin": wrong}]
        with pytest.raises(DataFormatError, match=f"row {len(bad) - 1}, column 'margin'.*finite number"):
            prepare(bad, tokenizer)


def test_too_long_is_dropped_and_counted(tokenizer, preference_rows):
    """W16: as many rows are left out as have a side of more than 40 tokens, and the report says so."""
    rows = preference_rows["text"]
    sizes = [max(len(whole(tokenizer, r["prompt"] + r[side])) for side in ("chosen", "rejected")) for r in rows]
    long = [n for n, size in enumerate(sizes) if size > 40]
    assert 0 < len(long) < len(rows)
    prepared = prepare(rows, tokenizer, max_length=40)
    assert len(prepared.dataset) == len(rows) - len(long)
    assert prepared.report.dropped[Outcome.OVERLONG].count == len(long)
    assert "more than max_length tokens" in str(prepared.report)
    with pytest.raises(DataFormatError, match=r"none of the 8 rows.*overlong='cut'"):
        prepare(rows, tokenizer, max_length=2)


CUT = [
    # keep_start judges beginnings; where only the prompt is left, both sides are the same
    ("keep_start", [1, 2, 3, 4], [1, 2, 5], 3, ([1, 2, 3], [1, 2, 5]), Outcome.KEPT),
    ("keep_start", [1, 2, 3, 4], [1, 2, 5], 2, ([1, 2], [1, 2]), Outcome.PROMPT_FILLS),
    # keep_end takes as much of the shared beginning from both sides, and no answer
    ("keep_end", [1, 2, 3, 4], [1, 2, 5], 3, ([2, 3, 4], [2, 5]), Outcome.KEPT),
    ("keep_end", [1, 2, 3, 4], [1, 2, 5], 2, ([1, 2, 3, 4], [1, 2, 5]), Outcome.ANSWER_FILLS),
    ("keep_end", [1, 2], [1, 3], 2, ([1, 2], [1, 3]), Outcome.KEPT),
    ("keep_end", [], [1, 3], 2, ([], [1, 3]), Outcome.EMPTY_ANSWER),
    ("keep_start", [1, 3], [1, 3], 2, ([1, 3], [1, 3]), Outcome.IDENTICAL),
]


@pytest.mark.parametrize(("mode", "chosen", "rejected", "length", "fitted", "outcome"), CUT)
def test_cut(mode, chosen, rejected, length, fitted, outcome):
    assert fit_pair(chosen, rejected, length, "cut", mode) == (fitted, outcome)


def test_what_was_cut_is_reported(tokenizer, preference_rows):
    report = prepare(preference_rows["text"], tokenizer, max_length=40, overlong="cut").report
    assert report.rows_dropped == 0 and report.cut.count > 0 and report.cut_tokens > 0
    with pytest.raises(ConfigError, match="truncation_mode='middle' is not known"):
        prepare(preference_rows["text"], tokenizer, truncation_mode="middle")


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4))
def test_the_tree_holds_both_sides_whole(pairs):
    """Rows of the tree are the sides themselves; what they share is there once, and each keeps a token of its own."""
    batch = RewardCollator()([{"chosen_ids": c, "rejected_ids": r} for c, r in pairs])
    assert rows_of(batch["tree"]) == [side for pair in pairs for side in pair]
    for (shared, branches), (chosen, rejected) in zip(batch["tree"].layout, pairs, strict=True):
        assert shared == shared_length(chosen, rejected) and min(branches) >= 1
        assert shared + 1 == min(len(chosen), len(rejected)) or chosen[shared] != rejected[shared]
    assert batch["row_lengths"].tolist() == [len(c) + len(r) for c, r in pairs] and "margin" not in batch


def test_stream(tokenizer, preference_rows):
    rows = [row | {"margin": 1.0} for row in preference_rows["messages"]]
    prepared = prepare_reward(IterableDataset.from_generator(lambda: iter(rows)), tokenizer)
    assert list(prepared.dataset) == prepare(rows, tokenizer).dataset.to_list()
    assert prepared.report.rows_out == len(rows)
