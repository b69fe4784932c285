"""How a template writes an answer, thinking and calls, as a schema by which generated text is read back.

It is read off trial renderings and tried on them, so that a schema exists for templates that nobody has listed.
"""

from __future__ import annotations

import json
import re
from os.path import commonprefix
from typing import Any

from preftune.data.model_templates import derive_training_template, has_generation_markers, turn_marks
from preftune.data.pairs import CONTROL_TOKEN, shared_text
from preftune.data.template_probes import (
    ANSWER,
    FUNCTION,
    KEY,
    KEY2,
    THOUGHT,
    VALUE,
    VALUE2,
    Messages,
    Probe,
    assistant,
    between,
    calling,
    marked_text,
    template_of,
    tokenizer_of,
    user,
)
from preftune.errors import ConfigError

_NAME = r"(?P<name>[^\s<>\"|]+)"
_ARGUMENTS, _OTHERS = {KEY: VALUE, KEY2: VALUE2}, {KEY: VALUE2 + "x", KEY2: "7"}


def derive_response_template(processing_class: Any) -> dict[str, Any]:
    """The `response_template` (of transformers) that reads what the chat template writes.

    Raises:
        ConfigError: it cannot be read back.
    """
    own = template_of(processing_class)
    probe = Probe(processing_class, own)
    header, stops = turn_marks(probe)
    twin = own if has_generation_markers(own) else derive_training_template(processing_class, own)
    turns = _Turns(processing_class, probe, twin, stops)
    content: dict[str, Any] = {"repeats": True, "join": "", "close": stops}
    fields: dict[str, Any] = {"content": content}
    thinking = _thinking(turns.written(assistant(ANSWER, reasoning_content=THOUGHT)), probe, header)
    if thinking is not None:
        fields["reasoning_content"] = thinking
    calls = _calls(turns, thinking["close"] if thinking else None)
    if calls is not None:
        fields["tool_calls"], wrappers = calls
        content["close"] = [*stops, *wrappers]
    opening, closing = between(turns.written(assistant()), ANSWER) or ["", ""]
    opening = opening.rpartition(thinking["close"])[2] if thinking else opening
    if opening.strip():
        ends = CONTROL_TOKEN.findall(closing)[:1]
        content |= {"open": opening.strip().removeprefix(header), "close": [*ends, *stops]}
    template = {
        "defaults": {"role": "assistant"},
        "fields": fields,
        **({"start_anchor": header} if header else {"start_anchor_pattern": r"(?!)"}),
    }
    _try_out(turns, template)
    return template


class _Turns:
    """What the model generates for an assistant's turn, up to the token that ends it."""

    def __init__(self, processing_class: Any, probe: Probe, twin: str, stops: list[str]) -> None:
        self.processing_class, self.probe, self.twin, self.stops = processing_class, probe, twin, stops

    def written(self, turn: dict[str, Any], thought_end: str | None = None) -> str:
        """Its text without the token that ends it (and what stands before `thought_end`); "" if it is refused."""
        messages: Messages = [user(), turn]
        if self.probe.render(messages) is None:
            return ""
        pieces = marked_text(self.processing_class, self.probe.fitted(messages), self.twin)
        text = "".join(generated for _, generated in pieces)
        for stop in self.stops:
            text = text.removesuffix(stop)
        return text.partition(thought_end)[2] if thought_end is not None and thought_end in text else text


def _thinking(written: str, probe: Probe, header: str) -> dict[str, str] | None:
    """What opens and closes thinking, in an answer or only in a prompt; None where the template knows none."""
    around = between(written, THOUGHT, ANSWER)
    if around is not None:
        close = CONTROL_TOKEN.search(around[1])
        return {"open": around[0].strip(), "close": close.group() if close else around[1].strip()}
    # Or the prompt opens what history does not keep: <think>.
    asked = probe.render([user()], add_generation_prompt=True) or ""
    opener = re.fullmatch(r"\s*<(\w+)>\s*", asked[asked.rfind(header) + len(header) :])
    return {"open": f"<{opener[1]}>", "close": f"</{opener[1]}>"} if opener else None


def _calls(turns: _Turns, thought_end: str | None) -> tuple[dict[str, Any], list[str]] | None:
    """How calls are to be read, and the tokens around them that are no content; None where none are written."""
    one = turns.written(calling(_ARGUMENTS), thought_end)
    if not all(word in one for word in (FUNCTION, VALUE, VALUE2)):
        return None
    whole = _json_around(one, FUNCTION)
    if whole is not None:
        return _whole_call(one, *whole, turns.stops), []
    first = one.index(FUNCTION)
    before, behind = one[:first], one[first + len(FUNCTION) :]
    arguments = _arguments(behind)
    if arguments is None:
        return None
    announced, parser, after = arguments
    opening, closing = before, after
    two = turns.written(calling(_ARGUMENTS, _OTHERS), thought_end).replace(FUNCTION, "Zfirstz", 1)
    middle = between(two, "Zfirstz", FUNCTION)
    if middle is not None:  # what stands around both calls alike belongs to a call, the rest to all of them
        opening, closing = _common_end(before, middle[1]), _common_inside(after, middle[1])
    field = {
        "open_pattern": re.escape(opening.strip()) + _NAME + re.escape(announced.rstrip()),
        "close": closing.strip() or turns.stops,
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        **parser,
    }
    around = before.removesuffix(opening) + after.removeprefix(closing)
    return field, list(dict.fromkeys(CONTROL_TOKEN.findall(around)))


