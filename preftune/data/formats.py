"""Which form a dataset has and what one row of it says: text or messages, pairs or single texts, ids or words.

Columns are judged once, from the names and the first row; values are judged row by row, with the row named.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from preftune.data.columns import meant_column, missing_column, rename_columns
from preftune.data.conversations import (
    bad_value,
    is_conversational,
    is_conversational_from_value,
    maybe_convert_to_chatml,
    says_nothing,
    to_messages,
    without_nulls,
)
from preftune.data.pairs import (
    extract_prompt,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    unpair_preference_dataset,
)
from preftune.data.report import Outcome
from preftune.errors import ConfigError, DataFormatError

__all__ = [
    "PreferenceRow",
    "SupervisedRow",
    "extract_prompt",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "preference_source",
    "read_preference_row",
    "read_supervised_row",
    "rename_columns",
    "supervised_source",
    "unpair_preference_dataset",
]

Turns = list[dict[str, Any]]
PAIR_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
PREFERENCE_COLUMNS = ("prompt", "chosen", "rejected", "conversations", "messages", *TEMPLATE_COLUMNS)
SUPERVISED_COLUMNS = ("prompt", "completion", "messages", "conversations", *TEMPLATE_COLUMNS)

PreferenceSource = Literal["ids", "pairs"]
SupervisedSource = Literal["ids", "formatted", "completions", "messages", "text"]


@dataclass(slots=True)
class PreferenceRow:
    """A pair: prompt, chosen and rejected are all texts or all lists of messages."""

    prompt: Any
    chosen: Any
    rejected: Any
    tools: list[Any] | None
    template_kwargs: dict[str, Any]

    @property
    def is_text(self) -> bool:
        return isinstance(self.prompt, str)


@dataclass(slots=True)
class SupervisedRow:
    """Something to imitate: a text or messages, after a prompt of the same kind or (None) from the beginning."""

    prompt: Any
    completion: Any
    tools: list[Any] | None
    template_kwargs: dict[str, Any]

    @property
    def is_text(self) -> bool:
        return isinstance(self.completion, str)


def preference_source(columns: Collection[str], first: Mapping[str, Any], name: str) -> PreferenceSource:
    """Whether a preference dataset holds token ids or texts and messages.

    Raises:
        DataFormatError: neither; with the columns found, those wanted, and the one that may be meant.
    """
    if set(PAIR_IDS) <= set(columns):
        return "ids"
    missing = [column for column in ("chosen", "rejected") if column not in columns]
    if missing:
        unpaired = {"prompt", "completion", "label"} <= set(columns)
        hint = (
            "For unpaired feedback use KTOTrainer, which takes ['prompt', 'completion', 'label']." if unpaired else ""
        )
        raise missing_column(name, columns, missing, "a preference dataset", hint)
    question = None if {"prompt", "conversations", "messages"} & set(columns) else meant_column("prompt", columns)
    if question is not None and isinstance(first[question], str) and first[question] not in str(first["chosen"]):
        # Without this, two answers that happen to begin alike would make a prompt of their first letters.
        raise DataFormatError(
            f"the {name} dataset has no column 'prompt', and {question!r} of its first row is not part of 'chosen'. If "
            f"{question!r} is the prompt, say columns={{'prompt': {question!r}}} (--columns prompt={question}); if the "
            f"prompt is inside chosen and rejected, remove column {question!r}."
        )
    return "pairs"


def supervised_source(
    columns: Collection[str],
    first: Mapping[str, Any],
    name: str,
    *,
    text_field: str,
    has_formatting_func: bool,
    completion_only_loss: bool | None,
    assistant_only_loss: bool,
) -> SupervisedSource:
    """Where the text of a supervised dataset is to be found; ids win over the formatting function, that over columns.

    Raises:
        DataFormatError: no known column is there.
        ConfigError: `completion_only_loss` or `assistant_only_loss` asks for what such rows do not tell.
    """
    source = _supervised_source(columns, first, name, text_field, has_formatting_func)
    if completion_only_loss and source not in ("completions", "ids"):
        found = f"the {name} dataset has {list(columns)}"
        clash = "formatting_func returns one text" if source == "formatted" else found
        raise ConfigError(
            f"completion_only_loss=True needs rows with 'prompt' and 'completion', and {clash}. Give the rows those "
            "two columns (columns= maps other names), or leave completion_only_loss unset."
        )
    if assistant_only_loss and source != "ids":
        probe = {"completion": first.get("completion")} if source == "completions" else first
        if source in ("formatted", "text") or not _has_messages(probe):
            raise ConfigError(
                f"assistant_only_loss=True needs messages, and the {name} dataset has {list(columns)} with plain text. "
                "Use completion_only_loss with 'prompt' and 'completion', or bring a column 'messages'."
            )
    return source


def _supervised_source(
    columns: Collection[str], first: Mapping[str, Any], name: str, text_field: str, has_formatting_func: bool
) -> SupervisedSource:
    if "input_ids" in columns:
        return "ids"
    if has_formatting_func:
        return "formatted"
    if {"prompt", "completion"} <= set(columns):
        return "completions"
    if "messages" in columns or "conversations" in columns:
        return "messages"
    if text_field in columns:
        return "text" if isinstance(first[text_field], str) else "messages"
    if "prompt" in columns:
        raise missing_column(name, columns, ["completion"], "supervised training on a prompt")
    wanted = f"supervised training (wanted {text_field!r}, or 'messages', or 'prompt' and 'completion')"
    raise missing_column(name, columns, [text_field], wanted, "Another text column: dataset_text_field='its name'.")


def read_preference_row(
    row: Mapping[str, Any], number: int, special_tokens: Collection[str] = (), needs_prompt: bool = True
) -> PreferenceRow | Outcome:
    """The pair in one row, or why the row cannot be used.

    A text prompt before messages is a user's turn, unless the messages begin with the question themselves; a text
    answer after a prompt of messages is an assistant's turn. Messages without a common first one have no prompt, which
    only `needs_prompt=False` allows: the prompt is then `[]`.

    Raises:
        DataFormatError: a value of a wrong type.
    """
    chosen, rejected = (_side(row[side], number, side) for side in ("chosen", "rejected"))
    prompt = _side(row["prompt"], number, "prompt") if row.get("prompt") is not None else None
    if isinstance(prompt, list):
        chosen, rejected = _as_turns(chosen), _as_turns(rejected)
    if isinstance(chosen, str) and isinstance(rejected, str):
        pair = _pair_of_texts(prompt, chosen, rejected, special_tokens)
    elif isinstance(chosen, list) and isinstance(rejected, list):
        pair = _pair_of_messages(row, number, prompt, chosen, rejected)
        if needs_prompt and not isinstance(pair, Outcome) and not pair[0]:
            pair = Outcome.NO_PROMPT
    else:
        raise bad_value(number, "rejected", row["rejected"], f"the form of 'chosen', {type(chosen).__name__}")
    return pair if isinstance(pair, Outcome) else PreferenceRow(*pair, *template_options(row, number))


def read_supervised_row(
    row: Mapping[str, Any], number: int, source: SupervisedSource, text_field: str
) -> SupervisedRow:
    """What one row of a supervised dataset says.

    Raises:
        DataFormatError: a value of a wrong type.
    """
    prompt = None
    if source == "completions":
        prompt, completion = (_side(row[side], number, side) for side in ("prompt", "completion"))
        if isinstance(completion, list) and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, list):
            completion = _as_turns(completion)
    else:
        column = next((c for c in ("messages", "conversations") if row.get(c) is not None), text_field)
        column = column if source == "messages" else text_field
        completion = row.get(column)
        if source == "messages":
            completion = to_messages(completion, number, column)
        elif not isinstance(completion, str):
            raise bad_value(number, column, completion, "text")
    return SupervisedRow(prompt, completion, *template_options(row, number))


def _pair_of_texts(
    prompt: Any, chosen: str, rejected: str, special_tokens: Collection[str]
) -> tuple[Any, str, str] | Outcome:
    if chosen == rejected:
        return Outcome.IDENTICAL
    if prompt is None and chosen and rejected:
        pair = extract_prompt({"chosen": chosen, "rejected": rejected}, special_tokens)
        prompt, chosen, rejected = pair["prompt"], pair["chosen"], pair["rejected"]
    return (prompt, chosen, rejected) if chosen.strip() and rejected.strip() else Outcome.EMPTY_ANSWER


def _pair_of_messages(
    row: Mapping[str, Any], number: int, prompt: Any, chosen: Turns, rejected: Turns
) -> tuple[Turns, Turns, Turns] | Outcome:
    if not chosen or not rejected:
        return Outcome.EMPTY_ANSWER
    answers_only = chosen[0]["role"] not in ("user", "system") and rejected[0]["role"] not in ("user", "system")
    if prompt is None and answers_only:
        column = next((c for c in ("conversations", "messages") if row.get(c) is not None), None)
        prompt = to_messages(row[column], number, column) if column is not None else []
    elif isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if answers_only else None
    if isinstance(prompt, list) and prompt and chosen[: len(prompt)] == rejected[: len(prompt)] == prompt:
        prompt = None  # both sides repeat it, as whole conversations do
    if chosen == rejected:
        return Outcome.IDENTICAL
    if prompt is None:
        pair = extract_prompt({"chosen": chosen, "rejected": rejected})
        prompt, chosen, rejected = pair["prompt"], pair["chosen"], pair["rejected"]
    if says_nothing(chosen) or says_nothing(rejected):
        return Outcome.EMPTY_ANSWER
    return prompt, chosen, rejected


def _side(value: Any, number: int, column: str) -> str | Turns:
    return value if isinstance(value, str) else to_messages(value, number, column)


def _as_turns(answer: str | Turns) -> Turns:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _has_messages(row: Mapping[str, Any]) -> bool:
    row = maybe_convert_to_chatml(row)
    return any(not isinstance(row[c], str) for c in ("messages", "completion") if row.get(c) is not None)


def template_options(row: Mapping[str, Any], number: int) -> tuple[list[Any] | None, dict[str, Any]]:
    tools, options = row.get("tools"), row.get("chat_template_kwargs")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise bad_value(number, "tools", tools, f"a list of JSON schemas, or its JSON text ({error})") from None
    if tools is not None and not isinstance(tools, list):
        raise bad_value(number, "tools", tools, "a list of JSON schemas, or its JSON text")
    if options is not None and not isinstance(options, Mapping):
        raise bad_value(number, "chat_template_kwargs", options, "a dict of options for the chat template")
    given = {key: value for key, value in (options or {}).items() if value is not None}
    return without_nulls(tools) or None, given
