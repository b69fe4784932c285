"""How an option is declared, and how a wrong value of it is refused: type, choices, range, nearest name.

Torch-free and free of transformers, so that the command line can check values before it pays for those imports.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from preftune.errors import ConfigError

FUNCTION_PATH = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
_PLAIN = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str", dict: "dict"}
_LISTS = {"list": None, "list[str]": str, "list[int]": int, "list[float]": float, "list[dict]": dict}


def option(
    default: Any,
    help: str,  # noqa: A002 - the word of argparse and transformers
    *,
    choices: Iterable[str] | None = None,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    paths: bool = False,
) -> Any:
    """A dataclass field with its one help text and the values it may take.

    Args:
        default: The default; a list or dict is copied for each instance.
        help: What `--help`, the docs and the editor show.
        choices: The words allowed; for a list, of each item.
        low: Smallest number allowed.
        above: A bound that is itself not allowed.
        high: Largest number allowed.
        paths: Also allow `"package.module:function"` beside the choices.
    """
    allowed = list(choices) if choices is not None else None
    rules = {"choices": allowed, "low": low, "above": above, "high": high, "paths": paths or None}
    metadata = {"help": help, **{rule: value for rule, value in rules.items() if value is not None}}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def with_default(config: type, name: str, default: Any) -> Any:
    """The option `name` of a config class with another default, for a subclass; its text and rules stay."""
    declared = next(f for f in dataclasses.fields(config) if f.name == name)
    return dataclasses.field(default=default, metadata=declared.metadata)


def did_you_mean(wrong: str, allowed: Iterable[str], form: Callable[[str], str] = repr) -> str:
    """`"; did you mean 'sigmoid'?"` for the nearest allowed name, or `""` where none is near."""
    names = list(allowed)
    folded = {name.lower().replace("-", "_"): name for name in names}
    close = difflib.get_close_matches(wrong.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return f"; did you mean {form(folded[close[0]])}?" if close else ""


def kinds_of(annotation: Any) -> list[str]:
    """The kinds of value that an annotation allows: none, bool, int, float, str, dict, dict[str], list[...]."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return list(dict.fromkeys(kind for part in parts for kind in kinds_of(part)))
    if origin is typing.Literal:
        return list(dict.fromkeys(_PLAIN[type(part)] for part in parts))
    if annotation in _PLAIN:
        return [_PLAIN[annotation]]
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ["str"]
    if origin is list or annotation is list:
        (item,) = kinds_of(parts[0]) if parts else ("any",)
        return [f"list[{item}]" if f"list[{item}]" in _LISTS else "list"]
    if origin is dict:
        return ["dict[str]"] if parts[1] is str else ["dict"]
    # A settings object of another library is written as a mapping; what else there may be is not ours to judge.
    return ["dict"] if dataclasses.is_dataclass(annotation) else ["any"]


def choices_of(annotation: Any, metadata: Mapping[str, Any]) -> list[str] | None:
    """The words that an option may take: those declared, or those of an enumeration or `Literal`."""
    if "choices" in metadata:
        return list(metadata["choices"])
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, enum.Enum):
            return [member.value for member in part]
        if typing.get_origin(part) is typing.Literal and isinstance(typing.get_args(part)[0], str):
            return list(typing.get_args(part))
    return None


def check_word(name: str, word: str, choices: Iterable[str], paths: bool = False) -> None:
    """Refuse a word that is none of `choices` (nor, with `paths`, a `"package.module:function"`)."""
    allowed = list(choices)
    if word in allowed or (paths and FUNCTION_PATH.match(word)):
        return
    hint = did_you_mean(word, allowed) or "."
    function = ", or 'package.module:function'" if paths else ""
    raise ConfigError(f"{name}={word!r} is not known{hint} Allowed: {', '.join(allowed)}{function}.")


