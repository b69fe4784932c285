"""Built-in rewards without mathematics, and how a reward is found by name; values worked out by hand.

Each takes texts and lists of messages alike.
"""

from __future__ import annotations

import json

import pytest

from preftune.errors import ConfigError
from preftune.rewards import (
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    resolve_reward,
    think_format_reward,
)
from preftune.rewards.registry import reward_names
from preftune.rewards.text import final_text, first_text
from tests.support.rows import turn


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think>b", 1.0),
        ("<think></think>", 1.0),
        ("<think>a\n\nb</think>\nc", 1.0),
        ("<think>a</think></think>b", 1.0),
        ("<think>a", 0.0),
        ("a</think>b", 0.0),
        (" <think>a</think>b", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("<think>a</think>b<think>", 0.0),
        ("</think><think>", 0.0),
        ("<Think>a</Think>", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(text, reward):
    assert think_format_reward([text]) == [reward]
    assert think_format_reward(completions=[[turn("assistant", text)]], prompts=["p"], gold=[1]) == [reward]


@pytest.mark.parametrize(
    ("ids", "n", "worst", "reward"),
    [
        ([5, 5, 5, 6], 1, -1.0, -0.5),  # 2 of 4 unigrams are different
        ([5, 5, 5, 6], 2, -1.0, -1 / 3),  # 55 55 56
        ([1, 2, 3, 1, 2, 3], 3, -2.0, -0.5),  # 123 231 312 123
        ([7] * 12, 3, -1.0, -0.9),  # 1 of 10
        ([1, 2, 3, 4], 3, -1.0, 0.0),
        ([1, 2], 3, -1.0, 0.0),
        ([], 1, -1.0, 0.0),
        ([7] * 12, 3, 0.0, 0.0),
    ],
)
def test_repetition(ids, n, worst, reward):
    assert get_repetition_penalty_reward(n, worst)(completion_ids=[ids], prompts=["p"]) == pytest.approx([reward])


@pytest.mark.parametrize(
    ("length", "reward"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0)]
)
def test_soft_overlong(length, reward):
    """DAPO's equation 13 with L_max = 100 and L_cache = 20."""
    assert get_soft_overlong_punishment(100, 20)(completion_ids=[[1] * length]) == pytest.approx([reward])


def test_soft_overlong_without_a_slope():
    assert get_soft_overlong_punishment(4, 0)(completion_ids=[[1] * 4, [1] * 5]) == [0.0, -1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_repetition_penalty_reward(0), "ngram_size=0"),
        (lambda: get_repetition_penalty_reward(max_penalty=0.5), "max_penalty=0.5"),
        (lambda: get_soft_overlong_punishment(10, 11), "soft_punish_cache=11"),
        (lambda: get_soft_overlong_punishment(10, -1), "soft_punish_cache=-1"),
    ],
)
def test_ranges(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_names_of_what_factories_make():
    assert get_repetition_penalty_reward().__name__ == "repetition_penalty_reward"
    assert get_soft_overlong_punishment(10, 2).__name__ == "soft_overlong_punishment_reward"


def test_text_of_messages():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    answer = {
        "role": "assistant",
        "content": [{"type": "text", "text": "is "}, {"type": "image"}, {"type": "text", "text": "4"}],
    }
    turns = [call, turn("tool", "4"), answer]
    assert (first_text(turns), final_text(turns)) == ("", "is 4")
    assert (first_text([]), final_text([turn("tool", "4")])) == ("", "")
    assert (first_text("a"), final_text("a")) == ("a", "a")


# --- by name ----------------------------------------------------------------------------------------------------------


def test_names(tmp_path):
    for name in reward_names():
        assert callable(resolve_reward(name))
    assert resolve_reward("think_format_reward") is think_format_reward
    assert resolve_reward("get_soft_overlong_punishment") == get_soft_overlong_punishment(1280, 256)
    assert resolve_reward("preftune.rewards.format:think_format_reward") is think_format_reward
    assert resolve_reward("json.dumps") is json.dumps
    assert resolve_reward("owner/some-reward.model_1") == "owner/some-reward.model_1"
    assert resolve_reward(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("think_format", "Did you mean 'think_format_reward'"),
        ("acuracy_reward", "Did you mean 'accuracy_reward'"),
        ("my-reward-model", "names nothing.*a folder that is there"),
        ("./not-there", "names nothing"),
        ("json:dumpz", "Did you mean 'dump"),
        ("json.dumpz", "Did you mean 'dump"),
        ("no_such_module.reward", "there is no module 'no_such_module'"),
        ("", "names nothing"),
    ],
)
def test_names_of_nothing(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name)
