"""Rounds of prompts for online training: one item a micro-step, the prompts of a round with its first.

The order is a function of (seed, epoch) alone, so that a run resumed in any epoch, or within a round, goes on as it
would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset as TorchIterableDataset

from preftune.data.samplers import epoch_order
from preftune.errors import DataFormatError

Row = dict[str, Any]


@dataclass(frozen=True)
class MicroStep:
    """What the dataloader yields for one micro-step.

    Attributes:
        epoch: The pass over the data.
        round: Number of the round in its epoch.
        step: Number of the micro-step in its round, 0 up.
        rows: The prompts of the round, at its first micro-step; none at the others, which use what was drawn then.
    """

    epoch: int
    round: int
    step: int
    rows: tuple[Row, ...] = ()


class RoundSampler(Sampler):
    """Micro-steps of an epoch as `[(epoch, round, step, row numbers)]`; rows left over after whole rounds are not used.

    Shuffled anew every epoch, so that it is not always the same rows. A batch sampler with batches of one key, because
    transformers tells the epoch of a resumed run to the batch sampler alone.
    """

    def __init__(self, rows: int, round_prompts: int, steps_per_round: int, seed: int, shuffle: bool) -> None:
        self.rows = rows
        self.round_prompts = round_prompts
        self.steps_per_round = steps_per_round
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    @property
    def rounds(self) -> int:
        return self.rows // self.round_prompts

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[tuple[int, int, int, Sequence[int]]]]:
        order = epoch_order(self.rows, self.seed, self.epoch, self.shuffle)
        for number in range(self.rounds):
            of_round = order[number * self.round_prompts : (number + 1) * self.round_prompts]
            for step in range(self.steps_per_round):
                yield [(self.epoch, number, step, () if step else of_round)]

    def __len__(self) -> int:
        return self.rounds * self.steps_per_round


class _RoundRows(TorchDataset):
    def __init__(self, rows: Dataset) -> None:
        self.rows = rows

    def __getitem__(self, key: tuple[int, int, int, Sequence[int]]) -> MicroStep:
        epoch, number, step, rows = key
        return MicroStep(epoch, number, step, tuple(self.rows[i] for i in rows))

    def __len__(self) -> int:
        return len(self.rows)


class _RoundStream(TorchIterableDataset):
    """The same from a stream, which a fixed buffer shuffles; an incomplete last round is not used."""

    def __init__(self, rows: IterableDataset, round_prompts: int, steps_per_round: int) -> None:
        self.rows = rows
        self.round_prompts = round_prompts
        self.steps_per_round = steps_per_round
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[MicroStep]:
        waiting: list[Row] = []
        number = 0
        for row in self.rows:
            waiting.append(row)
            if len(waiting) == self.round_prompts:
                for step in range(self.steps_per_round):
                    yield MicroStep(self.epoch, number, step, () if step else tuple(waiting))
                waiting, number = [], number + 1
        if number == 0:
            raise too_few_rows(len(waiting), self.round_prompts, "stream of training rows gave")


class RoundLoader(DataLoader):
    """The dataloader of rounds: every rank reads every round, and works on its own part of it."""

    def set_epoch(self, epoch: int) -> None:
        (self.dataset if isinstance(self.dataset, _RoundStream) else self.batch_sampler).set_epoch(epoch)  # pyright: ignore


def round_loader(
    rows: Dataset | IterableDataset,
    *,
    round_prompts: int,
    steps_per_round: int,
    seed: int,
    shuffle: bool,
    buffer_size: int = 1000,
) -> RoundLoader:
    """A loader of `MicroStep`s.

    Args:
        rows: Prepared rows.
        round_prompts: Distinct prompts of a round, over all ranks.
        steps_per_round: Micro-steps that use a round, all its iterations together.
        buffer_size: Rows that a stream is shuffled among.

    Raises:
        DataFormatError: there are fewer rows than a round takes; of a stream that is known once it has been read.
    """
    if isinstance(rows, IterableDataset):
        if shuffle:
            rows = rows.shuffle(seed=seed, buffer_size=buffer_size)
        return RoundLoader(_RoundStream(rows, round_prompts, steps_per_round), batch_size=1, collate_fn=_only)
    check_rows(len(rows), round_prompts)
    sampler = RoundSampler(len(rows), round_prompts, steps_per_round, seed, shuffle)
    return RoundLoader(_RoundRows(rows), batch_sampler=sampler, collate_fn=_only)


def check_rows(rows: int, round_prompts: int) -> None:
    """Raises a DataFormatError where a set of so many rows makes not one round."""
    if rows < round_prompts:
        raise too_few_rows(rows, round_prompts, "train_dataset has")


def check_learns(items: Sequence[MicroStep], wanted: int) -> None:
    """Raises a DataFormatError where a stream ends before its first optimizer step of `wanted` micro-steps."""
    if items[0].round == items[0].step == 0:
        raise DataFormatError(
            f"a pass over the stream of training rows makes {len(items)} micro-steps and an optimizer step takes "
            f"{wanted}, so nothing would be learned. Bring more rows, or lower gradient_accumulation_steps."
        )


def too_few_rows(rows: int, round_prompts: int, who_has: str) -> DataFormatError:
    """The error of a set, or of a pass over a stream, that makes not one round."""
    return DataFormatError(
        f"{who_has} {rows} usable rows and a generation round takes {round_prompts} distinct prompts, "
        "so not one round can be made. Bring more rows, or lower generation_batch_size, "
        "per_device_train_batch_size or steps_per_generation (prompts of a round = generation_batch_size / "
        "num_generations)."
    )


def _only(items: list[MicroStep]) -> MicroStep:
    return items[0]


class _EvalRows(TorchIterableDataset):
    """Batches of distinct prompts for one rank; a rank that has none left gets the last row again, to keep in step."""

    def __init__(self, rows: Dataset | IterableDataset, prompts: int, rank: int, world: int) -> None:
        self.rows = rows
        self.prompts = prompts
        self.rank = rank
        self.world = world

    def __iter__(self) -> Iterator[dict[str, Any]]:
        together: list[tuple[int, Row]] = []
        for numbered in enumerate(self.rows):
            together.append(numbered)
            if len(together) == self.prompts * self.world:
                yield self._mine(together)
                together = []
        if together:
            yield self._mine(together)

    def _mine(self, together: list[tuple[int, Row]]) -> dict[str, Any]:
        mine = together[self.rank * self.prompts :][: self.prompts]
        kept = mine or together[-1:]
        return {
            "row_lengths": torch.tensor([len(row["prompt_ids"]) for _, row in kept]),
            "rows": [row for _, row in kept],
            "numbers": [number for number, _ in kept],
            "repeated": not mine,
        }

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.prompts * self.world))  # pyright: ignore[reportArgumentType]


def eval_loader(rows: Dataset | IterableDataset, *, prompts: int, rank: int, world: int) -> DataLoader:
    """A loader of `{"rows", "numbers", "repeated"}`, `prompts` rows a batch and rank, in order, every row once."""
    return DataLoader(_EvalRows(rows, prompts, rank, world), batch_size=None)
