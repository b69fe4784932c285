"""What preparation did to a dataset: rows read, kept, cut and dropped, with row numbers to look at.

Each prepared row carries an `Outcome`; a report is only ever a sum over those, so cached rows report the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

MAX_EXAMPLES = 3
QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
# What is noted of every row beside its ids: its outcome, the tokens cut from it, the tokens by which the boundary of
# prompt and answer moved, and whether no end-of-sequence token closes it.
NOTES = {"_outcome": "int8", "_cut": "int32", "_moved": "int32", "_unended": "bool"}


class Outcome(IntEnum):
    """What became of a row. Stored in caches: never renumber, only append."""

    KEPT = 0
    IDENTICAL = 1
    EMPTY_ANSWER = 2
    NO_PROMPT = 3
    PROMPT_FILLS = 4
    ANSWER_FILLS = 5
    NOTHING_SCORED = 6
    OVERLONG = 7
    IMAGE_CUT = 8
    QUESTION_FILLS = 9


REASONS: dict[Outcome, str] = {
    Outcome.IDENTICAL: "chosen equal to rejected",
    Outcome.EMPTY_ANSWER: "an empty answer, or one answer that is the beginning of the other",
    Outcome.NO_PROMPT: "no prompt (in pairs of messages: no first message that both sides share)",
    Outcome.PROMPT_FILLS: "a prompt that fills max_length",
    Outcome.ANSWER_FILLS: "an answer that fills max_length (keep_end leaves no prompt)",
    Outcome.NOTHING_SCORED: "no token to score",
    Outcome.OVERLONG: "more than max_length tokens",
    Outcome.IMAGE_CUT: "an image beyond max_length",
    Outcome.QUESTION_FILLS: "a prompt that fills max_prompt_length, its own or the teacher's without any context",
}
REMEDIES: dict[Outcome, str] = {
    Outcome.IDENTICAL: "A pair of equal answers has no gradient: check how the pairs were made.",
    Outcome.EMPTY_ANSWER: "Give every answer some text.",
    Outcome.NO_PROMPT: "Fill the prompt column; pairs without one must begin both sides with the same messages.",
    Outcome.PROMPT_FILLS: "Raise max_length, or shorten the prompts.",
    Outcome.ANSWER_FILLS: "Raise max_length, or use truncation_mode='keep_start'.",
    Outcome.NOTHING_SCORED: "Check completion_only_loss, assistant_only_loss, labels and max_length.",
    Outcome.OVERLONG: "Raise max_length, or set overlong='cut'.",
    Outcome.IMAGE_CUT: "Raise max_length, or make the images smaller: their tokens count.",
    Outcome.QUESTION_FILLS: "Raise max_prompt_length (none: no limit), or shorten the prompts.",
}


@dataclass
class Tally:
    """A count of rows and the numbers of the first few."""

    count: int = 0
    rows: list[int] = field(default_factory=list)

    def add(self, numbers: np.ndarray) -> None:
        self.count += len(numbers)
        self.rows.extend(int(n) for n in numbers[: MAX_EXAMPLES - len(self.rows)])

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.rows) else ""
        return f"{self.count:,} (row{'s' if self.count != 1 else ''} {', '.join(map(str, self.rows))}{more})"


@dataclass
class DataReport:
    """Sums over the rows of one dataset; a streaming dataset adds to its report while it is read.

    Attributes:
        name: What the dataset is called in messages: "train", "eval", "eval_maths".
        rows_in: Rows read so far.
        rows_out: Rows that can be trained on.
        cut: Kept rows that lost tokens to `max_length` (or the option in `cut_to`).
        cut_tokens: Tokens lost in those rows.
        dropped: Rows left out, by reason.
        moved: Kept rows whose prompt, rendered or tokenized alone, is no prefix of prompt + answer, so that the answer
            begins at the last common token.
        unended: Kept conversational rows with an answer that no end-of-sequence token closes.
        lengths: For each column of ids, how many kept rows have which length.
        streaming: Whether rows are still to come.
    """

    name: str
    rows_in: int = 0
    rows_out: int = 0
    cut: Tally = field(default_factory=Tally)
    cut_tokens: int = 0
    dropped: dict[Outcome, Tally] = field(default_factory=dict)
    moved: Tally = field(default_factory=Tally)
    unended: Tally = field(default_factory=Tally)
    lengths: dict[str, Counter[int]] = field(default_factory=dict)
    streaming: bool = False
    cut_to: str = "max_length"

    def add(
        self, rows: Sequence[int] | np.ndarray, notes: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]
    ) -> None:
        """Adds rows numbered `rows`, with an entry a row in each of `notes` (the columns `NOTES`) and `lengths`."""
        rows = np.asarray(rows)
        outcomes, cut, moved, unended = (notes[note] for note in NOTES)
        kept = outcomes == Outcome.KEPT
        self.rows_in += len(rows)
        self.rows_out += int(kept.sum())
        for reason in REASONS:
            numbers = rows[outcomes == reason]
            if len(numbers):
                self.dropped.setdefault(reason, Tally()).add(numbers)
        self.cut.add(rows[kept & (cut > 0)])
        self.cut_tokens += int(cut[kept].sum())
        self.moved.add(rows[kept & (moved > 0)])
        self.unended.add(rows[kept & unended.astype(bool)])
        for column, values in lengths.items():
            sizes, counts = np.unique(values[kept], return_counts=True)
            self.lengths.setdefault(column, Counter()).update(dict(zip(sizes.tolist(), counts.tolist())))

    @property
    def rows_dropped(self) -> int:
        return self.rows_in - self.rows_out

    @property
    def is_bad_news(self) -> bool:
        """Rows were dropped or cut, or nothing ends an answer, so that the model will not learn to stop."""
        return bool(self.rows_dropped or self.cut.count or self.unended.count)

    def quantile(self, column: str, share: float) -> int:
        """The smallest length that at least `share` of the kept rows do not exceed; 0 without rows."""
        counts = self.lengths.get(column, Counter())
        wanted, seen = share * counts.total(), 0
        for length in sorted(counts):
            seen += counts[length]
            if seen >= wanted:
                return length
        return 0

    def __str__(self) -> str:
        so_far = " so far" if self.streaming else ""
        parts = [f"{self.name}: {self.rows_in:,} rows read{so_far}, {self.rows_out:,} kept."]
        if self.dropped:
            parts.append(f"Dropped: {self._reasons()}.")
        if self.cut.count:
            kept = sum(size * count for counts in self.lengths.values() for size, count in counts.items())
            share = self.cut_tokens / max(1, kept + self.cut_tokens)
            parts.append(f"Cut to {self.cut_to}: {self.cut}, {self.cut_tokens:,} tokens lost ({share:.1%}).")
        if self.moved.count:
            parts.append(
                f"In {self.moved} the prompt alone is not how prompt + answer begins (the template or a token merge "
                "differs): there the answer starts at the last token that they share."
            )
        if self.unended.count:
            parts.append(
                f"In {self.unended} the answer ends with no end-of-sequence token, so a tuned model may not know where "
                "to stop: eos_token should be what the chat template ends a turn with."
            )
        promptless = self.lengths.get("prompt_ids", Counter())[0]
        if promptless:
            parts.append(
                f"{promptless:,} kept rows have an empty prompt: the first token of their answers is not scored."
            )
        for column in self.lengths:
            middle, most, longest = (self.quantile(column, share) for share in (0.5, 0.9, 1.0))
            parts.append(f"{column}: median {middle}, 90 % up to {most}, longest {longest} tokens.")
        return " ".join(parts)

    def nothing_left(self) -> str:
        """The message for a dataset of which no row is left."""
        remedies = " ".join(REMEDIES[reason] for reason in self.dropped)
        return f"none of the {self.rows_in:,} rows of the {self.name} dataset is left: {self._reasons()}. {remedies}"

    def _reasons(self) -> str:
        return "; ".join(f"{tally} with {REASONS[reason]}" for reason, tally in self.dropped.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists for JSON."""
        return {
            "name": self.name,
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "cut": {"count": self.cut.count, "rows": self.cut.rows, "tokens": self.cut_tokens},
            "dropped": {r.name.lower(): {"count": t.count, "rows": t.rows} for r, t in self.dropped.items()},
            "boundary_moved": {"count": self.moved.count, "rows": self.moved.rows},
            "unended": {"count": self.unended.count, "rows": self.unended.rows},
            "lengths": {
                column: {label: self.quantile(column, share) for label, share in QUANTILES.items()}
                for column in self.lengths
            },
            "streaming": self.streaming,
        }
