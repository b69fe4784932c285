"""Exact and numeric match: the table of `docs/rewards.md`, and properties over numbers written in many ways.

Python's own formatting writes the numbers, so the reader is tested against another writer.
"""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preftune.errors import RewardError
from preftune.rewards.base import RewardRunner
from preftune.rewards.matching import exact_match_reward, last_number, numeric_match_reward
from tests.support.rows import turn


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 18.", "18"),
        ("18 apples, then 5 more: 23 apples", "23"),
        ("so 1,234.50 dollars.", "1234.5"),
        ("1,234,567", "1234567"),
        (r"$1{,}234$", "1234"),
        ("1,2,3", "3"),
        ("12,34", "34"),  # no comma between thousands
        ("-5", "-5"),
        ("\u22125", "-5"),
        ("+5", "5"),
        ("10-5", "5"),
        ("x-5", "5"),
        ("(3)-5", "5"),
        ("10 - 5", "5"),
        ("$18", "18"),
        ("-$18", "-18"),
        ("$-18", "-18"),
        (r"\$18", "18"),
        ("US$18", "18"),
        ("18kg", "18"),
        ("50%", "50"),
        ("0.5", "1/2"),
        (".5", "1/2"),
        ("...5", "5"),
        ("3/4", "3/4"),
        ("3 / 4.", "3/4"),
        ("-3/4", "-3/4"),
        ("1 3/4", "7/4"),
        ("-1 3/4", "-7/4"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{3}{4}", "-3/4"),
        (r"\boxed{1\frac{3}{4}}", "7/4"),
        (r"2-\frac{3}{4}", "3/4"),
        (r"\boxed{-7}", "-7"),
        ("1e3", "1000"),
        ("1.5E-3", "0.0015"),
        ("10^5", "10"),
        ("10^{5}", "10"),
        ("x_2 = 7 and x_{3}", "7"),
        ("H2O", None),
        ("version 3.14.15", "3.14"),
        ("3/0", None),
        ("none", None),
        ("", None),
        ("9" * 301, None),
        ("1e999999999999", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == (None if number is None else Fraction(number))


@given(st.integers(-(10**12), 10**12))
def test_integers_in_every_writing(n):
    for text in (f"{n}", f"{n:,}", f"{n}.0", f"{n:+}", f"it is {n}.", f"= {n:,} apples", rf"\boxed{{{n}}}"):
        assert last_number(text) == n


@given(st.decimals(-(10**6), 10**6, places=4))
def test_decimals_in_every_writing(x):
    for text in (f"{x}", f"{x:,}", f"so {x}.", f"{x} kg", f"{x:e}"):
        assert last_number(text) == Fraction(x)


@given(st.fractions(0, 1000, max_denominator=50))
def test_fractions_in_every_writing(x):
    a, b = x.numerator, x.denominator
    for text in (f"{a}/{b}", f"{a} / {b}", rf"\frac{{{a}}}{{{b}}}", f"{a // b} {a % b}/{b}"):
        assert last_number(text) == x
    assert last_number(f"-{a}/{b}") == -x


@given(st.text(max_size=200))
def test_any_text_can_be_read(text):
    assert numeric_match_reward([text], solution=[text]) in ([1.0], [None])


@given(st.text(alphabet="0123456789.,/ eE-+$\\frac{}^_", max_size=60))
def test_any_text_of_digits_can_be_read(text):
    number = last_number(text)
    assert number is None or last_number(str(number)) == number


def test_long_texts_take_no_time():
    start = time.process_time()
    for piece in ("9", "1 ", "1,", "1,111", "1/", "1e", "-", "\\frac{1}{1", " ", "1 1/"):
        last_number(piece * 20_000)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("She has 3 + 15 = <<3+15=18>>18.\n#### 18", "It is 18.", 1.0),
        ("#### 1,234", "1234.00", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 18", "18 or 19", 0.0),
        ("#### 18", "I do not know.", 0.0),
        ("#### 18", "", 0.0),
        (18, "18", 1.0),
        (0.1, "1/10", 1.0),
        ("1/3", "0.3333", 0.0),
        ("1 1/2", "1.5", 1.0),
        (None, "18", None),
        ("no number here", "18", None),
    ],
)
def test_numeric_match(gold, text, reward):
    assert numeric_match_reward([text], solution=[gold]) == [reward]
    assert numeric_match_reward(completions=[[turn("assistant", text)]], answer=[gold], prompts=["p"]) == [reward]


def test_numeric_match_in_the_runner_reads_the_last_answer_and_shows_what_it_read():
    talk = [turn("assistant", "7?"), turn("tool", "99"), turn("assistant", "1,000.5 it is")]
    table = RewardRunner("numeric_match_reward").run(
        prompts=["p", "p"], completions=[talk, talk], completion_ids=[[1], [1]], columns={"answer": ["1000.50", "7"]}
    )
    assert table.values[:, 0].tolist() == [1.0, 0.0]
    assert table.columns == {"gold_number": ["2001/2", "7"], "last_number": ["2001/2", "2001/2"]}


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("Paris", " Paris\n", 1.0),
        ("New York", "New\n  York", 1.0),
        ("Paris", "paris", 0.0),
        ("Paris", "Paris.", 0.0),
        ("", "", 1.0),
        (4, "4", 1.0),
        (None, "Paris", None),
    ],
)
def test_exact_match(gold, text, reward):
    assert exact_match_reward([text], solution=[gold]) == [reward]
    assert exact_match_reward(completions=[[turn("assistant", text)]], answer=[gold]) == [reward]


@pytest.mark.parametrize("reward", [exact_match_reward, numeric_match_reward])
def test_without_gold(reward):
    with pytest.raises(RewardError, match="'solution' or 'answer'"):
        reward(["a"])
