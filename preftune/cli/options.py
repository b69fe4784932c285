"""The options of a command: read from generated files, or from a dataclass.

The files in `help_text/` spare the command line seconds of imports; a test proves them equal to the dataclasses, and
`python -m preftune.cli.generate` writes them anew.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from preftune.configs.fields import choices_of, kinds_of

# Options of every command that belong to no config class.
GENERAL = {
    "config": "A YAML file with options, written name: value. The command line beats it.",
    "traceback": "Show the Python traceback of an error (also: PREFTUNE_TRACEBACK=1).",
    "help": "Show this text; with a word, only the options that have it in their name or text.",
}


@dataclass(frozen=True)
class Option:
    """One option: its name, what it takes and its help text.

    Attributes:
        name: The field's name; `--name` on the command line.
        owner: The dataclass it is passed to.
        group: The dataclass that introduced it, under which help lists it.
        kinds: What it takes, in the words of `preftune.configs.fields.kinds_of`.
        default: Its default as JSON has it.
        help: Its one help text.
        choices: The words allowed, or None.
        rules: Range and other rules of `preftune.configs.fields.option`.
        flag: May stand alone, meaning true.
    """

    name: str
    owner: str
    group: str
    kinds: tuple[str, ...]
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    rules: dict[str, Any] = dataclasses.field(default_factory=dict)
    flag: bool = False

    def takes(self, *kinds: str) -> bool:
        """Whether any of `kinds` is among this option's; "list" stands for lists of anything."""
        mine = {*self.kinds, *(kind.partition("[")[0] for kind in self.kinds)}
        return not mine.isdisjoint(kinds)


def options_of(cls: type) -> list[Option]:
    """The options of a dataclass, in the order of its fields."""
    annotations = typing.get_type_hints(cls)
    return [_describe(field, cls, annotations[field.name]) for field in dataclasses.fields(cls) if field.init]


def _describe(field: dataclasses.Field, cls: type, annotation: Any) -> Option:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    choices = choices_of(annotation, field.metadata)
    kinds = kinds_of(annotation)
    return Option(
        name=field.name,
        owner=cls.__name__,
        group=_introduced_by(field.name, cls),
        kinds=tuple(kinds),
        default=None if default is dataclasses.MISSING else default,
        help=str(field.metadata.get("help", "")).replace("%%", "%"),
        choices=tuple(choices) if choices is not None else None,
        rules={rule: field.metadata[rule] for rule in ("low", "above", "high", "paths") if rule in field.metadata},
        flag="bool" in kinds or field.metadata.get("const") is True,
    )


def _introduced_by(name: str, cls: type) -> str:
    for ancestor in reversed(cls.__mro__):
        if name in vars(ancestor).get("__annotations__", {}):
            return ancestor.__name__
    return cls.__name__


def to_json(option: Option) -> dict[str, Any]:
    """The option as a small mapping: what is empty or told by the file is left out."""
    values = {"name": option.name, "group": option.group, "kinds": list(option.kinds), "default": option.default}
    optional = {"choices": list(option.choices or ()), "rules": option.rules, "flag": option.flag}
    return {**values, **{key: value for key, value in optional.items() if value}, "help": option.help}


def from_json(values: dict[str, Any], owner: str) -> Option:
    """The inverse of `to_json`."""
    rest = {**values, "kinds": tuple(values["kinds"])}
    if "choices" in values:
        rest["choices"] = tuple(values["choices"])
    return Option(owner=owner, **rest)


@cache
def read_file(name: str) -> dict[str, Any]:
    """A generated file: `{"class", "extends", "transformers", "options"}`."""
    return json.loads(files("preftune.cli").joinpath("help_text", f"{name}.json").read_text(encoding="utf-8"))


def load_class(name: str) -> list[Option]:
    """The options of one config class from its generated file, and those of the file it extends."""
    content = read_file(name)
    options = {}
    if content["extends"]:
        options = {
            inherited.name: dataclasses.replace(inherited, owner=name) for inherited in load_class(content["extends"])
        }
    options |= {values["name"]: from_json(values, name) for values in content["options"]}
    return list(options.values())


def load_options(names: Iterable[str]) -> dict[str, Option]:
    """The options of several config classes by name, as generated."""
    return by_name(option for name in names for option in load_class(name))


def by_name(options: Iterable[Option]) -> dict[str, Option]:
    """Options by name.

    Raises:
        ValueError: Two dataclasses of one command share a name, so that a value could not be given to one of them.
    """
    table: dict[str, Option] = {}
    for option in options:
        if option.name in table:
            raise ValueError(f"option {option.name!r} is in both {table[option.name].owner} and {option.owner}")
        table[option.name] = option
    return table
