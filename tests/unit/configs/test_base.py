"""What every config does: device and precision by the hardware, two names of checkpointing, JSON, clear refusals.

The accelerator is faked: this is about decisions, and they must be the same on every machine that runs the tests.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from accelerate import ParallelismConfig
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from preftune.configs import base
from preftune.configs.base import BaseConfig
from preftune.configs.sft import SFTConfig
from preftune.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def out(tmp_path):
    return str(tmp_path)


def hardware(monkeypatch, *, accelerator: bool, bf16: bool) -> None:
    monkeypatch.setattr(base.torch.accelerator, "is_available", lambda: accelerator)
    monkeypatch.setattr(base, "is_torch_xla_available", lambda: False)
    monkeypatch.setattr(base, "is_torch_bf16_gpu_available", lambda: bf16)
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)


@pytest.mark.parametrize(
    ("accelerator", "supports", "given", "use_cpu", "bf16"),
    [
        (False, False, {}, True, False),
        (False, False, {"bf16": True}, True, True),
        (True, True, {}, False, True),
        (True, False, {}, False, False),
        (True, True, {"bf16": False}, False, False),
        (True, True, {"fp16": True}, False, False),
        (True, True, {"use_cpu": True}, True, False),
    ],
)
def test_device_and_precision(monkeypatch, out, accelerator, supports, given, use_cpu, bf16):
    hardware(monkeypatch, accelerator=accelerator, bf16=supports)
    config = BaseConfig(out, **given)
    assert (config.use_cpu, config.bf16) == (use_cpu, bf16)


@pytest.mark.parametrize(
    ("name", "value", "use_cpu", "bf16"),
    [("ACCELERATE_USE_CPU", "true", True, False), ("ACCELERATE_MIXED_PRECISION", "fp16", False, False)],
)
def test_a_launcher_has_its_say(monkeypatch, out, name, value, use_cpu, bf16):
    hardware(monkeypatch, accelerator=True, bf16=True)
    monkeypatch.setenv(name, value)
    config = BaseConfig(out)
    assert (config.use_cpu, config.bf16) == (use_cpu, bf16)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about a machine without an accelerator")
def test_a_machine_without_accelerator_just_works(out):
    config = BaseConfig(out)
    assert config.use_cpu and config.bf16 is False and config.device.type == "cpu" and config.n_gpu == 0
    assert BaseConfig(out, bf16=True).bf16 is True  # autocast on the CPU, where asked for


def test_defaults_that_differ_from_transformers(out):
    """DESIGN section 7, and the six fields that the library users come from changes."""
    config = BaseConfig(out)
    assert config.logging_steps == 10
    assert config.logging_nan_inf_filter is False
    assert config.report_to == []
    assert config.activation_checkpointing is False and config.gradient_checkpointing is False
    assert config.trust_remote_code is False
    assert config.attention_layout == "auto" and config.max_tokens_per_micro_batch is None and config.columns is None


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_has_two_names_and_is_not_reentrant(out, name, recwarn):
    config = BaseConfig(out, **{name: True})
    assert config.gradient_checkpointing is True and config.activation_checkpointing is True
    assert config.gradient_checkpointing_kwargs == config.activation_checkpointing_kwargs == {"use_reentrant": False}
    assert not [w for w in recwarn if "checkpointing" in str(w.message)]


def test_reentrant_where_asked_for(out):
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        for value in ({"use_reentrant": True}, '{"use_reentrant": true}'):
            config = BaseConfig(out, gradient_checkpointing=True, **{name: value})
            assert config.activation_checkpointing_kwargs == {"use_reentrant": True}


def test_the_two_names_may_not_disagree(out):
    with pytest.raises(ConfigError, match=r"activation_checkpointing=True and gradient_checkpointing=False disagree"):
        BaseConfig(out, gradient_checkpointing=False, activation_checkpointing=True)
    with pytest.raises(ConfigError, match="both"):
        dataclasses.replace(BaseConfig(out), gradient_checkpointing=True)
    changed = dataclasses.replace(BaseConfig(out), gradient_checkpointing=True, activation_checkpointing=True)
    assert changed.activation_checkpointing is True


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"eval_strategy": "stepz"}, "did you mean 'steps'"),
        ({"optim": "adamw_torh"}, "did you mean 'adamw_torch'"),
        ({"lr_scheduler_type": "cosin"}, "did you mean 'cosine'"),
        ({"train_sampling_strategy": "randm"}, "did you mean 'random'"),
        ({"attention_layout": "tre"}, "did you mean 'tree'"),
        ({"learning_rate": "1e-5"}, "learning_rate='1e-5' is of type str; it takes a number"),
        ({"learning_rate": float("nan")}, "out of range|takes|must be"),
        ({"max_tokens_per_micro_batch": 0}, "at least 1"),
        ({"max_steps": True}, "integer"),
        ({"fp16": True, "bf16": True}, "At most one of fp16 and bf16"),
        ({"columns": {"prompt": 3}}, "text to text"),
        ({"columns": "{"}, "not JSON"),
        ({"columns": "[1]"}, "JSON list"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing"),
        ({"parallelism_config": {"tp_size": 2}}, "tp_size=2, which splits layers or sequences"),
        ({"parallelism_config": ParallelismConfig(sp_size=2)}, "sp_size=2"),
        ({"activation_checkpointing": True, "activation_checkpointing_kwargs": {"selective": True}}, "every_n_layers"),
        ({"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}}, "chunked head"),
    ],
)
def test_wrong_values_fail_when_built(out, wrong, message):
    with pytest.raises(ConfigError, match=message):
        BaseConfig(out, **wrong)


def test_liger_keeps_its_layers_only(out):
    with pytest.warns(FutureWarning, match="use_liger_kernel"):
        config = BaseConfig(out, use_liger_kernel=True, liger_kernel_config={"rope": True})
    assert config.liger_kernel_config == {"rope": True, "fused_linear_cross_entropy": False}


def test_every_rank_reads_rows_of_its_own(out):
    """Streams must not be read by one rank and cut up; the object that was given stays as it was."""
    given = AcceleratorConfig(dispatch_batches=True)
    with pytest.warns(UserWarning, match="dispatch_batches=True has no effect"):
        config = BaseConfig(out, accelerator_config=given)
    assert config.accelerator_config.dispatch_batches is False and given.dispatch_batches is True
    assert BaseConfig(out).accelerator_config.dispatch_batches is False


def test_json_holds_no_secret_and_builds_again(out):
    config = BaseConfig(out, hub_token="hf_secret")
    assert "hf_secret" not in config.to_json() and config.to_dict()["hub_token"] == "<HUB_TOKEN>"
    assert BaseConfig.from_json(config.to_json()).hub_token is None
    assert BaseConfig(out).to_dict()["hub_token"] is None


def test_json_keeps_what_only_looks_like_a_secret(out):
    config = SFTConfig(out, eos_token="<eos>")
    assert SFTConfig.from_json(config.to_json()).eos_token == "<eos>"


def test_json_of_values_that_are_objects(out):
    config = BaseConfig(
        out,
        model_init_kwargs={"dtype": torch.bfloat16, "nested": {"dtype": torch.float16}},
        parallelism_config=ParallelismConfig(dp_replicate_size=1),
        debug="underflow_overflow",
    )
    values = json.loads(config.to_json())
    assert values["model_init_kwargs"] == {"dtype": "bfloat16", "nested": {"dtype": "float16"}}
    assert values["parallelism_config"]["dp_replicate_size"] == 1 and values["debug"] == ["underflow_overflow"]
    again = BaseConfig(**values)
    assert again.parallelism_config.dp_replicate_size == 1 and again.debug == config.debug
    assert config.model_init_kwargs["dtype"] is torch.bfloat16  # writing changed nothing


def test_from_json_names_an_unknown_option(out):
    with pytest.raises(ConfigError, match="no option 'learning_rat'; did you mean 'learning_rate'"):
        BaseConfig.from_json('{"learning_rat": 1}')


def test_from_training_arguments(out):
    theirs = TrainingArguments(out, learning_rate=3e-4, hub_token="hf_x", use_cpu=True, logging_steps=7)
    ours = SFTConfig.from_training_arguments(theirs)
    assert (ours.learning_rate, ours.hub_token, ours.logging_steps) == (3e-4, "hf_x", 7)
    assert ours.max_length == 1024 and ours.logging_nan_inf_filter is False


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "learning_rate": st.floats(0, 1),
            "max_steps": st.integers(-1, 10_000),
            "warmup_steps": st.floats(0, 1, exclude_max=True) | st.integers(1, 100).map(float),
            "eval_strategy": st.sampled_from(["no", "steps", "epoch"]),
            "eval_steps": st.integers(1, 50),
            "optim": st.sampled_from(["adamw_torch", "sgd", "adafactor"]),
            "gradient_checkpointing": st.booleans(),
            "lr_scheduler_kwargs": st.dictionaries(st.text("ab", min_size=1), st.integers(), max_size=2),
            "report_to": st.sampled_from(["none", "wandb", ["wandb", "tensorboard"]]),
            "columns": st.dictionaries(st.sampled_from(["prompt", "chosen"]), st.text(max_size=5)),
            "accelerator_config": st.just({"split_batches": False, "dispatch_batches": None}),
            "model_init_kwargs": st.just({"dtype": "bfloat16"}),
            "max_tokens_per_micro_batch": st.none() | st.integers(1, 99),
            "seed": st.integers(0, 2**31),
        },
    )
)
def test_replace_and_json_round_trips(values):
    config = BaseConfig("unused-output", **values)
    assert dataclasses.replace(config) == config
    assert BaseConfig(**json.loads(json.dumps(config.to_dict()))) == config
