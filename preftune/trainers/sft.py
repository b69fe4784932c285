"""Supervised fine-tuning: the mean negative log-probability of the tokens that the labels keep.

A packed row is a tree of several documents, so that no token ever sees or predicts another document's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from preftune.configs.sft import SFTConfig
from preftune.data.collate import SFTCollator
from preftune.data.multimodal import IMAGE_COLUMNS, has_images
from preftune.data.packing import pack_dataset
from preftune.data.report import DataReport
from preftune.data.supervised import MASKS
from preftune.data.tokenize import prepare_sft
from preftune.errors import ConfigError
from preftune.losses.supervised import TOKEN_LOSSES
from preftune.models.logprobs import token_scores
from preftune.trainers.base import EvalData, RawData
from preftune.trainers.offline import OfflineTrainer
from preftune.trainers.shares import Batch
from preftune.trainers.step import StepTotals
from preftune.types import LossOutput, TokenScores

logger = logging.getLogger(__name__)


class SFTTrainer(OfflineTrainer):
    """Trains a causal language model on text, chats, or prompts with completions.

    Args:
        model: Name or folder of a causal language model, a model, or a PeftModel.
        args: An `SFTConfig`; by default `SFTConfig("{model}-SFT")`.
        train_dataset: Rows with `text`, `messages`, or `prompt` and `completion`; or `input_ids` (and `labels`).
        eval_dataset: The same, or a dict of such sets.
        formatting_func: A function from a row to its text, for data of any other shape.

    With `loss_type="nll"` exp(loss) is the perplexity of the scored tokens.
    """

    args: SFTConfig
    config_class = SFTConfig
    name = "SFT"
    loss_unit = "tokens"
    columns_read: ClassVar[tuple[str, ...]] = ("input_ids", "labels", "seq_lengths", *IMAGE_COLUMNS)

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: SFTConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: RawData | None = None,
        eval_dataset: EvalData | None = None,
        processing_class: Any = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict], str] | None = None,
    ) -> None:
        if compute_loss_func is not None:
            raise ConfigError(
                "compute_loss_func needs logits of every token, which are never computed here. Subclass SFTTrainer and "
                "override loss(scores), which gets the log-probability of every scored token."
            )
        self._formatting_func = formatting_func
        self._has_own_collator = data_collator is not None
        super().__init__(
            model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )

    # The algorithm

    def loss(self, scores: TokenScores) -> LossOutput:
        """One loss per scored token: `-log p` (nll), or `-p log p` with p held constant (dft, arXiv:2508.05629)."""
        return LossOutput(TOKEN_LOSSES[self.args.loss_type](scores.logps))

    def batch_loss(self, model: nn.Module, batch: Batch, totals: StepTotals) -> Tensor:
        scores = token_scores(model, batch["tree"], layout=self.layout, outputs=frozenset({"entropy", "is_top1"}))
        output = self.loss(scores)
        tokens = totals.counts["tokens"].float().clamp(min=1)
        share = output.loss.sum() / tokens
        if scores.aux_loss is not None and self.aux_loss_coef:
            share = share + self.aux_loss_coef * scores.aux_loss * (len(scores.logps) / tokens)
            self.metrics.add("aux_loss", scores.aux_loss)
        assert scores.entropy is not None and scores.is_top1 is not None
        self.metrics.add("entropy", scores.entropy)
        self.metrics.add("mean_token_accuracy", scores.is_top1)
        for name, values in output.metrics.items():
            self.metrics.add(name, values)
        return share

    # Data

    def prepare_dataset(self, dataset: RawData, split: str) -> tuple[RawData, DataReport]:
        args = self.args
        if isinstance(args.dataset_kwargs, dict) and args.dataset_kwargs.get("skip_prepare_dataset"):
            self._check_ready(dataset, split)
            logger.warning(
                "skip_prepare_dataset: %s rows are taken as they are; max_length and packing do not act", split
            )
            return dataset, DataReport(split)
        if {"input_ids", "seq_lengths"} <= set(dataset.column_names or []):
            return dataset, DataReport(split)  # packed already, as `trainer.eval_dataset` may be
        pack = args.packing if split == "train" or args.eval_packing is None else args.eval_packing
        if pack and has_images(dataset):
            raise ConfigError(
                f"packing joins rows of text, and the {split} dataset has images. Set packing=False (and eval_packing)."
            )
        keeps_tails = pack and args.packing_strategy != "bfd"
        prepared = prepare_sft(
            dataset,
            self.tokenizer,
            max_length=None if keeps_tails else args.max_length,
            truncation_mode=args.truncation_mode,
            completion_only_loss=args.completion_only_loss,
            assistant_only_loss=args.assistant_only_loss,
            dataset_text_field=args.dataset_text_field,
            formatting_func=self._formatting_func,
            columns=self.column_map,
            num_proc=args.dataset_num_proc,
            eos_token_ids=self.eos_token_ids,
            keep_columns=self.extra_columns(dataset),
            processor=self.processor,
            name=split,
        )
        rows = prepared.dataset
        if split == "train" and args.shuffle_dataset:
            rows = rows.shuffle(seed=args.seed)
        if pack and args.max_length is not None:
            rows = pack_dataset(rows, args.max_length, args.packing_strategy)
            if split == "train" and args.shuffle_dataset:
                # Packing sorts by length. Another seed: the same permutation twice would not be a random one.
                rows = rows.shuffle(seed=args.seed + 1)
        return rows, prepared.report

    def _check_ready(self, dataset: RawData, split: str) -> None:
        """Rows that are not prepared say what is scored by their labels alone; a mask beside them would be ignored."""
        columns = set(dataset.column_names or [])
        masks = sorted(columns & set(MASKS))
        if masks and "labels" not in columns and not self._has_own_collator:
            raise ConfigError(
                f"skip_prepare_dataset=True takes {split} rows as they are, and they have {masks[0]!r} but no "
                "'labels': every token would be scored. Add a 'labels' column (-100 where a token is not scored), or "
                "leave skip_prepare_dataset out: labels are then made of the mask."
            )

    def default_collator(self) -> SFTCollator:
        return SFTCollator(self.processor)
