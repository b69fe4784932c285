"""Options of `SFTTrainer`: supervised fine-tuning on text, messages or prompt-completion rows.

The defaults train on completions only where the rows say which part is the completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from preftune.configs.base import deprecated
from preftune.configs.fields import did_you_mean, option
from preftune.configs.offline import OfflineConfig
from preftune.errors import ConfigError
from preftune.losses.names import TOKEN_LOSS_NAMES

PACKING_STRATEGIES = ("bfd", "bfd_split", "wrapped")
_DATASET_KWARGS = ("skip_prepare_dataset",)


@dataclass(repr=False)
class SFTConfig(OfflineConfig):
    """Supervised fine-tuning."""

    _VALID_DICT_FIELDS = [*OfflineConfig._VALID_DICT_FIELDS, "dataset_kwargs"]
    _OWN_DICT_FIELDS: ClassVar[tuple[str, ...]] = (*OfflineConfig._OWN_DICT_FIELDS, "dataset_kwargs")

    learning_rate: float = option(2e-5, "Peak learning rate of the optimizer.", low=0)
    chat_template_path: str | None = option(
        None, "A Jinja file, or a tokenizer (folder or hub name), whose chat template is used and saved with the model."
    )
    dataset_text_field: str = option("text", "The column of plain-text rows.")
    dataset_kwargs: dict[str, Any] | str | None = option(
        None, "Only skip_prepare_dataset=true: the dataset is ready as it is (input_ids and labels)."
    )
    eos_token: str | None = option(None, "The token that ends a text or turn. Unset: the tokenizer's own.")
    shuffle_dataset: bool = option(False, "Shuffle the training rows before packing (with seed), and the packed rows.")
    packing: bool = option(False, "Join short rows into rows of max_length tokens that do not see one another.")
    packing_strategy: str = option(
        "bfd",
        "How rows are joined: bfd (best fit, long rows cut), bfd_split (best fit, long rows split), wrapped (cut "
        "anywhere).",
        choices=PACKING_STRATEGIES,
    )
    eval_packing: bool | None = option(None, "Also pack the evaluation rows. Unset: as packing.")
    completion_only_loss: bool | None = option(
        None, "Score only completion tokens. Unset: where the rows have a prompt and a completion."
    )
    assistant_only_loss: bool = option(False, "Score only what the assistant says (rows of messages).")
    loss_type: str = option(
        "nll",
        "The loss of a token: nll (cross-entropy) or dft (weighted by its own probability, arXiv:2508.05629).",
        choices=TOKEN_LOSS_NAMES,
    )

    def _normalise(self) -> None:
        super()._normalise()
        if self.loss_type == "chunked_nll":
            deprecated("loss_type='chunked_nll'", "the head is always chunked; use nll")
            self.loss_type = "nll"
        if self.packing_strategy == "bfd-requeue":
            deprecated("packing_strategy='bfd-requeue'", "it is now called bfd_split")
            self.packing_strategy = "bfd_split"

    def _check(self) -> None:
        super()._check()
        if self.max_length is None and (self.packing or self.eval_packing):
            packed = "packing" if self.packing else "eval_packing"
            raise ConfigError(
                f"{packed}=True needs max_length, the length of a packed row, and max_length is None. Set max_length."
            )
        for key in self.dataset_kwargs or {}:
            if key not in _DATASET_KWARGS:
                raise ConfigError(
                    f"dataset_kwargs has {key!r}{did_you_mean(key, _DATASET_KWARGS) or '.'} "
                    f"Allowed: {', '.join(_DATASET_KWARGS)}."
                )
