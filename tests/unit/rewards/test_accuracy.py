"""Mathematical accuracy: what is equal, what cannot be read, and limits that hold in any thread.

Skipped where math-verify is not installed (extra `math`), but for the error that says so.
"""

from __future__ import annotations

import importlib.util
import math
import pickle
import threading
import time

import pytest

from preftune.errors import ConfigError
from preftune.rewards import accuracy, accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
from preftune.rewards.base import RewardRunner
from tests.support.rows import turn
from tests.unit.rewards.in_processes import slow_compare

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install 'preftune[math]'"
)
CASES = [
    (r"\boxed{2}", "2", 1.0),
    (r"so $x = 2$ and \boxed{\frac{1}{2}}", "$0.5$", 1.0),
    (r"\boxed{3}", "2", 0.0),
    ("2", "2", 0.0),  # no LaTeX, nothing is read
    ("", "2", 0.0),
    (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
    (r"\boxed{2}", "no math here", None),
    (r"\boxed{2}", None, None),
]


@needs_math
def test_accuracy():
    texts, golds, wanted = zip(*CASES)
    assert accuracy_reward(list(texts), list(golds)) == list(wanted)
    assert accuracy_reward(completions=[[turn("assistant", t)] for t in texts], solution=golds, a=1) == list(wanted)


@needs_math
def test_columns_that_are_logged():
    columns = {}
    accuracy_reward([r"\boxed{2}", r"\boxed{2}"], ["2", "none"], log_extra=columns.__setitem__)
    assert columns["solution"] == ["2", "none"]
    assert columns["gold_parsed"] == ["[2, '2']", None]
    assert columns["answer_parsed"] == ["[2, '2']", None]


@needs_math
def test_the_same_in_a_thread():
    texts, golds, wanted = zip(*CASES)
    got = []
    thread = threading.Thread(target=lambda: got.extend(accuracy_reward(list(texts), list(golds))))
    thread.start()
    thread.join(60)
    assert got == list(wanted)
    table = RewardRunner("accuracy_reward", timeout=60.0).run(
        prompts=["p"], completions=[r"\boxed{2}"], completion_ids=[[1]], columns={"solution": ["2"]}
    )
    assert table.values.tolist() == [[1.0]]


@needs_math
def test_what_would_never_end_is_not_equal(monkeypatch):
    """In a thread, where limits by alarm do not hold; the row after it is judged as ever."""
    monkeypatch.setattr(accuracy, "_JUDGE_LIMIT", 2.0)
    monkeypatch.setattr("preftune.rewards.judging.compare", slow_compare)
    got = []
    thread = threading.Thread(
        target=lambda: got.extend(accuracy_reward(["for ever", "2", r"\boxed{2}"], ["2", "2", "2"]))
    )
    start = time.perf_counter()
    thread.start()
    thread.join(60)
    assert got == [0.0, 0.0, 1.0]
    assert time.perf_counter() - start > 2.0


@needs_math
def test_huge_powers_end(monkeypatch):
    monkeypatch.setattr(accuracy, "_JUDGE_LIMIT", 2.0)
    start = time.perf_counter()
    (reward,) = accuracy_reward([r"\boxed{9^{9^{9^{9}}}}"], ["2"])
    assert reward == 0.0
    assert time.perf_counter() - start < 60


@needs_math
@pytest.mark.parametrize(
    ("text", "delimiters", "reward"),
    [
        (r"<think>\boxed{3}</think> \boxed{2}", None, 1.0),
        (r"<think>\boxed{2}</think> \boxed{3}", None, 0.0),
        (r"\boxed{2}", None, 0.0),
        (r"a</think>\boxed{3}</think>\boxed{2}", None, 1.0),
        (r"a</b>\boxed{3}</a>\boxed{2}", ["</b>", "</a>"], 1.0),  # the last of all, not the first in the list
        (r"a</a>\boxed{3}</b>\boxed{2}", ["</a>", "</b>"], 1.0),
        (r"a</c>\boxed{2}", ["</a>", "</b>"], 0.0),
    ],
)
def test_reasoning(text, delimiters, reward):
    assert reasoning_accuracy_reward([text], ["2"], reasoning_delimiters=delimiters) == [reward]
    assert reasoning_accuracy_reward([[turn("assistant", text)]], ["2"], delimiters) == [reward]


@needs_math
def test_two_rewards_that_log_the_same_columns():
    table = RewardRunner([accuracy_reward, reasoning_accuracy_reward]).run(
        prompts=["p"], completions=[r"</think>\boxed{2}"], completion_ids=[[1]], columns={"solution": ["2"]}
    )
    assert set(table.columns) == {
        *("solution", "gold_parsed", "answer_parsed"),
        *(f"reasoning_accuracy_reward/{name}" for name in ("solution", "gold_parsed", "answer_parsed")),
    }


@needs_math
def test_cosine():
    """lo + (hi - lo)/2 (1 + cos(pi length/max_len)): 1 to 0.5 where right, -1 to -0.5 where wrong."""
    reward = get_cosine_scaled_reward(max_len=8)
    right, wrong = r"\boxed{2}", r"\boxed{3}"
    texts = [right, right, right, right, wrong, wrong, wrong, right]
    lengths = [0, 4, 8, 20, 0, 2, 8, 3]
    golds = ["2"] * 7 + ["none"]
    got = reward(completions=texts, completion_ids=[[1] * n for n in lengths], solution=golds, prompts=["p"] * 8)
    quarter = -0.5 - 0.25 * (1 + math.cos(math.pi / 4))
    assert got[:7] == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, quarter, -0.5])
    assert got[7] is None
    assert reward.__name__ == "cosine_scaled_reward"
    assert pickle.loads(pickle.dumps(reward)) == reward
    with pytest.raises(ConfigError, match="max_len=0"):
        get_cosine_scaled_reward(0)


def test_without_math_verify(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name))
    for call in (
        lambda: accuracy_reward(["a"], ["b"]),
        lambda: reasoning_accuracy_reward(["a"], ["b"]),
        lambda: get_cosine_scaled_reward(10),
    ):
        with pytest.raises(ImportError, match=r"pip install 'preftune\[math\]'"):
            call()
