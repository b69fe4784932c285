"""SDFT and SDPO options: defaults that scripts rely on, refusals with remedies, round trips.

Defaults are the table of public defaults of the library that users come from (TRL 1.16.0), written out by hand.
"""

from __future__ import annotations

import dataclasses

import pytest

from preftune.configs.distillation import DistillationConfig
from preftune.configs.sdft import SDFTConfig
from preftune.configs.sdpo import SDPOConfig
from preftune.errors import ConfigError

OUT = "unused-output"
BOTH = [SDFTConfig, SDPOConfig]

SHARED_DEFAULTS = {
    "disable_dropout": True, "max_prompt_length": 512, "num_generations": 8, "max_completion_length": 256,
    "num_iterations": 1, "teacher_update_rate": 0.05, "teacher_sync_steps": 1, "distillation_is_clip": 2.0,
    "distillation_add_tail": False, "use_teacher_server": False, "learning_rate": 5e-5, "temperature": 1.0,
    "remove_unused_columns": False,
}  # fmt: skip
DEFAULTS = {
    SDFTConfig: {
        "teacher_model_kind": "base", "distillation_alpha": 0.5, "distillation_mode": "topk_logits",
        "distillation_topk": 100, "generate_from_teacher": False, "num_loss_tokens_to_skip": 0,
        "teacher_prompt_template": "{prompt}\n\n{privileged_context}",
    },
    SDPOConfig: {
        "teacher_model_kind": "ema", "distillation_alpha": 1.0, "distillation_mode": "sampled_token",
        "distillation_topk": None, "distillation_weight": 1.0, "loss_type": "dapo", "beta": 0.0, "epsilon": 0.2,
        "epsilon_high": None, "importance_sampling_level": "token", "reward_weights": None, "scale_rewards": "group",
        "mask_truncated_completions": False, "use_successful_as_teacher": True, "success_reward_threshold": 1.0,
        "dont_reprompt_on_self_success": True, "max_reprompt_len": 10240, "include_environment_feedback": False,
        "reprompt_template": "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "environment_feedback_only_without_solution": False, "remove_thinking_from_demonstration": False,
        "diagnostics_warning_interval": 10, "diagnostics_flat_tolerance": 1e-8,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", BOTH)
def test_defaults(config):
    made = config(OUT)
    wanted = SHARED_DEFAULTS | DEFAULTS[config]
    assert {name: vars(made)[name] for name in wanted} == wanted


@pytest.mark.parametrize("config", BOTH)
def test_survives_replace_and_json(config):
    made = config(OUT, teacher_model_kind="live", temperature=0.7)
    assert dataclasses.replace(made) == made
    assert config.from_json(made.to_json()) == made


def test_no_reference_options_of_other_trainers():
    names = {f.name for f in dataclasses.fields(DistillationConfig)}
    assert not names & {"sync_ref_model", "bema_ref_model", "beta", "reward_weights"}
    assert "reward_weights" not in {f.name for f in dataclasses.fields(SDFTConfig)}


@pytest.mark.parametrize("config", BOTH)
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"use_teacher_server": True}, "use_teacher_server=True is not supported.*Leave it out"),
        ({"teacher_model_kind": "emma"}, "teacher_model_kind='emma'.*did you mean 'ema'"),
        ({"distillation_mode": "topk"}, "distillation_mode='topk'.*topk_logits"),
        ({"distillation_mode": "sampled_token", "distillation_alpha": 0.5}, "Set distillation_alpha=1, or another"),
        ({"distillation_mode": "topk_logits", "distillation_topk": None}, "needs distillation_topk"),
        ({"distillation_mode": "topk_logits", "distillation_topk": 0}, "distillation_topk=0 is out of range"),
        ({"distillation_alpha": 1.1, "distillation_mode": "full_logits"}, "distillation_alpha=1.1 is out of range"),
        (
            {"distillation_mode": "full_logits", "distillation_add_tail": True},
            "distillation_add_tail=True would change nothing",
        ),
        ({"teacher_update_rate": 0.0}, "teacher_update_rate=0.0 is out of range"),
        ({"teacher_sync_steps": 0}, "teacher_sync_steps=0 is out of range"),
        ({"teacher_model_kind": "live", "ref_adapter_name": "a"}, "the teacher 'live' is the student itself"),
        ({"num_generations": 0}, "num_generations=0 is out of range"),
        ({"max_prompt_length": 0}, "max_prompt_length=0 is out of range"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(config, given, found):
    with pytest.raises(ConfigError, match=found):
        config(OUT, **given)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{prompt}", "has no {privileged_context}"),
        ("{privileged_context}", "has no {prompt}"),
        ("{prompt} {privileged_context} {answer}", "has {answer}, which nothing fills"),
        ("{prompt} {} {privileged_context}", "has {}, which nothing fills"),
        ('{"a": {prompt}} {privileged_context}', "a brace that is meant as one is written twice"),
        ("{prompt} { {privileged_context}", "a brace that is meant as one is written twice"),
    ],
)
def test_templates_without_their_placeholders(template, found):
    with pytest.raises(ConfigError, match=r"teacher_prompt_template=.*" + found):
        SDFTConfig(OUT, teacher_prompt_template=template)


def test_a_template_with_braces():
    assert SDFTConfig(OUT, teacher_prompt_template="{{{prompt}}} {privileged_context}").teacher_prompt_template


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"use_successful_as_teacher": False}, "leave nothing to tell the teacher"),
        ({"num_generations": 1}, "num_generations=1 leaves no other attempt"),
        ({"num_generations": 1, "include_environment_feedback": True, "distillation_weight": 0.5}, "policy gradient"),
        ({"beta": 0.1}, "beta=0.1 would change nothing.*Lower distillation_weight"),
        ({"beta": 0.1, "distillation_weight": 0.5, "teacher_model_kind": "live"}, "the teacher 'live' has the student"),
        ({"loss_type": "cispo"}, "loss_type='cispo'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level='word'.*token, sequence"),
        ({"scale_rewards": "groups"}, "scale_rewards='groups'.*did you mean 'group'"),
        ({"distillation_weight": 2.0}, "distillation_weight=2.0 is out of range"),
        ({"reprompt_template": "{prompt}{solution}"}, "reprompt_template=.*has no {feedback}"),
        ({"solution_template": "{answer}"}, "solution_template=.*has no {solution}"),
        ({"feedback_template": "so"}, "feedback_template=.*has no {feedback}"),
        ({"environment_feedback_only_without_solution": True}, "include_environment_feedback=True"),
        ({"reward_weights": [float("inf")]}, "reward_weights has inf"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals_of_sdpo(given, found):
    """Weak points of TRL: a beta that nothing reads, names that silently mean something else."""
    with pytest.raises(ConfigError, match=found):
        SDPOConfig(OUT, **given)


def test_feedback_alone_and_one_completion():
    config = SDPOConfig(OUT, num_generations=1, include_environment_feedback=True, use_successful_as_teacher=False)
    assert config.round_prompts == 8
    assert SDFTConfig(OUT, num_generations=1).round_prompts == 8


def test_what_moves():
    assert SDPOConfig(OUT).moving_reference == "teacher_model_kind='ema'"
    assert SDFTConfig(OUT).moving_reference is None
