"""Turns words of a command line, or values of a YAML file, into typed option values.

`none` and `null` mean None, except for options that take a text, where they are words (`--report_to none`).
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from preftune.cli.options import Option
from preftune.configs.fields import check_value, conform, did_you_mean, spell_kinds
from preftune.errors import ConfigError

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_NONE = ("none", "null")


def from_words(words: list[str], option: Option) -> Any:
    """The value that the words after `--option` give."""
    if not words:
        if not option.flag:
            raise ConfigError(f"{option.name} needs a value: {_takes(option)}.")
        value: Any = True
    elif len(words) == 1:
        value = _from_word(words[0], option)
    else:
        value = _from_several(words, option)
    return _checked(value, option)


def from_yaml(value: Any, option: Option) -> Any:
    """The value that a YAML file gives, where `1e-5` and quoted numbers are text and `no` is false."""
    if isinstance(value, str):
        return _checked(_from_word(value, option), option)
    if isinstance(value, list):
        return _checked(_from_items(value, option), option)
    if isinstance(value, bool) and option.takes("str") and not option.takes("bool") and not option.flag:
        return _checked(_word_of_bool(value, option), option)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not option.takes("int", "float", "bool"):
        value = str(value)
    if not isinstance(value, (type(None), bool, int, float, str, dict)):  # YAML also makes dates
        raise ConfigError(f"{option.name}={value} is of type {type(value).__name__}; write it in quotes.")
    return _checked(value, option)


def _checked(value: Any, option: Option) -> Any:
    if value is True and option.flag:
        return value
    value = conform(option.name, value, option.kinds)
    check_value(option.name, value, list(option.choices) if option.choices else None, option.rules)
    return value


def _from_word(word: str, option: Option) -> Any:
    lower = word.lower()
    if lower in _NONE and option.takes("none") and not _keeps_none_as_word(option):
        return None
    if option.takes("bool") and lower in _TRUE + _FALSE:
        return lower in _TRUE
    if option.takes("int", "float"):
        number = _number(word)
        if number is not None:
            return number
    if option.takes("dict", "list") and word[:1] in "{[":
        value = _from_json(word, option)
        return value if option.takes("dict") or isinstance(value, list) else [value]
    if option.takes("dict") and _is_pair(word) and not (option.takes("str") and "/" in word.partition("=")[0]):
        return _from_pairs([word], option)
    if option.takes("str", "any"):
        return word
    if option.takes("list"):
        return [_item(word, option)]
    return _refuse(repr(word), option)


def _from_several(words: list[str], option: Option) -> Any:
    if option.takes("list"):
        return [_item(word, option) for word in words]
    if option.takes("dict"):
        return _from_pairs(words, option)
    raise ConfigError(f"{option.name} takes one value, and {len(words)} were given: {' '.join(words)}.")


def _from_items(items: list[Any], option: Option) -> list[Any]:
    if not option.takes("list", "any"):
        _refuse(repr(items), option)
    return [_item(item, option) if isinstance(item, str) else item for item in items]


def _item(word: str, option: Option) -> Any:
    """One entry of a list, as text, number or mapping."""
    kind = next(kind for kind in (*option.kinds, "list[str]") if kind.startswith("list"))
    if kind == "list[dict]":
        return _from_json(word, option)
    if kind not in ("list[int]", "list[float]"):
        return word
    number = _number(word)
    if number is None or (kind == "list[int]" and not isinstance(number, int)):
        _refuse(repr(word), option)
    return number


def _from_pairs(words: list[str], option: Option) -> dict[str, Any]:
    pairs = {}
    for word in words:
        if not _is_pair(word):
            raise ConfigError(
                f"{option.name}: {word!r} is not of the form key=value. Write pairs, or one JSON mapping."
            )
        key, _, value = word.partition("=")
        pairs[key] = value if "dict[str]" in option.kinds else _scalar(value)
    return pairs


def _is_pair(word: str) -> bool:
    return word.partition("=")[0].strip() != "" and "=" in word


def _scalar(word: str) -> Any:
    """The value in `key=value`: JSON where it is JSON (numbers, true, null, lists), else text."""
    lower = word.lower()
    if lower in ("true", "false", *_NONE):
        return {"true": True, "false": False}.get(lower)
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word


def _from_json(word: str, option: Option) -> Any:
    try:
        return json.loads(word)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option.name}={word!r} is not JSON: {error}.") from error


def _number(word: str) -> int | float | None:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def _keeps_none_as_word(option: Option) -> bool:
    return option.takes("str") and not option.takes("dict", "int", "float", "bool")


def _word_of_bool(value: bool, option: Option) -> str:
    """YAML reads a bare no, off, yes or on as a truth value; give the word back where it is a choice."""
    for word in ("no", "off") if value is False else ("yes", "on"):
        if option.choices and word in option.choices:
            return word
    raise ConfigError(f"{option.name} takes {_takes(option)}, and YAML reads this word as {value}; write it in quotes.")


def _takes(option: Option) -> str:
    return f"one of {', '.join(option.choices)}" if option.choices else spell_kinds(option.kinds)


def _refuse(given: str, option: Option) -> NoReturn:
    hint = did_you_mean(given.strip("'"), ("true", "false")) if option.kinds[0] == "bool" else ""
    raise ConfigError(f"{option.name}={given} is not {spell_kinds(option.kinds)}{hint or '.'}")
