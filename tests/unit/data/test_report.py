"""The report: counts, examples and quantiles, and what it says of each.

Counts are added in two parts, since a stream adds to its report while it is read.
"""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from preftune.data.report import REASONS, REMEDIES, DataReport, Outcome


def add(report, rows, outcomes, cut=0, moved=0, unended=False, lengths=5):
    n = len(rows)
    notes = {"_outcome": np.array(outcomes)}
    for column, value in (("_cut", cut), ("_moved", moved), ("_unended", unended)):
        notes[column] = np.full(n, value)
    report.add(rows, notes, {"input_ids": np.full(n, lengths)})


def test_counts_add_up_and_examples_are_the_first():
    report = DataReport("train")
    add(report, [0, 1, 2], [0, 1, 1], cut=3)
    add(report, [3, 4, 5, 6], [1, 1, 5, 0], moved=1, unended=True, lengths=7)
    assert (report.rows_in, report.rows_out, report.rows_dropped) == (7, 2, 5)
    assert report.dropped[Outcome.IDENTICAL].rows == [1, 2, 3]
    assert report.dropped[Outcome.IDENTICAL].count == 4
    assert (report.cut.count, report.cut_tokens) == (1, 3)  # tokens of dropped rows are not "cut"
    assert str(report).split(". ") == [
        "train: 7 rows read, 2 kept",
        "Dropped: 4 (rows 1, 2, 3, ...) with chosen equal to rejected; 1 (row 5) with an answer that fills max_length "
        "(keep_end leaves no prompt)",
        "Cut to max_length: 1 (row 0), 3 tokens lost (20.0%)",
        "In 1 (row 6) the prompt alone is not how prompt + answer begins (the template or a token merge differs): "
        "there the answer starts at the last token that they share",
        "In 1 (row 6) the answer ends with no end-of-sequence token, so a tuned model may not know where to stop: "
        "eos_token should be what the chat template ends a turn with",
        "input_ids: median 5, 90 % up to 7, longest 7 tokens.",
    ]
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_every_reason_has_words():
    assert set(REASONS) == set(REMEDIES) == set(Outcome) - {Outcome.KEPT}


def test_empty_prompts_are_told():
    report = DataReport("eval")
    notes = {"_outcome": np.zeros(2), "_cut": np.zeros(2), "_moved": np.zeros(2), "_unended": np.zeros(2)}
    report.add([0, 1], notes, {"prompt_ids": np.array([0, 3])})
    assert "1 kept rows have an empty prompt" in str(report)


@given(st.lists(st.integers(0, 9), min_size=1), st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]))
def test_quantiles(lengths, share):
    report = DataReport("train")
    for length in lengths:
        add(report, [0], [0], lengths=length)
    wanted = next(x for x in sorted(lengths) if sum(y <= x for y in lengths) >= share * len(lengths))
    assert report.quantile("input_ids", share) == wanted
    assert report.quantile("labels", share) == 0