def _arguments(text: str) -> tuple[str, dict[str, Any], str] | None:
    """Of the text behind a name: what stands before the arguments, how they are to be read, and what stands after."""
    found = _json_around(text, VALUE)
    if found is not None:
        start, end, _ = found
        return text[:start], {"content": "json"}, text[end:]
    pieces = between(text, KEY, VALUE, KEY2, VALUE2)
    if pieces is None:
        return None
    before, to_value, to_key, _, after = pieces
    opens, shuts = _common_end(before, to_key), to_key[: shared_text(to_key, after)]
    pattern = rf"{re.escape(opens.strip())}(?P<key>.*?){re.escape(to_value.strip())}\s*(?P<value>.*?)\s*"
    # Tags carry no types: text that is JSON counts as such.
    lax = {"name": "json", "args": {"allow_non_json": True}}
    parser = {"tag_pattern": pattern + re.escape(shuts.strip()), "value_parser": lax}
    return before.removesuffix(opens), {"content": "xml-inline", "content_args": parser}, after.removeprefix(shuts)


def _whole_call(one: str, start: int, end: int, value: Any, stops: list[str]) -> dict[str, Any]:
    """How calls are to be read that are JSON with the name in it, each by itself or all in one list."""
    item = value[0] if isinstance(value, list) else value
    name, arguments = _path(item, FUNCTION), _path(item, _ARGUMENTS)
    before, after = one[:start].strip(), one[end:].strip()
    prefix = "" if isinstance(value, list) else "content."
    transform = {"name": f"{{{prefix}{name}}}", "arguments": f"{{{prefix}{arguments}}}"}
    field: dict[str, Any] = {"content": "json", "transform": {"type": "function", "function": transform}}
    field |= {"transform_each": True} if isinstance(value, list) else {"repeats": True}
    if before:
        field["open"] = before
    else:  # nothing announces a call but its own beginning
        field["open_pattern"] = f"(?={re.escape(one[start : one.index(FUNCTION)])})"
    token = CONTROL_TOKEN.match(after)
    field["close"] = [token.group()] if token else ([after] if after else stops)
    return field


def _try_out(turns: _Turns, template: dict[str, Any]) -> None:
    """Reads back what the template writes.

    Raises:
        ConfigError: with the text and what was read.
    """
    tokenizer = tokenizer_of(turns.processing_class)
    trials: list[dict[str, Any]] = [assistant(), assistant(ANSWER, reasoning_content=THOUGHT)]
    trials += [calling(_ARGUMENTS), calling(_ARGUMENTS, _OTHERS), calling(_ARGUMENTS, content=ANSWER)]
    for trial in trials:
        text = turns.written(trial)
        if not text:
            continue
        text += turns.stops[0]
        read: dict[str, Any]
        try:
            read = tokenizer.parse_response(text, schema=template, prefix="")
        except (ValueError, TypeError, KeyError) as error:
            read = {"error": str(error)}
        wanted_content = trial["content"] if trial["content"] in text else ""
        wanted_calls = [call["function"] for call in trial.get("tool_calls", [])]
        # Some templates write the first call only.
        wanted_calls = [call for call in wanted_calls if all(value in text for value in call["arguments"].values())]
        calls = [call["function"] for call in read.get("tool_calls", [])]
        thought = THOUGHT if THOUGHT in text else None
        if (
            (read.get("content") or "") != wanted_content
            or _spoken(calls) != _spoken(wanted_calls)
            or read.get("reasoning_content") != thought
        ):
            raise ConfigError(
                f"no response schema can be derived from the chat template: {text!r}, as it writes {trial}, was read "
                f"as {read}. Set tokenizer.response_template yourself (see transformers' chat_response_parsing)."
            )


def _spoken(calls: list[dict[str, Any]]) -> str:
    """Calls for comparing: a number in quotes and without are one, where a template writes values without quotes."""
    return json.dumps(
        [[c["name"], {key: str(value) for key, value in c["arguments"].items()}] for c in calls], sort_keys=True
    )


def _json_around(text: str, word: str) -> tuple[int, int, Any] | None:
    """The outermost JSON value in `text` that holds `word`: its start, its end and itself."""
    decoder = json.JSONDecoder()
    for place in (found.start() for found in re.finditer(r"[\[{]", text)):
        try:
            value, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            continue
        if word in text[place:end]:
            return place, end, value
    return None


def _path(value: Any, wanted: Any) -> str | None:
    """Where in nested dicts `wanted` stands: `function.name`."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if inner == wanted:
            return key
        deeper = _path(inner, wanted)
        if deeper is not None:
            return f"{key}.{deeper}"
    return None


def _common_end(one: str, other: str) -> str:
    """The longest end that two texts share and that begins inside no token of either."""
    length = len(commonprefix([one[::-1], other[::-1]]))
    for text in (one, other):
        start = len(text) - length
        length -= max((t.end() - start for t in CONTROL_TOKEN.finditer(text) if t.start() < start < t.end()), default=0)
    return one[len(one) - length :]


def _common_inside(closing: str, middle: str) -> str:
    """The longest beginning of `closing` that stands in `middle`, cut inside no token."""
    ends = [found.end() for found in CONTROL_TOKEN.finditer(closing)] or [len(closing)]
    return next((closing[:end] for end in reversed(ends) if closing[:end] in middle), "")
