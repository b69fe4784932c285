"""Options of the trainers that learn from a fixed dataset: lengths, truncation, preparation.

Values that only older libraries knew are accepted with a FutureWarning where their meaning is kept.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from preftune.configs.base import BaseConfig, deprecated
from preftune.configs.fields import option
from preftune.errors import ConfigError

TRUNCATION_MODES = ("keep_start", "keep_end")


@dataclass(repr=False)
class OfflineConfig(BaseConfig):
    """How rows become token ids and batches."""

    max_length: int | None = option(
        1024, "Most tokens of a row, prompt and completion together; longer rows are cut. none: no limit.", low=1
    )
    truncation_mode: str = option(
        "keep_start",
        "Which part of a row longer than max_length is kept (keep_end is deprecated).",
        choices=TRUNCATION_MODES,
    )
    dataset_num_proc: int | None = option(None, "Processes that tokenize a dataset held in memory or on disk.", low=1)
    padding_free: bool = option(
        False, "Accepted for older scripts, without effect: attention_layout decides, and its tree layout never pads."
    )
    pad_to_multiple_of: int | str | None = option(
        "auto",
        "Accepted for scripts that come from TRL and without effect: rows are padded to their longest, or not at all.",
        low=1,
    )
    pad_token: str | None = option(None, "Deprecated: set processing_class.pad_token instead. The padding token.")

    def _normalise(self) -> None:
        super()._normalise()
        if isinstance(self.pad_to_multiple_of, str):
            self.pad_to_multiple_of = padding_multiple(self.pad_to_multiple_of)

    def _check(self) -> None:
        super()._check()
        if self.truncation_mode == "keep_end":
            deprecated(
                "truncation_mode='keep_end'", "it cuts the prompt's beginning; use keep_start or shorten the rows"
            )
        if self.pad_token is not None:
            deprecated("pad_token", "set pad_token on the tokenizer and pass it as processing_class")
        if self.padding_free:
            warnings.warn(
                "padding_free has no effect: the tree layout never pads, and attention_layout='tree' asks for it.",
                stacklevel=2,
            )


def padding_multiple(text: str) -> int | None:
    """The number that `pad_to_multiple_of` gives in words: "auto", "none" or digits."""
    if text == "auto":
        accelerator = torch.accelerator.current_accelerator()
        return 128 if accelerator is not None and accelerator.type == "neuron" else None
    if text.lower() in ("none", "null"):
        return None
    if text.isdecimal():
        return int(text)
    raise ConfigError(f"pad_to_multiple_of={text!r} is not known. Allowed: auto, none or an integer of at least 1.")
