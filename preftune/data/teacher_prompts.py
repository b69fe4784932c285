"""A teacher's prompts: the question with more in it, the last turn of a conversation filled into a template.

Where it grows too long, what was added loses its beginning; the question is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preftune.data.columns import check_plain, column_names, first_row, missing_column, rename_columns
from preftune.data.conversations import bad_value, is_turn
from preftune.data.encoding import TextEncoder
from preftune.data.mapping import EncodedRow, PreparedData, as_columns, encode_dataset, tokenizer_key
from preftune.data.prompts import PromptEncoder, read_prompt
from preftune.data.report import Outcome
from preftune.data.templates import ChatRenderer
from preftune.errors import DataFormatError

CONTEXT = "privileged_context"
COLUMNS = ("prompt_ids", "teacher_prompt_ids")
_BESIDE = ("tools", "chat_template_kwargs")

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Fitted:
    """Ids of a prompt, and how many tokens of what was added to it were cut."""

    ids: list[int]
    cut: int = 0


def filled(prompt: Prompt, template: str, values: Mapping[str, str], row: int) -> Prompt:
    """The prompt with its text (of messages: that of the last turn, the user's) in `{prompt}` of the template.

    Raises:
        DataFormatError: a conversation that does not end with text of the user's.
    """
    if isinstance(prompt, str):
        return template.format(prompt=prompt, **values)
    last = prompt[-1] if prompt else {}
    if last.get("role") != "user":
        raise bad_value(
            row, "prompt", [turn.get("role") for turn in prompt], "a conversation that ends with the user's turn",
            "The template of the teacher's prompt is applied to that turn: leave out what comes after it.",
        )  # fmt: skip
    return [*prompt[:-1], {**last, "content": template.format(prompt=_content(last["content"], row), **values)}]


def context_text(value: Any, row: int) -> str:
    """A context as text: messages are joined, other values spelt.

    Raises:
        DataFormatError: there is none.
    """
    if value is None:
        raise bad_value(
            row, CONTEXT, value, "what the teacher is told", "Fill it in, or leave such rows out with filter()."
        )
    if isinstance(value, list) and value and all(is_turn(turn) for turn in value):
        return "\n\n".join(str(turn.get("content", turn.get("value")) or "") for turn in value)
    return value if isinstance(value, str) else str(value)


def fitted(
    compose: Callable[[Sequence[str]], list[int]],
    parts: Sequence[str],
    *,
    limit: int | None,
    tokenizer: Any,
    ids: list[int] | None = None,
) -> Fitted | None:
    """`compose(parts)` in at most `limit` tokens; parts lose their beginning for it, the first of them first.

    Args:
        compose: From texts to the ids of a prompt that has them in it.
        ids: `compose(parts)`, where it is known.

    Returns:
        None where not even empty parts make it fit.

    One fact to check: with parts of 10 and 5 tokens and 12 too many, the first is empty and the second has 3.
    """
    texts, ids, cut = list(parts), compose(parts) if ids is None else ids, 0
    if limit is None:
        return Fitted(ids)
    for place, text in enumerate(parts):
        if len(ids) <= limit:
            break
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        kept = len(own)
        while len(ids) > limit and kept:
            kept = max(0, kept - (len(ids) - limit))
            texts[place] = tokenizer.decode(own[len(own) - kept :]) if kept else ""
            ids = compose(texts)
        cut += len(own) - kept
    return Fitted(ids, cut) if len(ids) <= limit else None


@dataclass
class TeacherPrompts:
    """Makes teacher's prompts of single rows: for what is known only when completions are there."""

    encode: PromptEncoder

    @classmethod
    def of(cls, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None) -> TeacherPrompts:
        renderer = ChatRenderer(tokenizer, None, dict(chat_template_kwargs or {}))
        return cls(PromptEncoder(TextEncoder(tokenizer), renderer))

    def fitted(
        self, row: Mapping[str, Any], number: int, fill: Callable[[Prompt, Sequence[str]], Prompt],
        parts: Sequence[str], limit: int | None, ids: list[int] | None = None,
    ) -> Fitted | None:  # fmt: skip
        """The prompt of `row` with `parts` filled into it, as `fitted`."""
        prompt = read_prompt(row["prompt"], number)
        beside = {name: [row[name]] for name in _BESIDE if row.get(name) is not None}

        def compose(texts: Sequence[str]) -> list[int]:
            return self.encode.ids({"prompt": [fill(prompt, texts)], **beside}, [number])[0]

        return fitted(compose, parts, limit=limit, tokenizer=self.encode.encoder.tokenizer, ids=ids)


@dataclass
class ContextEncoder:
    """Encodes batches of rows with a prompt and a context; picklable, so that several processes can."""

    teacher: TeacherPrompts
    template: str
    limit: int | None

    def __call__(self, batch: Mapping[str, list], rows: list[int]) -> dict[str, list]:
        contexts = [context_text(value, row) for value, row in zip(batch[CONTEXT], rows)]
        prompts = [read_prompt(value, row) for value, row in zip(batch["prompt"], rows)]
        taught = [self._fill(prompt, [text], row) for prompt, text, row in zip(prompts, contexts, rows)]
        own_ids = self.teacher.encode.ids(batch, rows)
        teacher_ids = self.teacher.encode.ids({**batch, "prompt": taught}, rows)
        made = []
        for place, (own, ids) in enumerate(zip(own_ids, teacher_ids)):
            row = {name: values[place] for name, values in batch.items()}
            made.append(self._row(row, rows[place], own, ids, contexts[place]))
        return as_columns(made, COLUMNS)

    def _row(self, row: Mapping[str, Any], number: int, own: list[int], ids: list[int], context: str) -> EncodedRow:
        if not own:
            return EncodedRow(((), ()), Outcome.NO_PROMPT)
        if self.limit is not None and len(own) > self.limit:
            return EncodedRow(((), ()), Outcome.QUESTION_FILLS)
        found = self.teacher.fitted(
            row, number, lambda prompt, texts: self._fill(prompt, texts, number), [context], self.limit, ids
        )
        if found is None:
            return EncodedRow(((), ()), Outcome.QUESTION_FILLS)
        return EncodedRow((own, found.ids), cut=found.cut)

    def _fill(self, prompt: Prompt, texts: Sequence[str], row: int) -> Prompt:
        return filled(prompt, self.template, {CONTEXT: texts[0]}, row)


def prepare_contexts(
    dataset: Any,
    tokenizer: Any,
    *,
    template: str,
    max_prompt_length: int | None,
    columns: Mapping[str, str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    keep_columns: Sequence[str] | None = None,
    name: str = "train",
) -> PreparedData:
    """Adds `prompt_ids` and `teacher_prompt_ids` to rows with `prompt` and `privileged_context`.

    Args:
        template: Of the teacher's prompt, with `{prompt}` and `{privileged_context}`.
        max_prompt_length: Of both prompts: contexts are cut to it, rows whose question alone is longer are left out.
        keep_columns: Columns to keep; None keeps all.

    Raises:
        DataFormatError: columns or values that cannot be used, or no usable row.
    """
    check_plain(dataset, name)
    dataset = rename_columns(dataset, columns)
    names = require_columns(dataset, name, ("prompt", CONTEXT), "a row of SDFT")
    options = dict(chat_template_kwargs or {})
    encode = ContextEncoder(TeacherPrompts.of(tokenizer, options), template, max_prompt_length)
    keep = {*(names if keep_columns is None else keep_columns)} & set(names) - set(COLUMNS)
    key = ["contexts", template, max_prompt_length, options, sorted(keep), *tokenizer_key(tokenizer)]
    prepared = encode_dataset(dataset, encode, COLUMNS, key=key, name=name, keep=keep)
    prepared.report.cut_to = "max_prompt_length"
    return prepared


@dataclass
class QuestionEncoder:
    """Encodes batches of prompts that a template can be applied to later; picklable."""

    encode: PromptEncoder
    limit: int | None
    reads_feedback: bool

    def __call__(self, batch: Mapping[str, list], rows: list[int]) -> dict[str, list]:
        for value, row in zip(batch["prompt"], rows):
            filled(read_prompt(value, row), "{prompt}", {}, row)
        for value, row in zip(batch[CONTEXT] if self.reads_feedback else [], rows):
            if value is not None and not isinstance(value, str):
                raise bad_value(row, CONTEXT, value, "text (or nothing, where there is no feedback)")
        return as_columns([self._row(ids) for ids in self.encode.ids(batch, rows)], COLUMNS[:1])

    def _row(self, ids: list[int]) -> EncodedRow:
        if self.limit is not None and len(ids) > self.limit:
            return EncodedRow(((),), Outcome.QUESTION_FILLS)
        return EncodedRow((ids,), Outcome.KEPT if ids else Outcome.NO_PROMPT)


def prepare_questions(
    dataset: Any,
    tokenizer: Any,
    *,
    max_prompt_length: int | None,
    reads_feedback: bool,
    columns: Mapping[str, str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    keep_columns: Sequence[str] | None = None,
    name: str = "train",
) -> PreparedData:
    """Adds `prompt_ids` to rows with a `prompt` whose last turn is the user's.

    Args:
        max_prompt_length: Rows with a longer prompt are left out.
        reads_feedback: Rows have `privileged_context` too, text or nothing.

    Raises:
        DataFormatError: columns or values that cannot be used, or no usable row.
    """
    check_plain(dataset, name)
    dataset = rename_columns(dataset, columns)
    wanted = ("prompt", CONTEXT) if reads_feedback else ("prompt",)
    names = require_columns(dataset, name, wanted, "a row of SDPO")
    options = dict(chat_template_kwargs or {})
    encode = QuestionEncoder(TeacherPrompts.of(tokenizer, options).encode, max_prompt_length, reads_feedback)
    keep = {*(names if keep_columns is None else keep_columns)} & set(names) - set(COLUMNS)
    key = ["questions", max_prompt_length, reads_feedback, options, sorted(keep), *tokenizer_key(tokenizer)]
    return encode_dataset(dataset, encode, COLUMNS[:1], key=key, name=name, keep=keep)


def require_columns(dataset: Any, name: str, wanted: Sequence[str], what: str) -> list[str]:
    """The names of the columns.

    Raises:
        DataFormatError: one of `wanted` is missing, or there is no row.
    """
    first_row(dataset, name)
    names = column_names(dataset)
    missing = [column for column in wanted if column not in names]
    if missing:
        hint = (
            "It holds what the teacher is told and the student is not: a solution, a hint, feedback."
            if CONTEXT in missing
            else ""
        )
        raise missing_column(name, names, missing, what, hint)
    return names


def _content(content: Any, row: int) -> str:
    if not isinstance(content, str):
        raise DataFormatError(
            f"row {row}, column 'prompt': the last turn is a {type(content).__name__}; the template of the teacher's "
            "prompt needs text. Give its content as text."
        )
    return content