def check_range(name: str, value: float, metadata: Mapping[str, Any]) -> None:
    """Refuse a number outside of the range declared in `metadata` (low, above, high)."""
    low, above, high = metadata.get("low"), metadata.get("above"), metadata.get("high")
    wanted = [f"at least {low}"] if low is not None else []
    wanted += [f"more than {above}"] if above is not None else []
    wanted += [f"at most {high}"] if high is not None else []
    inside = (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)
    if math.isnan(value) or not inside:
        raise ConfigError(f"{name}={value!r} is out of range: it must be {' and '.join(wanted) or 'a number'}.")


def conform(name: str, value: Any, kinds: Iterable[str]) -> Any:
    """The value as one of `kinds` (3.0 is the integer 3, 1 is true, a tuple is a list), or a `ConfigError`.

    Objects that are none of Python's plain types are passed through: their own class vouches for them.
    """
    allowed = list(kinds)
    simple = {kind.partition("[")[0] for kind in allowed}
    if "any" in simple or not isinstance(value, (type(None), bool, int, float, str, list, tuple, dict)):
        return value
    if isinstance(value, (list, tuple)) and "list" in simple:
        return _conform_list(name, list(value), [kind for kind in allowed if kind.startswith("list")])
    if isinstance(value, bool):
        matches = "bool" in simple
    elif isinstance(value, (int, float)):
        if not isinstance(value, int) and value.is_integer() and not simple & {"float", "str"}:
            value = int(value)
        if value in (0, 1) and not simple & {"int", "float"}:
            return bool(value) if "bool" in simple else _refuse(name, value, allowed)
        matches = "float" in simple or (isinstance(value, int) and "int" in simple)
    else:
        matches = _PLAIN.get(type(value), "str" if isinstance(value, str) else "list") in simple
        if isinstance(value, dict) and "dict" not in allowed:
            matches = matches and all(isinstance(item, str) for item in value.values())
    return value if matches else _refuse(name, value, allowed)


def _conform_list(name: str, items: list[Any], kinds: list[str]) -> list[Any]:
    wanted = _LISTS[kinds[0]]
    if wanted is float:
        items = [float(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in items]
    plain = (type(None), bool, int, float, str, list, tuple, dict)
    for item in items:
        if wanted is not None and isinstance(item, plain) and not isinstance(item, wanted):
            _refuse(name, items, kinds)
    return items


def _refuse(name: str, value: Any, kinds: Iterable[str]) -> typing.NoReturn:
    raise ConfigError(f"{name}={value!r} is of type {type(value).__name__}; it takes {spell_kinds(kinds)}.")


def spell_kinds(kinds: Iterable[str]) -> str:
    """The kinds in words, for messages and help."""
    words = {
        "none": "none",
        "bool": "true or false",
        "int": "an integer",
        "float": "a number",
        "str": "text",
        "dict": "a mapping",
        "dict[str]": "a mapping of text to text",
        "list": "a list",
        "list[str]": "a list of texts",
        "list[int]": "a list of integers",
        "list[float]": "a list of numbers",
        "list[dict]": "a list of mappings",
        "any": "anything",
    }
    return " or ".join(words[kind] for kind in sorted(kinds, key=lambda kind: kind == "none"))


def check_fields(config: Any) -> None:
    """Check every field of a dataclass instance by its annotation and metadata; small conversions are stored.

    Fields that transformers documents as flag-or-text (`nargs`) are left to it: their annotations do not say all.
    """
    annotations = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        if not field.init or "nargs" in field.metadata:
            continue
        value = conform(field.name, vars(config)[field.name], kinds_of(annotations[field.name]))
        setattr(config, field.name, value)
        check_value(field.name, value, choices_of(annotations[field.name], field.metadata), field.metadata)


def check_value(name: str, value: Any, choices: list[str] | None, metadata: Mapping[str, Any]) -> None:
    """Choices and range of one value (of each item, for a list)."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and choices is not None:
            word = item.value if isinstance(item, enum.Enum) else item
            check_word(name, word, choices, metadata.get("paths", False))
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            check_range(name, item, metadata)
