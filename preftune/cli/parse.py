"""Reads a command line and its YAML file into typed values by config class; the command line beats the file.

No torch here: a wrong name, type, choice or range is refused before anything heavy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preftune.cli.options import GENERAL, Option, by_name, options_of
from preftune.cli.values import from_words, from_yaml
from preftune.configs.fields import did_you_mean
from preftune.errors import ConfigError


@dataclass(frozen=True)
class Given:
    """One option as it stands on the command line.

    Attributes:
        name: Its name, with underscores.
        words: The words after it.
        tokens: Itself and its words, as typed.
        closed: Given as `--name=value`, so that no word may follow.
    """

    name: str
    words: list[str]
    tokens: list[str]
    closed: bool


@dataclass
class Parsed:
    """What the user asked for.

    Attributes:
        values: Typed values of the options given, by name; defaults are not in it.
        owners: The config class of each of them.
        given: The options of the command line, as typed.
        environment: The `env` mapping of the YAML file.
    """

    values: dict[str, Any]
    owners: dict[str, str]
    given: list[Given]
    environment: dict[str, str] = field(default_factory=dict)

    def of(self, owner: str) -> dict[str, Any]:
        """The values that belong to one config class."""
        return {name: value for name, value in self.values.items() if self.owners[name] == owner}

    def tokens_without(self, owner: str) -> list[str]:
        """The command line less the options of one config class."""
        return [token for one in self.given if self.owners.get(one.name) != owner for token in one.tokens]


def parse(tokens: Sequence[str], options: Mapping[str, Option], command: str = "") -> Parsed:
    """Read the command line `tokens`, and the file that `--config` names.

    Args:
        command: What the user typed before the options, for messages: "preftune dpo".

    Raises:
        ConfigError: An unknown option (with the nearest name), or a value of the wrong type, choice or range.
    """
    given = split(tokens)
    typed: dict[str, Any] = {}
    path = None
    for one in given:
        if one.name == "config":
            path = _only_word(one)
        elif one.name != "traceback":
            name, value = _typed(one, options, command)
            typed[name] = value
    from_file, environment = read_yaml(path, options) if path is not None else ({}, {})
    values = {**from_file, **typed}
    return Parsed(values, {name: options[name].owner for name in values}, given, environment)


def split(tokens: Sequence[str]) -> list[Given]:
    """Group the words of a command line by the option that they follow."""
    groups: list[Given] = []
    for token in tokens:
        if token[:2] == "--" and token[2:3].isalpha():
            name, equals, value = token[2:].partition("=")
            groups.append(Given(name.replace("-", "_"), [value] if equals else [], [token], bool(equals)))
        elif not groups or groups[-1].closed:
            raise ConfigError(f"unexpected {token!r}: options are written --name value, --name=value or --flag.")
        else:
            groups[-1].words.append(token)
            groups[-1].tokens.append(token)
    return groups


def _typed(one: Given, options: Mapping[str, Option], command: str) -> tuple[str, Any]:
    if one.name in options:
        return one.name, from_words(one.words, options[one.name])
    positive = one.name.removeprefix("no_")
    if positive != one.name and positive in options and options[positive].takes("bool"):
        if one.words:
            raise ConfigError(f"--{one.name} takes no value, and {' '.join(one.words)!r} follows it.")
        return positive, False
    hint = did_you_mean(one.name, (*options, *GENERAL), "--{}".format) or "."
    raise ConfigError(f"unknown option --{one.name}{hint} See {command or 'the command'} --help.")


def _only_word(one: Given) -> str:
    if len(one.words) != 1 or not one.words[0]:
        raise ConfigError(f"--{one.name} takes one file, and {len(one.words)} were given.")
    return one.words[0]


def read_yaml(path: str, options: Mapping[str, Option]) -> tuple[dict[str, Any], dict[str, str]]:
    """The typed options of a YAML file, and its `env` mapping.

    Raises:
        ConfigError: No such file, no mapping, a key twice, an unknown key (with the nearest name), a wrong value; with
            the line.
    """
    values: dict[str, Any] = {}
    environment: dict[str, str] = {}
    for key, value, line in _entries(path):
        where = f"{path}, line {line}"
        name = key.replace("-", "_") if isinstance(key, str) else str(key)
        if name == "env":
            environment = _environment(value, where)
        elif name not in options:
            hint = did_you_mean(name, options) or "."
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
        else:
            try:
                values[name] = from_yaml(value, options[name])
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
    return values, environment


def _entries(path: str) -> list[tuple[Any, Any, int]]:
    """Key, value and line of each entry at the top of a YAML file."""
    import yaml

    if not Path(path).is_file():
        folder = Path(path).parent
        near = did_you_mean(Path(path).name, [p.name for p in folder.iterdir()] if folder.is_dir() else [])
        raise ConfigError(f"--config {path}: there is no such file{near or '.'}")
    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: it does not consist of lines `name: value`.")
        _refuse_repeats(root, path)
        loader.flatten_mapping(root)
        return [
            (loader.construct_object(key), loader.construct_object(value, deep=True), key.start_mark.line + 1)
            for key, value in root.value
        ]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it is not a text file in UTF-8 ({error}).") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: it is not YAML. {' '.join(str(error).split())}") from error


def _refuse_repeats(node: Any, path: str) -> None:
    """YAML forbids a key twice in one mapping, and PyYAML takes the last without a word."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeats(item, path)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and seen.setdefault(key.value, line) != line and key.value != "<<":
                raise ConfigError(f"{path}, line {line}: {key.value!r} is already set on line {seen[key.value]}.")
            _refuse_repeats(value, path)


def _environment(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, (str, int, float)) for item in value.values()):
        raise ConfigError(f"{where}: env takes a mapping from names of environment variables to their values.")
    return {str(key): str(item) for key, item in value.items()}


class TrlParser:
    """For scripts: `TrlParser((ScriptArguments, DPOConfig)).parse_args_and_config()` gives one instance a dataclass.

    Reads the same command lines and YAML files as `preftune` itself.
    """

    def __init__(self, dataclass_types: Iterable[type] | type) -> None:
        self.dataclass_types = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types)
        self.options = by_name(option for cls in self.dataclass_types for option in options_of(cls))

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """Instances of the dataclasses, from `args` (or the command line) and the file that `--config` names.

        Args:
            args: The words of the command line; None means `sys.argv[1:]`.
            return_remaining_strings: Append the options that no dataclass has, as typed, instead of refusing them.
            fail_with_unknown_args: False ignores such options.

        Raises:
            ConfigError: As `parse`, or what a dataclass refuses.
        """
        import sys

        tokens = list(sys.argv[1:] if args is None else args)
        if any(token in ("--help", "-h") for token in tokens):
            from preftune.cli.help import render

            print(render(Path(sys.argv[0]).name, "", self.options))
            raise SystemExit(0)
        unknown: list[str] = []
        if return_remaining_strings or not fail_with_unknown_args:
            tokens, unknown = self._set_unknown_aside(tokens)
        parsed = parse(tokens, self.options)
        os.environ.update(parsed.environment)
        instances = tuple(cls(**parsed.of(cls.__name__)) for cls in self.dataclass_types)
        return (*instances, unknown) if return_remaining_strings else instances

    def _set_unknown_aside(self, tokens: list[str]) -> tuple[list[str], list[str]]:
        known: list[str] = []
        unknown: list[str] = []
        for one in split(tokens):
            name = one.name.removeprefix("no_")
            belongs = one.name in self.options or name in self.options or one.name in GENERAL
            (known if belongs else unknown).extend(one.tokens)
        return known, unknown
