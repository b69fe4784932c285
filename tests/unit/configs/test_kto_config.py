"""Options of KTO: the defaults that scripts rely on, and what contradicts itself."""

from __future__ import annotations

import dataclasses

import pytest

from preftune.configs.kto import KTOConfig
from preftune.errors import ConfigError

OUT = "unused-output"
# TRL 1.16.0's, written out by hand, but for the last: there "sequential", see docs/trainers/kto.md
DEFAULTS = {
    "learning_rate": 1e-6,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "disable_dropout": True,
    "dataset_num_proc": None,
    "max_length": 1024,
    "precompute_ref_log_probs": False,
    "precompute_ref_batch_size": None,
    "loss_type": "kto",
    "beta": 0.1,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "activation_offloading": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "bema_ref_model": False,
    "train_sampling_strategy": "random",
}


def test_defaults_that_scripts_rely_on():
    built = KTOConfig(OUT)
    assert built.output_dir == OUT
    assert {name: vars(built)[name] for name in DEFAULTS} == DEFAULTS
    again = KTOConfig(**{name: value for name, value in built.to_dict().items() if name in DEFAULTS}, output_dir=OUT)
    assert {name: vars(again)[name] for name in DEFAULTS} == DEFAULTS
    assert dataclasses.replace(built, beta=0.2).beta == 0.2


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"loss_type": "kto_pair"}, ["loss_type='kto_pair' is not known", "Allowed: kto, apo_zero_unpaired"]),
        ({"beta": 0.0}, ["beta", "more than 0"]),
        ({"desirable_weight": -1.0}, ["desirable_weight", "at least 0"]),
        ({"desirable_weight": 0.0, "undesirable_weight": 0.0}, ["nothing to learn"]),
        ({"precompute_ref_log_probs": True, "sync_ref_model": True}, ["sync_ref_model", "precompute_ref_log_probs"]),
        ({"precompute_ref_log_probs": True, "bema_ref_model": True}, ["bema_ref_model", "precompute_ref_log_probs"]),
        ({"sync_ref_model": True, "bema_ref_model": True}, ["sync_ref_model", "bema_ref_model"]),
        ({"train_sampling_strategy": "group_by_length"}, ["group_by_length", "'random' or 'sequential'"]),
    ],
)
def test_what_is_refused(wrong, parts):
    with pytest.raises(ConfigError) as error:
        KTOConfig(OUT, **wrong)
    assert all(part in str(error.value) for part in parts), error.value


def test_apo_may_group_by_length():
    KTOConfig(OUT, loss_type="apo_zero_unpaired", train_sampling_strategy="group_by_length")
