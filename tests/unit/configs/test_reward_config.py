"""Reward options: the public defaults that scripts rely on (TRL 1.16.0, written out by hand), and refusals."""

from __future__ import annotations

import dataclasses

import pytest

from preftune.configs.reward import RewardConfig
from preftune.errors import ConfigError

OUT = "unused-output"
DEFAULTS = {
    "learning_rate": 1e-4,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "chat_template_path": None,
    "disable_dropout": True,
    "dataset_num_proc": None,
    "eos_token": None,
    "max_length": 1024,
    "center_rewards_coefficient": None,
    "activation_offloading": False,
    "pad_token": None,
    "overlong": "drop",  # ours; the older library knows nothing else
}


def test_defaults_that_scripts_rely_on():
    built = RewardConfig(OUT)
    assert {name: vars(built)[name] for name in DEFAULTS} == DEFAULTS
    assert RewardConfig.from_json(built.to_json()) == built
    assert [f.name for f in dataclasses.fields(RewardConfig) if f.init and not f.metadata.get("help", "").strip()] == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"overlong": "cutt"}, "overlong='cutt'.*did you mean 'cut'"),
        ({"center_rewards_coefficient": -1}, "center_rewards_coefficient.*at least 0"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1.*Leave it out"),
    ],
)
def test_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        RewardConfig(OUT, **wrong)
