"""Batches: which tokens a tree scores, that documents do not see one another, and that padding never matters.

Trees are written out by hand for rows of a few tokens.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from preftune.data.collate import PreferenceCollator, SFTCollator, UnpairedCollator
from preftune.data.packing import pack_dataset
from preftune.data.tokenize import prepare_preference
from preftune.types import PromptTree

PAIR = {"prompt_ids": [11, 12], "chosen_ids": [21, 22, 23], "rejected_ids": [31]}
OTHER = {"prompt_ids": [13], "chosen_ids": [24], "rejected_ids": [32, 33]}


def tree_of(batch) -> PromptTree:
    assert next(iter(batch)) == "row_lengths"
    return batch["tree"]


def test_preference_batch():
    batch = PreferenceCollator()([PAIR, OTHER])
    tree = tree_of(batch)
    assert batch["row_lengths"].tolist() == [6, 4]
    assert tree.layout == ((2, (3, 1)), (1, (1, 2)))
    assert tree.input_ids.tolist() == [11, 12, 21, 22, 23, 31, 13, 24, 32, 33]
    assert tree.target_ids.tolist() == [21, 22, 23, 31, 24, 32, 33]
    assert tree.branch_index.tolist() == [0, 0, 0, 1, 2, 3, 3]
    # Each first token of an answer is predicted by the end of its prompt.
    assert tree.input_ids[tree.predict_index].tolist() == [12, 21, 22, 12, 13, 13, 32]
    assert set(batch) == {"row_lengths", "tree"}


def test_columns_of_numbers_come_along():
    rows = [{**PAIR, "ref_chosen_logps": -1.5, "w": 2, "source": "web"}, {**OTHER, "ref_chosen_logps": -2.5, "w": 3}]
    batch = PreferenceCollator()(rows)
    assert batch["ref_chosen_logps"].tolist() == [-1.5, -2.5]
    assert batch["w"].dtype == torch.float32
    assert batch["w"].tolist() == [2.0, 3.0]
    assert "source" not in batch
    sft = SFTCollator()([{"input_ids": [1, 2], "labels": [1, 2], "w": 0.5}])
    assert sft["w"].tolist() == [0.5]


def test_prepared_rows_can_be_collated(tokenizer, preference_rows):
    prepared = prepare_preference(Dataset.from_list(preference_rows["messages"]), tokenizer).dataset
    tree = tree_of(PreferenceCollator()([prepared[n] for n in range(3)]))
    texts = [
        tokenizer.decode(tree.target_ids[tree.branch_index == branch].tolist()) for branch in range(tree.num_branches)
    ]
    wanted = [row[side][0]["content"] for row in preference_rows["messages"][:3] for side in ("chosen", "rejected")]
    assert texts == [text + "<|im_end|>\n" for text in wanted]


def test_sft_batch():
    """Prompt 3, answer 2: two tokens are scored, predicted by the last of the prompt and the first of the answer."""
    rows = [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, 4, 5]}, {"input_ids": [6, 7]}]
    batch = SFTCollator()(rows)
    tree = tree_of(batch)
    assert batch["row_lengths"].tolist() == [5, 2]
    assert tree.layout == ((0, (5,)), (0, (2,)))
    assert tree.target_ids.tolist() == [4, 5, 7]
    assert tree.input_ids[tree.predict_index].tolist() == [3, 4, 6]


def test_a_packed_row_is_its_documents():
    """Positions start anew, and the last token of a document never predicts the first of the next."""
    rows = {"input_ids": [[1, 2, 3], [4, 5]], "labels": [[1, 2, 3], [4, 5]]}
    (packed,) = pack_dataset(Dataset.from_dict(rows), 5, "bfd")
    together = tree_of(SFTCollator()([packed]))
    assert together.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert together.target_ids.tolist() == [2, 3, 5]
    apart = tree_of(SFTCollator()([{column: rows[column][n] for column in rows} for n in range(2)]))
    for one, other in zip(vars(together).values(), vars(apart).values()):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_wrong_lengths_of_documents():
    with pytest.raises(ValueError, match="seq_lengths sum to 3, and the packed row has 2"):
        SFTCollator()([{"input_ids": [1, 2], "labels": [1, 2], "seq_lengths": [1, 2]}])


def test_unpaired_batch():
    """A mismatched completion of a longer row is cut to what fits after this prompt, and to one token at least."""
    own = {"prompt_ids": [11, 12], "completion_ids": [21, 22], "label": True, "w": 3}
    other = {"prompt_ids": [13, 14, 15], "completion_ids": [23], "label": 0, "w": 4}
    alone = UnpairedCollator()([own, other])
    assert tree_of(alone).layout == ((2, (2,)), (3, (1,)))
    assert alone["label"].tolist() == [True, False] and alone["label"].dtype == torch.bool
    assert alone["w"].tolist() == [3.0, 4.0] and alone["row_lengths"].tolist() == [4, 4]
    rows = [own | {"mismatched_ids": [31, 32, 33]}, other | {"mismatched_ids": [34, 35]}]
    both = UnpairedCollator(max_length=4)(rows)
    assert tree_of(both).layout == ((2, (2, 2)), (3, (1, 1)))
    assert tree_of(both).target_ids.tolist() == [21, 22, 31, 32, 23, 34]
    assert set(both) == {"row_lengths", "tree", "label", "w"}
    assert tree_of(UnpairedCollator(max_length=3)([rows[1]])).layout == ((3, (1, 1)),)
