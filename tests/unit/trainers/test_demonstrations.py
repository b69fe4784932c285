"""Who shows whom how it is done, what the teacher is asked, and what is said when nothing is: small cases by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from preftune.configs.sdpo import SDPOConfig
from preftune.rewards.base import RewardTable
from preftune.trainers.demonstrations import Streaks, demonstrations, success_figures, without_thinking
from preftune.trainers.reprompts import Attempts, Reprompter
from preftune.trainers.rounds import Division, Scored

NAN = math.nan


def test_the_first_success_of_the_group():
    rewards = torch.tensor([[0.0, 1.0, 1.5], [0.0, 0.5, NAN], [2.0, 0.0, 0.0]])
    assert demonstrations(rewards, threshold=1.0, skip_successful=True) == [
        [1, None, None], [None, None, None], [None, 0, 0],
    ]  # fmt: skip
    assert demonstrations(rewards, threshold=1.0, skip_successful=False) == [
        [1, 1, 1], [None, None, None], [0, 0, 0],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "left"),
    [("<think>so</think>\n7", "7"), ("so</think> 7", "7"), ("7", "7"), ("7 <think>hm", "7"), ("<think>hm", "")],
)
def test_thinking_is_left_out(text, left):
    assert without_thinking(text) == left


def test_figures_by_hand():
    """Rewards 1 3 | 2 and none: mean 2, deviation 1, one flat group; group deviations sqrt 2 and 0."""
    rewards = torch.tensor([[1.0, 3.0], [2.0, NAN]])
    figures = success_figures(["f"], rewards[..., None], rewards, tolerance=0.1)
    assert {name.removeprefix("self_distillation/"): value for name, (value, _) in figures.items()} == {
        "rewards/f": 2.0, "reward_mean": 2.0, "reward_std": 1.0, "reward_min": 1.0, "reward_max": 3.0,
        "group_reward_std_mean": pytest.approx(math.sqrt(2) / 2), "flat_group_fraction": 0.5,
    }  # fmt: skip
    assert success_figures(["f"], rewards[:1, :, None], rewards[:1], tolerance=5.0)[
        "self_distillation/flat_group_fraction"
    ] == (1.0, 1)


def test_streaks():
    """Said after two in a row, again after two more; a round in between starts anew. 0: never."""
    streaks = Streaks(2)
    said = [streaks.see({"flat": is_so}) for is_so in (True, True, True, True, False, True, True)]
    assert said == [[], ["flat"], [], ["flat"], [], [], ["flat"]]
    assert [Streaks(0).see({"flat": True}) for _ in range(3)] == [[], [], []]


def scored(completions, rewards) -> Scored:
    values = np.array(rewards, float)[:, None]
    ones = np.ones(len(completions))
    return Scored(["p"] * len(completions), completions, ones, ones, RewardTable(values, ["f"]), {})


def ask(tokenizer, rows, completions, rewards, size, position_limit=None, **options):
    args = SDPOConfig("unused-output", num_generations=size, per_device_train_batch_size=size, **options)
    attempts = Attempts.of(scored(completions, rewards), size, None)
    asked = Reprompter(args, tokenizer, None, position_limit).ask(rows, attempts, attempts.rewards_PGK[..., 0])
    texts = [None if one.prompt is None else tokenizer.decode(one.prompt.ids) for one in asked]
    return texts, asked


TEMPLATES = {
    "reprompt_template": "{prompt}{solution}{feedback}!", "solution_template": " S:{solution}",
    "feedback_template": " F:{feedback}",
}  # fmt: skip


def test_what_the_teacher_is_asked(tokenizer):
    rows = [{"prompt": "q{1}"}, {"prompt": "q2"}]
    texts, _ = ask(tokenizer, rows, ["a", "b", "c", "d{x}"], [0, 1, 0, 0], 2, **TEMPLATES)
    assert texts == ["q{1} S:b!", None, None, None]


def test_a_success_is_not_reprompted_with_another_one(tokenizer):
    """TRL showed a successful attempt that of a sibling; the option's text says that it is left alone."""
    rows, attempts, rewards = [{"prompt": "q"}], ["a", "b", "c"], [1, 1, 0]
    assert ask(tokenizer, rows, attempts, rewards, 3, **TEMPLATES)[0] == [None, None, "q S:a!"]
    everyone = TEMPLATES | {"dont_reprompt_on_self_success": False}
    assert ask(tokenizer, rows, attempts, rewards, 3, **everyone)[0] == ["q S:a!"] * 3


