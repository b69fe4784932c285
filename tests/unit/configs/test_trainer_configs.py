"""SFT, DPO and reference options: defaults that scripts rely on, contradictions, values of older libraries.

Defaults are the table of public defaults of the library that users come from (TRL 1.16.0), written out by hand.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preftune.configs.dpo import DPOConfig
from preftune.configs.reference import ReferenceConfig
from preftune.configs.sft import SFTConfig
from preftune.errors import ConfigError
from preftune.losses.names import PAIR_LOSS_NAMES

OUT = "unused-output"

SFT_DEFAULTS = {
    "learning_rate": 2e-5,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "chat_template_path": None,
    "dataset_text_field": "text",
    "dataset_kwargs": None,
    "dataset_num_proc": None,
    "eos_token": None,
    "max_length": 1024,
    "truncation_mode": "keep_start",
    "shuffle_dataset": False,
    "packing": False,
    "packing_strategy": "bfd",
    "padding_free": False,
    "eval_packing": None,
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "loss_type": "nll",
    "activation_offloading": False,
    "pad_token": None,
}
DPO_DEFAULTS = {
    "learning_rate": 1e-6,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "dataset_num_proc": None,
    "activation_offloading": False,
    "pad_token": None,
    "disable_dropout": True,
    "max_length": 1024,
    "truncation_mode": "keep_start",
    "padding_free": False,
    "precompute_ref_log_probs": False,
    "precompute_ref_batch_size": None,
    "loss_type": ["sigmoid"],
    "loss_weights": None,
    "ld_alpha": None,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "label_smoothing": 0.0,
    "beta": 0.1,
    "use_weighting": False,
    "discopop_tau": 0.05,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
}
BEMA_DEFAULTS = {
    "bema_ref_model": False,
    "bema_update_freq": 400,
    "bema_ema_power": 0.5,
    "bema_bias_power": 0.2,
    "bema_lag": 10,
    "bema_update_after": 0,
    "bema_multiplier": 1.0,
    "bema_min_ema_multiplier": 0.0,
    "bema_device": "cpu",
    "ref_model_update_freq": 400,
    "ref_model_update_after": 0,
}


@pytest.mark.parametrize(
    ("config", "defaults"),
    [(SFTConfig, SFT_DEFAULTS), (DPOConfig, DPO_DEFAULTS | BEMA_DEFAULTS), (ReferenceConfig, BEMA_DEFAULTS)],
)
def test_defaults_that_scripts_rely_on(config, defaults):
    built = config(OUT)
    assert {name: vars(built)[name] for name in defaults} == defaults


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig])
def test_output_dir_comes_first_and_every_option_has_a_text(config):
    assert config(OUT).output_dir == OUT
    bare = [f.name for f in dataclasses.fields(config) if f.init and not f.metadata.get("help", "").strip()]
    assert bare == []


@pytest.mark.parametrize("name", PAIR_LOSS_NAMES)
def test_each_loss_can_be_chosen(name):
    smoothing = 0.1 if name == "exo_pair" else 0.0
    assert DPOConfig(OUT, loss_type=name, label_smoothing=smoothing).loss_type == [name]


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"loss_type": "sigmod"}, ["loss_type='sigmod'", "'sigmoid'", "hinge"]),
        ({"loss_type": ["sigmoid", "ipoo"]}, ["'ipoo'", "'ipo'"]),
        ({"loss_type": []}, ["loss_type", "empty"]),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, ["loss_weights", "1", "2"]),
        ({"loss_type": ["sigmoid"], "loss_weights": ["1"]}, ["loss_weights", "list of numbers"]),
        ({"f_divergence_type": "forward-kl"}, ["did you mean 'forward_kl'"]),
        ({"f_divergence_type": "forward_kl", "loss_type": "apo_zero"}, ["f_divergence_type", "apo_zero", "reverse_kl"]),
        ({"loss_type": "exo_pair"}, ["exo_pair", "label_smoothing"]),
        ({"loss_type": "robust", "label_smoothing": 0.5}, ["robust", "0.5"]),
        ({"loss_type": "aot", "use_weighting": True}, ["use_weighting", "aot"]),
        ({"beta": -0.1}, ["beta"]),
        ({"ld_alpha": 1.5}, ["ld_alpha", "at most 1"]),
        ({"label_smoothing": 2}, ["label_smoothing", "at most 1"]),
        ({"discopop_tau": 0}, ["discopop_tau", "more than 0"]),
        ({"max_length": 0}, ["max_length", "at least 1"]),
        ({"truncation_mode": "keep_stat"}, ["did you mean 'keep_start'"]),
        ({"sync_ref_model": True, "bema_ref_model": True}, ["sync_ref_model", "bema_ref_model", "False"]),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, ["sync_ref_model", "precompute_ref_log_probs"]),
        ({"bema_ref_model": True, "precompute_ref_log_probs": True}, ["bema_ref_model", "precompute_ref_log_probs"]),
        ({"ref_model_mixup_alpha": 1.1}, ["ref_model_mixup_alpha", "at most 1"]),
        ({"ref_model_sync_steps": 0}, ["ref_model_sync_steps", "at least 1"]),
        ({"pad_to_multiple_of": "eight"}, ["pad_to_multiple_of", "auto"]),
    ],
)
def test_dpo_refuses(wrong, parts):
    with pytest.raises(ConfigError) as error:
        DPOConfig(OUT, **wrong)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"loss_type": "nl"}, ["loss_type", "did you mean 'nll'"]),
        ({"packing_strategy": "bdf"}, ["packing_strategy", "did you mean 'bfd'"]),
        ({"packing": True, "max_length": None}, ["packing", "max_length"]),
        ({"eval_packing": True, "max_length": None}, ["eval_packing", "max_length"]),
        ({"dataset_kwargs": {"skip_prepare": True}}, ["skip_prepare", "did you mean 'skip_prepare_dataset'"]),
    ],
)
def test_sft_refuses(wrong, parts):
    with pytest.raises(ConfigError) as error:
        SFTConfig(OUT, **wrong)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("config", "old", "name", "now"),
    [
        (SFTConfig, {"loss_type": "chunked_nll"}, "loss_type", "nll"),
        (SFTConfig, {"packing_strategy": "bfd-requeue"}, "packing_strategy", "bfd_split"),
        (DPOConfig, {"truncation_mode": "keep_end"}, "truncation_mode", "keep_end"),
        (DPOConfig, {"pad_token": "<pad>"}, "pad_token", "<pad>"),
    ],
)
def test_old_values_are_accepted_with_a_warning(config, old, name, now):
    with pytest.warns(FutureWarning, match=name):
        built = config(OUT, **old)
    assert vars(built)[name] == now


def test_padding_free_says_that_it_has_no_effect():
    with pytest.warns(UserWarning, match="never pads"):
        assert DPOConfig(OUT, padding_free=True).padding_free is True


@pytest.mark.parametrize(
    ("given_", "kept"), [("auto", None), ("none", None), ("NULL", None), ("8", 8), (64, 64), (None, None)]
)
def test_pad_to_multiple_of(given_, kept):
    assert DPOConfig(OUT, pad_to_multiple_of=given_).pad_to_multiple_of == kept


def test_a_function_becomes_its_path():
    config = DPOConfig(OUT, loss_type=[test_a_function_becomes_its_path, "sigmoid"])
    assert config.loss_type == [f"{__name__}:test_a_function_becomes_its_path", "sigmoid"]
    assert DPOConfig(OUT, loss_type="my_package.losses:mine").loss_type == ["my_package.losses:mine"]


def test_a_function_without_a_path_is_refused():
    def local(policy, ref, **_):
        return None

    for nameless in (local, lambda policy, ref, **_: None):
        with pytest.raises(ConfigError, match="importable name"):
            DPOConfig(OUT, loss_type=nameless)


def test_which_option_moves_the_reference():
    assert DPOConfig(OUT).moving_reference is None
    assert DPOConfig(OUT, sync_ref_model=True).moving_reference == "sync_ref_model"
    assert DPOConfig(OUT, bema_ref_model=True).moving_reference == "bema_ref_model"


def test_a_config_of_ones_own():
    """A subclass with one more field keeps checks, JSON and replace."""

    @dataclasses.dataclass
    class MarginConfig(DPOConfig):
        margin: float = 0.5

    config = MarginConfig(OUT, margin=0.2)
    assert MarginConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match="margin"):
        MarginConfig(OUT, margin="0.2")


losses = st.lists(
    st.sampled_from([n for n in PAIR_LOSS_NAMES if n not in ("exo_pair", "robust")]), min_size=1, max_size=3
)


@given(
    losses,
    st.fixed_dictionaries(
        {},
        optional={
            "beta": st.floats(0.01, 10),
            "ld_alpha": st.none() | st.floats(0, 1),
            "max_length": st.none() | st.integers(1, 4096),
            "pad_to_multiple_of": st.sampled_from(["auto", 8, "16", None]),
            "sync_ref_model": st.booleans(),
            "ref_model_mixup_alpha": st.floats(0, 1),
            "bema_update_freq": st.integers(1, 1000),
            "columns": st.none() | st.just({"prompt": "question"}) | st.just('{"prompt": "question"}'),
        },
    ),
    st.booleans(),
)
def test_dpo_round_trips(names, values, weighted):
    weights = [1.0 + i for i in range(len(names))] if weighted else None
    config = DPOConfig(OUT, loss_type=names, loss_weights=weights, **values)
    assert DPOConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert dataclasses.replace(config) == config
    assert dataclasses.replace(config, beta=0.7).beta == 0.7
