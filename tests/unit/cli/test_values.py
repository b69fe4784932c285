"""Words of a command line and values of YAML, as typed values: tables written out by hand.

No transformers here: conversion must work before anything heavy is imported.
"""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preftune.cli.options import Option
from preftune.cli.values import from_words, from_yaml
from preftune.errors import ConfigError


def make(*kinds: str, **more) -> Option:
    flag = more.pop("flag", "bool" in kinds)
    return Option(name="x", owner="C", group="C", kinds=kinds, default=None, help="", flag=flag, **more)


@pytest.mark.parametrize(
    ("kinds", "words", "value"),
    [
        (["int"], ["3"], 3),
        (["int"], ["-1"], -1),
        (["int"], ["1e3"], 1000),
        (["int", "none"], ["none"], None),
        (["int", "none"], ["NULL"], None),
        (["float"], ["1e-5"], 1e-5),
        (["float"], ["2"], 2),
        (["bool"], [], True),
        (["bool"], ["false"], False),
        (["bool"], ["No"], False),
        (["bool"], ["1"], True),
        (["bool", "none"], ["none"], None),
        (["str"], ["none"], "none"),
        (["str"], ["3"], "3"),
        (["str", "none"], ["none"], "none"),
        (["none", "str", "list[str]"], ["none"], "none"),
        (["none", "str", "list[str]"], ["wandb", "comet"], ["wandb", "comet"]),
        (["none", "str", "list[str]"], ['["wandb"]'], ["wandb"]),
        (["list[str]", "none"], ["q_proj"], ["q_proj"]),
        (["list[float]", "none"], ["1", "0.5"], [1.0, 0.5]),
        (["list[float]", "none"], ["1"], [1.0]),
        (["list[float]", "none"], ["[1, 0.5]"], [1.0, 0.5]),
        (["list[dict]"], ['{"path": "a"}', '{"path": "b"}'], [{"path": "a"}, {"path": "b"}]),
        (["list[dict]"], ['[{"path": "a"}]'], [{"path": "a"}]),
        (["list[dict]"], ['{"path": "a"}'], [{"path": "a"}]),
        (["dict", "str", "none"], ['{"a": 1}'], {"a": 1}),
        (["dict", "str", "none"], ["a=1", "b=x", "c=true", "d=none"], {"a": 1, "b": "x", "c": True, "d": None}),
        (["dict", "str", "none"], ["settings/a=b.json"], "settings/a=b.json"),
        (["dict", "str", "none"], ["none"], None),
        (["dict[str]", "str", "none"], ["prompt=question", "chosen=3"], {"prompt": "question", "chosen": "3"}),
        (["dict[str]", "none"], ["prompt=a=b"], {"prompt": "a=b"}),
        (["int", "str", "none"], ["auto"], "auto"),
        (["int", "str", "none"], ["8"], 8),
        (["int", "str", "none"], ["none"], None),
        (["str", "bool", "none"], ["true"], True),
        (["str", "bool", "none"], ["out/checkpoint-5"], "out/checkpoint-5"),
    ],
)
def test_words(kinds, words, value):
    got = from_words(words, make(*kinds))
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("kinds", "words", "message"),
    [
        (["int"], [], "needs a value: an integer"),
        (["int"], ["x"], "'x' is not an integer"),
        (["int"], ["1.5"], "an integer"),
        (["float"], ["nan"], "not a number"),
        (["float"], ["none"], "not a number"),
        (["int"], ["1", "2"], "takes one value, and 2 were given"),
        (["bool"], ["ture"], "did you mean 'true'"),
        (["list[float]"], ["1", "a"], "list of numbers"),
        (["list[int]"], ["1.5"], "list of integers"),
        (["dict", "none"], ["a"], "not a mapping"),
        (["dict", "none"], ["a=1", "b"], "key=value"),
        (["dict", "none"], ["{a: 1}"], "not JSON"),
        (["list[dict]"], ["[1]"], "list of mappings"),
    ],
)
def test_wrong_words(kinds, words, message):
    with pytest.raises(ConfigError, match=message):
        from_words(words, make(*kinds))


def test_choices_and_ranges():
    choice = make("str", choices=("no", "steps"))
    assert from_words(["steps"], choice) == "steps"
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        from_words(["step"], choice)
    with pytest.raises(ConfigError, match="at least 1"):
        from_words(["0"], make("int", rules={"low": 1}))
    losses = make("list[str]", "str", choices=("sigmoid", "sft"), rules={"paths": True})
    assert from_words(["sigmoid", "my.mod:loss"], losses) == ["sigmoid", "my.mod:loss"]
    with pytest.raises(ConfigError, match="did you mean 'sft'"):
        from_words(["sigmoid", "sfft"], losses)


def test_a_flag_that_also_takes_a_text():
    """transformers' --fsdp: alone it means true, and an older text is still passed on."""
    assert from_words([], make("str", "none", flag=True)) is True
    assert from_words(["full_shard"], make("str", "none", flag=True)) == "full_shard"


@pytest.mark.parametrize(
    ("kinds", "given_", "value"),
    [
        (["float"], "1e-5", 1e-5),
        (["float"], 3, 3),
        (["int"], 3.0, 3),
        (["int", "none"], None, None),
        (["bool"], True, True),
        (["bool"], "false", False),
        (["bool"], 0, False),
        (["str"], 123, "123"),
        (["list[str]", "none"], ["a", "b"], ["a", "b"]),
        (["list[float]"], ["1e-5", 2], [1e-5, 2.0]),
        (["list[dict]"], [{"path": "a"}], [{"path": "a"}]),
        (["dict", "str"], {"a": {"b": 1}}, {"a": {"b": 1}}),
        (["none", "str", "list[str]"], "none", "none"),
        (["none", "str", "list[str]"], None, None),
        (["str", "none"], "", ""),
    ],
)
def test_yaml(kinds, given_, value):
    got = from_yaml(given_, make(*kinds))
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("kinds", "given_", "message"),
    [
        (["int"], True, "an integer"),
        (["float"], [1], "is not a number"),
        (["float"], {"a": 1}, "a number"),
        (["int"], None, "an integer"),
        (["str"], True, "in quotes"),
        (["str"], datetime.date(2025, 1, 1), "in quotes"),
        (["list[str]"], {"a": 1}, "list of texts"),
        (["dict[str]"], {"a": 1}, "text to text"),
    ],
)
def test_wrong_yaml(kinds, given_, message):
    with pytest.raises(ConfigError, match=message):
        from_yaml(given_, make(*kinds))


def test_yaml_reads_no_as_false():
    """`eval_strategy: no` without quotes is what everybody writes, and YAML 1.1 makes false of it."""
    assert from_yaml(False, make("str", choices=("no", "steps"))) == "no"
    with pytest.raises(ConfigError, match="in quotes"):
        from_yaml(True, make("str", choices=("no", "steps")))


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_their_spelling(number):
    assert from_words([repr(number)], make("float")) == number
    assert from_yaml(repr(number), make("float", "none")) == number
