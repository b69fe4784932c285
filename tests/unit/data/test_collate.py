"""Batches: which tokens a tree scores, that documents do not see one another, and that padding never matters.

Trees are written out by hand for rows of a few tokens.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from preftune.data.collate import PreferenceCollator, SFTCollator
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
