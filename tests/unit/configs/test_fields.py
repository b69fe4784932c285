"""Declaring and checking options: kinds of annotations, choices, ranges, the nearest name, small conversions.

Expected kinds and messages are written out by hand for each annotation.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from preftune.configs.fields import (
    check_fields,
    check_range,
    check_word,
    choices_of,
    conform,
    did_you_mean,
    kinds_of,
    option,
)
from preftune.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Settings:
    size: int = 1


@pytest.mark.parametrize(
    ("annotation", "kinds"),
    [
        (int, ["int"]),
        (int | None, ["int", "none"]),
        (None | str | list[str], ["none", "str", "list[str]"]),
        (list[float] | None, ["list[float]", "none"]),
        (dict[str, Any] | str | None, ["dict", "str", "none"]),
        (dict[str, str], ["dict[str]"]),
        (dict | str, ["dict", "str"]),
        (list[dict], ["list[dict]"]),
        (list[Settings], ["list[dict]"]),
        (Colour | str, ["str"]),
        (list[Colour], ["list[str]"]),
        (str | None | Literal[False], ["str", "none", "bool"]),
        (Settings | None, ["dict", "none"]),
        (Any, ["any"]),
        (tuple[float, float], ["any"]),
    ],
)
def test_kinds_of_annotations(annotation, kinds):
    assert kinds_of(annotation) == kinds


def test_choices_come_from_metadata_enumerations_and_literals():
    assert choices_of(str, {"choices": ("a", "b")}) == ["a", "b"]
    assert choices_of(Colour | str, {}) == ["red"]
    assert choices_of(Literal["x", "y"] | None, {}) == ["x", "y"]
    assert choices_of(str | None | Literal[False], {}) is None


@pytest.mark.parametrize(
    ("value", "kinds", "result"),
    [
        (3, ["float"], 3),
        (3.0, ["int"], 3),
        (3.0, ["float"], 3.0),
        (1, ["bool"], True),
        (0, ["bool"], False),
        (1, ["bool", "int"], 1),
        ((1, 2), ["list[float]"], [1.0, 2.0]),
        (("a",), ["str", "list[str]"], ["a"]),
        (None, ["none", "int"], None),
        ({"a": 1}, ["dict"], {"a": 1}),
        ({"a": "b"}, ["dict[str]"], {"a": "b"}),
        ("a", ["str"], "a"),
    ],
)
def test_conform_accepts(value, kinds, result):
    got = conform("x", value, kinds)
    assert got == result and type(got) is type(result)


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        ("1", ["int"]),
        (True, ["int"]),
        (True, ["float"]),
        (1.5, ["int"]),
        (math.inf, ["int"]),
        (2, ["bool"]),
        (1, ["str"]),
        (None, ["int"]),
        ("a", ["list[str]"]),
        (["a", 1], ["list[str]"]),
        ([True], ["list[float]"]),
        ({"a": 1}, ["dict[str]"]),
        ({}, ["list"]),
        ([], ["dict"]),
        (0, ["none", "str"]),
    ],
)
def test_conform_refuses(value, kinds):
    with pytest.raises(ConfigError, match="^x="):
        conform("x", value, kinds)


def test_objects_of_other_libraries_pass():
    thing = object()
    assert conform("x", thing, ["dict", "none"]) is thing


def test_words_and_nearest_name():
    check_word("loss", "sigmoid", ["sigmoid", "hinge"])
    check_word("loss", "my.module:loss", ["sigmoid"], paths=True)
    with pytest.raises(
        ConfigError, match=r"loss='sigmod' is not known; did you mean 'sigmoid'\? Allowed: sigmoid, hinge\."
    ):
        check_word("loss", "sigmod", ["sigmoid", "hinge"])
    with pytest.raises(ConfigError, match=r"is not known\. Allowed: sigmoid, or 'package.module:function'"):
        check_word("loss", "my.module", ["sigmoid"], paths=True)
    with pytest.raises(ConfigError):
        check_word("loss", "my.module:loss", ["sigmoid"])


def test_nearest_name_ignores_case_and_dashes():
    assert did_you_mean("BFD-Split", ["bfd", "bfd_split"]) == "; did you mean 'bfd_split'?"
    assert did_you_mean("betta", ["beta"], "--{}".format) == "; did you mean --beta?"
    assert did_you_mean("zzz", ["beta"]) == ""


@pytest.mark.parametrize(
    ("value", "rules", "fits"),
    [
        (0, {"low": 0}, True),
        (-1e-9, {"low": 0}, False),
        (0, {"above": 0}, False),
        (1e-9, {"above": 0}, True),
        (1, {"low": 0, "high": 1}, True),
        (1.1, {"low": 0, "high": 1}, False),
        (math.nan, {}, False),
        (math.inf, {}, True),
    ],
)
def test_ranges(value, rules, fits):
    if fits:
        check_range("x", value, rules)
    else:
        with pytest.raises(ConfigError, match="^x="):
            check_range("x", value, rules)


@dataclass
class Example:
    names: list[str] = option(["a"], "Names.", choices=("a", "b"))
    size: int = option(2, "Size.", low=1)
    share: float | None = option(None, "Share.", low=0, high=1)


def test_check_fields_checks_each_item_and_stores_conversions():
    example = Example(names=("a", "b"), size=3.0, share=1)  # type: ignore[arg-type]
    check_fields(example)
    assert example.names == ["a", "b"] and type(example.size) is int
    for wrong in (Example(names=["a", "c"]), Example(size=0), Example(share=2)):
        with pytest.raises(ConfigError):
            check_fields(wrong)


def test_defaults_are_not_shared():
    first, second = Example(), Example()
    first.names.append("b")
    assert second.names == ["a"]
