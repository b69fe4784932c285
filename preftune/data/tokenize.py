"""Datasets to token ids: `prepare_preference` and `prepare_sft`, each with a report of what was cut or dropped.

Both take a `Dataset` or an `IterableDataset` of raw or already tokenized rows, and leave the one given as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from datasets.fingerprint import Hasher

from preftune.data.columns import check_plain, column_names, first_row, rename_columns
from preftune.data.encoding import TextEncoder
from preftune.data.formats import PAIR_IDS, preference_source, supervised_source
from preftune.data.image_texts import image_encoder
from preftune.data.mapping import PreparedData, encode_dataset, tokenizer_key
from preftune.data.preference import PreferenceEncoder
from preftune.data.report import DataReport
from preftune.data.supervised import SUPERVISED_IDS, SupervisedEncoder
from preftune.data.templates import ChatRenderer, is_chat_template_stop_token_trained
from preftune.errors import ConfigError

__all__ = ["DataReport", "PreparedData", "prepare_eval", "prepare_preference", "prepare_sft"]

# Numbers that belong to a row of ids wherever it goes.
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
TRUNCATION_MODES = ("keep_start", "keep_end")


def prepare_preference(
    dataset: Any,
    tokenizer: Any,
    *,
    max_length: int | None = 1024,
    truncation_mode: str = "keep_start",
    columns: Mapping[str, str] | None = None,
    num_proc: int | None = None,
    eos_token_ids: Collection[int] = (),
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    keep_columns: Collection[str] = (),
    processor: Any = None,
    name: str = "train",
) -> PreparedData:
    """Pairs of texts or messages, with or without a prompt column, to `prompt_ids`, `chosen_ids` and `rejected_ids`.

    Text answers end with the EOS token once; messages end as the chat template ends them. Rows that have the three id
    columns are only checked and cut.

    Args:
        max_length: Most tokens of prompt + answer; None never cuts.
        truncation_mode: keep_start cuts answers (a prompt that fills `max_length` drops the row), keep_end the prompt.
        columns: The user's names of columns: `{"prompt": "question"}`.
        eos_token_ids: Ids that end a text besides the tokenizer's own.
        chat_template: Used instead of the tokenizer's.
        chat_template_kwargs: Options of the template for all rows; those of a row win.
        keep_columns: Columns to carry along; `ref_chosen_logps` and `ref_rejected_logps` always are.
        processor: Of a vision-language model, needed for rows with `image` or `images`; its chat template is then used.
        name: What the report calls the dataset.

    Raises:
        DataFormatError: columns or values that cannot be used, or no usable row.
        ConfigError: an option that does not fit.
    """
    dataset = readable(dataset, columns, truncation_mode, name)
    encoder = TextEncoder(tokenizer, eos_token_ids=eos_token_ids)
    options = dict(chat_template_kwargs or {})
    source = preference_source(column_names(dataset), first_row(dataset, name), name)
    images = image_encoder(dataset, processor, max_length, truncation_mode, name)
    if images is not None:
        chat_template = chat_template or images.chat_template
    renderer = ChatRenderer(tokenizer, chat_template, options)
    encode = PreferenceEncoder(encoder, renderer, source, max_length, truncation_mode, images=images)
    key = ["preference", source, max_length, truncation_mode, sorted(encoder.ends), options]
    key += [*tokenizer_key(tokenizer, chat_template), *([images.key] if images is not None else [])]
    keep = {*keep_columns, *REFERENCE_COLUMNS}
    how = {} if images is None else images.how
    return encode_dataset(dataset, encode, PAIR_IDS, key=key, name=name, keep=keep, num_proc=num_proc, **how)


def prepare_sft(
    dataset: Any,
    tokenizer: Any,
    *,
    max_length: int | None = 1024,
    truncation_mode: str = "keep_start",
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    dataset_text_field: str = "text",
    formatting_func: Callable[[dict[str, Any]], str] | None = None,
    eos_token: str | None = None,
    columns: Mapping[str, str] | None = None,
    num_proc: int | None = None,
    eos_token_ids: Collection[int] = (),
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    keep_columns: Collection[str] = (),
    processor: Any = None,
    name: str = "train",
) -> PreparedData:
    """Texts, messages or prompts with completions to `input_ids` and `labels` (-100: not scored).

    Rows that have `input_ids` are only checked and cut; their `labels`, `completion_mask` and `assistant_masks` are
    honoured. For packing that keeps all tokens (bfd_split, wrapped) pass `max_length=None`.

    Args:
        completion_only_loss: Score completions only; None: where the rows have a prompt and a completion.
        assistant_only_loss: Score only what the chat template marks as generated.
        dataset_text_field: The column of plain texts.
        formatting_func: Makes the text of a row; used whatever columns there are, but for ids.
        eos_token: Ends texts instead of the tokenizer's own EOS token.

    The other arguments are those of `prepare_preference`.

    Raises:
        DataFormatError: columns or values that cannot be used, or no usable row.
        ConfigError: an option that does not fit the rows, or a template without markers.
    """
    dataset = readable(dataset, columns, truncation_mode, name)
    encoder = TextEncoder(tokenizer, eos_token, eos_token_ids)
    options = dict(chat_template_kwargs or {})
    source = supervised_source(
        column_names(dataset),
        first_row(dataset, name),
        name,
        text_field=dataset_text_field,
        has_formatting_func=formatting_func is not None,
        completion_only_loss=completion_only_loss,
        assistant_only_loss=assistant_only_loss,
    )
    if formatting_func is not None and source == "ids":
        warnings.warn(f"the {name} dataset is tokenized already, so formatting_func is not used.", stacklevel=2)
    formatting_func = formatting_func if source == "formatted" else None
    completion_only = source == "completions" if completion_only_loss is None else completion_only_loss
    assistant_only = assistant_only_loss and source != "ids"
    images = image_encoder(dataset, processor, max_length, truncation_mode, name)
    if images is not None:
        chat_template = chat_template or images.chat_template
        if assistant_only and images.shows_images:
            raise ConfigError(
                f"assistant_only_loss=True is not supported for rows with images, which the {name} dataset has. Give "
                "the rows 'prompt' and 'completion': then only completions are scored."
            )
    renderer = ChatRenderer(tokenizer, chat_template, options)
    marked = renderer.marked_template() if assistant_only else None
    if marked is not None:
        _check_stop(tokenizer, marked, name)
    encode = SupervisedEncoder(
        encoder,
        renderer,
        source,
        max_length,
        truncation_mode,
        dataset_text_field,
        completion_only,
        assistant_only,
        formatting_func,
        images,
    )
    key = ["sft", source, max_length, truncation_mode, dataset_text_field, completion_only, marked]
    key += [encoder.eos, sorted(encoder.ends), options, Hasher.hash(formatting_func)]
    key += [*tokenizer_key(tokenizer, chat_template), *([images.key] if images is not None else [])]
    keep = {*keep_columns} - {"completion_mask", "assistant_masks"}
    how = {} if images is None else images.how
    return encode_dataset(dataset, encode, SUPERVISED_IDS, key=key, name=name, keep=keep, num_proc=num_proc, **how)


def _check_stop(tokenizer: Any, template: str, name: str) -> None:
    if not is_chat_template_stop_token_trained(tokenizer, template):
        warnings.warn(
            "the token that ends an assistant's turn is not scored, or the chat template writes none after the last "
            f"answer, so the model will not learn from the {name} dataset to stop there. Move {{% endgeneration %}} "
            "behind it, or write it (preftune.data.templates.show_mask shows what is scored).",
            stacklevel=3,
        )


def prepare_eval(
    datasets: Any, prepare: Callable[..., PreparedData], name: str = "eval"
) -> PreparedData | dict[str, PreparedData]:
    """Prepares an evaluation set, or each of a dict of them, with `prepare(dataset, name=...)`.

    The sets of a dict are called `eval_<key>` in reports and errors.
    """
    if isinstance(datasets, Mapping):
        return {key: prepare(dataset, name=f"{name}_{key}") for key, dataset in datasets.items()}
    return prepare(datasets, name=name)


def readable(dataset: Any, columns: Mapping[str, str] | None, truncation_mode: str, name: str) -> Any:
    """`dataset` with the columns' usual names, once it is a plain one.

    Raises:
        DataFormatError: it is no plain dataset, or a column that is to be renamed is not there.
        ConfigError: an unknown truncation mode, or one column under two names.
    """
    check_plain(dataset, name)
    if truncation_mode not in TRUNCATION_MODES:
        raise ConfigError(f"truncation_mode={truncation_mode!r} is not known. Allowed: {', '.join(TRUNCATION_MODES)}.")
    return rename_columns(dataset, columns)