def test_without_a_reward_there_is_no_success(tokenizer):
    """TRL counted it as the reward 0, which a threshold of 0 made a success."""
    texts, _ = ask(tokenizer, [{"prompt": "q"}], ["a", "b"], [NAN, -1.0], 2, success_reward_threshold=0.0, **TEMPLATES)
    assert texts == [None, None]


def test_feedback(tokenizer):
    rows = [{"prompt": "q1", "privileged_context": "no"}, {"prompt": "q2", "privileged_context": None}]
    attempts, rewards = ["a", "b", "c", "d"], [0, 1, 0, 0]
    with_both = TEMPLATES | {"include_environment_feedback": True}
    texts, asked = ask(tokenizer, rows, attempts, rewards, 2, **with_both)
    assert texts == ["q1 S:b F:no!", None, None, None]
    assert [(one.has_feedback, one.uses_feedback) for one in asked] == [
        (True, True), (True, False), (False, False), (False, False),
    ]  # fmt: skip
    instead = with_both | {"environment_feedback_only_without_solution": True}
    assert ask(tokenizer, rows, attempts, rewards, 2, **instead)[0][0] == "q1 S:b!"
    assert ask(tokenizer, rows, attempts, [0] * 4, 2, **instead)[0] == ["q1 F:no!", "q1 F:no!", None, None]
    alone = with_both | {"use_successful_as_teacher": False}
    assert ask(tokenizer, rows, attempts, rewards, 2, **alone)[0] == ["q1 F:no!", None, None, None]


def test_messages(tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "q"}]}]
    answers = [[{"role": "assistant", "content": text}] for text in ("a", "<think>hm</think>b")]
    options = TEMPLATES | {"remove_thinking_from_demonstration": True}
    texts, _ = ask(tokenizer, rows, answers, [0, 1], 2, **options)
    assert texts == ["<|im_start|>user\nq S:b!<|im_end|>\n<|im_start|>assistant\n", None]


def test_too_long_a_solution_loses_its_beginning_and_the_question_stays(tokenizer):
    solution = "The quick brown fox jumps over the lazy dog. Madrid."
    rows, attempts = [{"prompt": "What is the capital of Spain?"}], ["a", solution]
    (text, _), (asked, _) = ask(tokenizer, rows, attempts, [0, 1], 2, max_reprompt_len=20, **TEMPLATES)
    assert text.startswith("What is the capital of Spain? S:") and text.endswith("Madrid.!")
    assert asked.prompt.cut > 0 and len(asked.prompt.ids) <= 20
    limited, _ = ask(tokenizer, rows, attempts, [0, 1], 2, position_limit=256 + 20, **TEMPLATES)
    assert limited[0] == text
    assert ask(tokenizer, rows, attempts, [0, 1], 2, max_reprompt_len=3, **TEMPLATES)[0] == [None, None]


def test_groups_over_several_ranks(monkeypatch):
    """Two prompts of four attempts, units of two: rank 1 has the second half of each group, and sees the whole."""
    parts = {0: (["a0", "a1", "b0", "b1"], [0, 0, 0, 1]), 1: (["a2", "a3", "b2", "b3"], [1, 0, 0, 0])}
    gathered = [(scored(*part).table.values, part[0]) for part in parts.values()]
    monkeypatch.setattr("preftune.trainers.reprompts.gather_object", lambda mine: gathered)
    for rank in (0, 1):
        args = type("Args", (), {
            "process_index": rank, "world_size": 2, "per_device_train_batch_size": 2,
            "resolved_generation_batch_size": 8, "num_generations": 4,
        })  # fmt: skip
        division = Division.of(args, 2)
        assert division.size in (2, 4)
        if division.size == 4:
            division = Division([(0, rank), (1, rank)], 2, np.array([0, 1, 4, 5, 2, 3, 6, 7]),
                                np.array([0, 1, 4, 5]) + 2 * rank)  # fmt: skip
        attempts = Attempts.of(scored(*parts[rank]), 4, division)
        assert attempts.texts == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]
        assert attempts.rewards_PGK[..., 0].tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]
        assert [attempts.texts[i] for i in attempts.own] == parts[rank][0]
