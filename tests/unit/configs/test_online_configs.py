"""GRPO and RLOO options: defaults that scripts rely on, the arithmetic of a round, refusals, round trips.

Defaults are the table of public defaults of the library that users come from (TRL 1.16.0), written out by hand.
"""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from preftune.configs.grpo import GRPOConfig
from preftune.configs.rloo import RLOOConfig
from preftune.configs.rollout import RolloutConfig
from preftune.errors import ConfigError
from preftune.losses.names import IMPORTANCE_LEVELS, POLICY_LOSS_NAMES, REWARD_SCALES, SAMPLER_CORRECTIONS

OUT = "unused-output"
BOTH = [GRPOConfig, RLOOConfig]

SHARED_DEFAULTS = {
    "learning_rate": 1e-6,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "disable_dropout": False,
    "remove_unused_columns": False,
    "num_generations_eval": None,
    "max_completion_length": 512,
    "ds3_gather_for_generation": True,
    "shuffle_dataset": True,
    "pad_to_multiple_of": None,  # "auto" where there is no Neuron device
    "generation_batch_size": None,
    "steps_per_generation": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "cache_implementation": None,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False,
    "vllm_structured_outputs_regex": None,
    "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "reward_weights": None,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "log_completions": False,
    "log_multimodal": True,
    "num_completions_to_print": None,
    "log_unique_prompts": False,
    "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None,
    "use_transformers_paged": False,
}
GRPO_DEFAULTS = SHARED_DEFAULTS | {
    "cast_lm_head_to_fp32": False,
    "num_generations": 8,
    "beta": 0.0,
    "delta": None,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "max_tool_calling_iterations": None,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": True,
    "log_completions_hub_repo": None,
    "vllm_importance_sampling_cap": None,
}
RLOO_DEFAULTS = SHARED_DEFAULTS | {
    "num_generations": 2,
    "beta": 0.05,
    "normalize_advantages": False,
    "reward_clip_range": None,
}
OURS = {
    "rollout_backend": "local",
    "rollout_precision": "model",
    "reward_timeout": None,
    "on_reward_error": "raise",
    "reward_processes": 0,
    "bema_ref_model": False,
}


@pytest.mark.parametrize(
    ("config", "defaults", "fields"), [(GRPOConfig, GRPO_DEFAULTS, 79), (RLOOConfig, RLOO_DEFAULTS, 53)]
)
def test_defaults_that_scripts_rely_on(config, defaults, fields):
    assert len(defaults) == fields
    built = config(OUT)
    assert {name: vars(built)[name] for name in defaults} == defaults
    assert {name: vars(built)[name] for name in OURS} == OURS
    assert not built.gradient_checkpointing and built.logging_steps == 10


@pytest.mark.parametrize("config", BOTH)
def test_output_dir_comes_first_and_every_option_has_a_text(config):
    assert config(OUT).output_dir == OUT
    bare = [f.name for f in dataclasses.fields(config) if f.init and not f.metadata.get("help", "").strip()]
    assert bare == []


def test_there_is_no_stored_reference_online():
    with pytest.raises(TypeError, match="precompute_ref_log_probs"):
        GRPOConfig(OUT, precompute_ref_log_probs=True)


# The arithmetic of a round


@pytest.fixture
def processes(monkeypatch):
    """Sets the number of processes that configs believe in."""

    def pretend(number: int) -> None:
        monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: number))

    return pretend


@pytest.mark.parametrize(
    ("given_", "world", "size", "steps", "prompts"),
    [
        ({}, 1, 8, 1, 1),
        ({"gradient_accumulation_steps": 4}, 1, 32, 4, 4),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 8}, 1, 64, 8, 8),
        ({"generation_batch_size": 48}, 1, 48, 6, 6),
        ({"generation_batch_size": 48, "steps_per_generation": 6}, 1, 48, 6, 6),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 1, 8, 4, 1),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 4, 16, 2, 2),
        ({"per_device_train_batch_size": 2, "generation_batch_size": 64}, 4, 64, 8, 8),
        ({"num_generations": 3, "per_device_train_batch_size": 9}, 1, 9, 1, 3),
    ],
)
def test_a_round(processes, given_, world, size, steps, prompts):
    """completions = micro-batch x processes x steps; prompts = completions / G."""
    processes(world)
    config = GRPOConfig(OUT, **given_)
    found = (config.resolved_generation_batch_size, config.resolved_steps_per_generation, config.round_prompts)
    assert found == (size, steps, prompts)
    for name in ("generation_batch_size", "steps_per_generation"):
        assert vars(config)[name] == given_.get(name)


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"generation_batch_size": 12}, ["generation_batch_size=12", "multiples of 8"]),
        (
            {"generation_batch_size": 16, "steps_per_generation": 4},
            ["makes 2 micro-batches", "steps_per_generation=4"],
        ),
        (
            {"num_generations": 3},
            ["8 completions", "num_generations=3", "gradient_accumulation_steps", "multiple of 3"],
        ),
        (
            {"per_device_train_batch_size": 2, "steps_per_generation": 2},
            ["4 completions", "generation_batch_size", "multiple of 8"],
        ),
    ],
)
def test_a_round_that_does_not_work_out(wrong, parts):
    with pytest.raises(ConfigError) as error:
        GRPOConfig(OUT, **wrong)
    for part in parts:
        assert part in str(error.value)


def test_a_micro_batch_is_over_all_processes(processes):
    processes(4)
    with pytest.raises(ConfigError, match="x 4 process.* = 8 completions"):
        GRPOConfig(OUT, per_device_train_batch_size=2, num_generations=4, generation_batch_size=12)


def test_rebuilding_with_another_batch():
    """trl: after the first construction both batch fields were set, and replace raised."""
    config = GRPOConfig(OUT, gradient_accumulation_steps=4)
    changed = dataclasses.replace(config, per_device_train_batch_size=4)
    assert (changed.resolved_generation_batch_size, changed.round_prompts) == (16, 2)
    assert dataclasses.replace(config, steps_per_generation=2).round_prompts == 2
    assert dataclasses.replace(config, generation_batch_size=8).resolved_steps_per_generation == 1


@pytest.mark.parametrize("config", BOTH)
@pytest.mark.parametrize("number", [0, 1, -3])
def test_a_group_has_two_completions_at_least(config, number):
    with pytest.raises(ConfigError, match=f"num_generations={number} .* at least 2"):
        config(OUT, num_generations=number)


def test_evaluation_batches_hold_whole_groups(processes):
    """trl#4682: it is the number for evaluation that counts. And where no evaluation is planned, none is checked."""
    plan = {"eval_strategy": "steps", "eval_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4}
    GRPOConfig(OUT, num_generations_eval=2, per_device_eval_batch_size=2, **plan)
    GRPOConfig(OUT, num_generations_eval=1, per_device_eval_batch_size=3, **plan)
    with pytest.raises(ConfigError, match="whole groups of 4"):
        GRPOConfig(OUT, per_device_eval_batch_size=2, **plan)
    unplanned = GRPOConfig(OUT, per_device_eval_batch_size=3)
    with pytest.raises(ConfigError, match="per_device_eval_batch_size=3"):
        unplanned.check_eval_batch()
    processes(2)
    GRPOConfig(OUT, per_device_eval_batch_size=2, **plan)


# Refusals


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"loss_type": "dap"}, ["loss_type='dap'", "did you mean 'dapo'", "vespo"]),
        ({"importance_sampling_level": "seq"}, ["importance_sampling_level='seq'", "token, sequence"]),
        ({"scale_rewards": "groups"}, ["scale_rewards='groups'", "did you mean 'group'", "batch"]),
        ({"multi_objective_aggregation": "sum"}, ["multi_objective_aggregation", "normalize_then_sum"]),
        ({"vllm_importance_sampling_mode": "sequence_masks"}, ["did you mean 'sequence_mask'", "token_truncate"]),
        ({"vllm_mode": "colocated"}, ["did you mean 'colocate'"]),
        ({"vllm_model_impl": "hf"}, ["vllm_model_impl='hf'", "transformers"]),
        ({"rollout_backend": "sever"}, ["did you mean 'server'", "continuous"]),
        ({"rollout_precision": "bf16"}, ["rollout_precision='bf16'", "bfloat16"]),
        ({"on_reward_error": "ignore"}, ["on_reward_error", "raise, none"]),
        ({"temperature": 0}, ["temperature=0", "more than 0"]),
        ({"generation_kwargs": {"temperature": 0.0}}, ["temperature=0.0", "more than 0"]),
        ({"top_p": 0}, ["top_p", "more than 0"]),
        ({"top_k": -1}, ["top_k=-1", "at least 0"]),
        ({"min_p": 1.5}, ["min_p", "at most 1"]),
        ({"repetition_penalty": 0}, ["repetition_penalty", "more than 0"]),
        ({"top_entropy_quantile": 1.2}, ["top_entropy_quantile", "at most 1"]),
        ({"epsilon": -0.1}, ["epsilon", "at least 0"]),
        ({"epsilon_high": -0.1}, ["epsilon_high", "at least 0"]),
        ({"delta": 0}, ["delta", "more than 0"]),
        ({"beta": -0.1}, ["beta", "at least 0"]),
        ({"num_iterations": 0}, ["num_iterations", "at least 1"]),
        ({"steps_per_generation": 0}, ["steps_per_generation", "at least 1"]),
        ({"max_completion_length": None}, ["max_completion_length", "integer"]),
        ({"max_completion_length": 0}, ["max_completion_length", "at least 1"]),
        ({"num_generations_eval": 0}, ["num_generations_eval", "at least 1"]),
        ({"reward_weights": ["1"]}, ["reward_weights", "list of numbers"]),
        ({"reward_weights": [float("inf")]}, ["reward_weights", "finite"]),
        ({"reward_timeout": 0}, ["reward_timeout", "more than 0"]),
        ({"sync_ref_model": True}, ["sync_ref_model=True", "beta=0", "above 0"]),
        ({"bema_ref_model": True}, ["bema_ref_model=True", "beta=0"]),
        ({"beta": 0.1, "sync_ref_model": True, "bema_ref_model": True}, ["sync_ref_model", "bema_ref_model"]),
        ({"auto_find_batch_size": True}, ["auto_find_batch_size", "max_tokens_per_micro_batch"]),
        ({"parallelism_config": {"cp_size": 2}}, ["cp_size=2"]),
        ({"log_completions_hub_repo": "me/rows"}, ["log_completions_hub_repo='me/rows'", "log_completions=True"]),
        ({"vllm_importance_sampling_clip_min": 3.0}, ["clip_min=3.0", "below"]),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            ["token_truncate", "both are none"],
        ),
        ({"entropy_coef_min": 2.0}, ["entropy_coef_min=2.0", "entropy_coef_max=1.0"]),
        ({"use_adaptive_entropy": True, "entropy_coef": 1.5}, ["entropy_coef=1.5", "entropy_coef_max=1.0"]),
        ({"use_vllm": True, "rollout_backend": "continuous"}, ["rollout_backend='continuous'", "use_vllm=True"]),
        ({"use_vllm": True, "use_transformers_continuous_batching": True}, ["use_vllm", "continuous_batching"]),
        ({"generation_kwargs": {"num_return_sequences": 4}}, ["num_return_sequences=4", "num_generations"]),
        ({"generation_kwargs": {"do_sample": False}}, ["do_sample=False", "all the same"]),
        ({"generation_kwargs": "temperature"}, ["generation_kwargs", "JSON"]),
    ],
)
def test_grpo_refuses(wrong, parts):
    with pytest.raises(ConfigError) as error:
        GRPOConfig(OUT, **wrong)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("bounds", [[1.0], [1.0, 1.0], [2.0, -2.0], [0.0, 1.0, 2.0]])
def test_reward_clip_range(bounds):
    assert RLOOConfig(OUT, reward_clip_range=(-1, 5)).reward_clip_range == [-1.0, 5.0]
    with pytest.raises(ConfigError, match="reward_clip_range"):
        RLOOConfig(OUT, reward_clip_range=bounds)


def test_rloo_without_reference_cannot_move_it():
    RLOOConfig(OUT, sync_ref_model=True)
    with pytest.raises(ConfigError, match="beta=0"):
        RLOOConfig(OUT, sync_ref_model=True, beta=0)


@pytest.mark.parametrize("backend", ["local", "continuous"])
def test_unknown_generation_options(backend):
    with pytest.raises(ConfigError, match="'min_new_tokns', which is no field .*; did you mean 'min_new_tokens'"):
        GRPOConfig(OUT, rollout_backend=backend, generation_kwargs={"min_new_tokns": 3})


def test_a_server_knows_its_own_generation_options():
    given = {"stop_token_ids_of_a_newer_version": [3]}
    assert GRPOConfig(OUT, rollout_backend="server", generation_kwargs=given).generation_kwargs == given


# Warnings


@pytest.mark.parametrize(
    ("odd", "match"),
    [
        ({"loss_type": "luspo"}, "importance_sampling_level='sequence'"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "ratio of its own"),
        *[({"loss_type": n, "importance_sampling_level": "sequence"}, "For GSPO set loss_type='grpo'")
          for n in ("bnpo", "dr_grpo", "dapo", "cispo")],
        ({"loss_type": "cispo", "epsilon_high": 0.2}, "every update shrinks to 0.2"),
        ({"delta": 1.2}, "takes the place of the clip"),
        ({"cache_implementation": "static"}, "every backend has a cache of its own kind"),
        ({"dataloader_num_workers": 2}, "the rows of a round are read when it begins"),
        ({"train_sampling_strategy": "sequential"}, "shuffle_dataset says"),
        ({"rollout_precision": "bfloat16", "rollout_backend": "server"}, "no effect with rollout_backend='server'"),
        ({"transformers_continuous_batching_config": {"block_size": 8}}, "set rollout_backend='continuous'"),
        ({"vllm_server_port": 9}, "set rollout_backend='server'"),
    ],
)  # fmt: skip
def test_odd_combinations_warn(odd, match):
    with pytest.warns(UserWarning, match=match):
        GRPOConfig(OUT, **odd)


@pytest.mark.parametrize(
    "fine",
    [
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "cispo"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "vespo"},
        {"delta": 2.0},
        {"rollout_backend": "server", "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    ],
)
def test_sound_combinations_do_not(fine):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        GRPOConfig(OUT, **fine)


@pytest.mark.parametrize("config", BOTH)
def test_old_name_of_continuous_batching(config):
    with pytest.warns(FutureWarning, match="use_transformers_paged"):
        built = config(OUT, use_transformers_paged=True)
    assert built.resolved_rollout_backend == "continuous"
    assert dataclasses.replace(built, use_transformers_continuous_batching=False).resolved_rollout_backend == "local"


def test_old_name_of_the_cap():
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_cap"):
        built = GRPOConfig(OUT, vllm_importance_sampling_cap=2.0)
    assert built.vllm_importance_sampling_clip_max == 2.0
    assert dataclasses.replace(built, vllm_importance_sampling_clip_max=4.0).vllm_importance_sampling_clip_max == 4.0


# Spellings of one thing


@pytest.mark.parametrize(
    ("given_", "backend"),
    [
        ({}, "local"),
        ({"rollout_backend": "server"}, "server"),
        ({"use_vllm": True, "vllm_mode": "server"}, "server"),
        ({"use_vllm": True, "vllm_mode": "server", "rollout_backend": "server"}, "server"),
        ({"vllm_mode": "server"}, "local"),
        ({"use_transformers_continuous_batching": True}, "continuous"),
    ],
)
def test_which_backend(given_, backend):
    config = GRPOConfig(OUT, **given_)
    assert config.resolved_rollout_backend == backend
    assert dataclasses.replace(config) == config


@pytest.mark.parametrize(("given_", "kept"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_as_a_flag(given_, kept):
    assert GRPOConfig(OUT, scale_rewards=given_).scale_rewards == kept


def test_sampling_options_of_generation_kwargs_replace_the_fields():
    """trl: a temperature in there changed the sampling, but not the temperature of the log-probabilities."""
    given_ = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 64, "stop_strings": ["\n"]}
    for spelt in (given_, json.dumps(given_)):
        config = GRPOConfig(OUT, temperature=1.0, generation_kwargs=spelt)
        assert (config.temperature, config.top_k, config.max_completion_length) == (0.6, 20, 64)
        assert config.generation_kwargs == {"stop_strings": ["\n"]}
    assert given_["temperature"] == 0.6 and GRPOConfig(OUT, generation_kwargs={"top_p": 0.9}).generation_kwargs is None


def test_sampling_alone_needs_no_rewards():
    """What SDFT will build on: no reference, no reward options."""
    names = {f.name for f in dataclasses.fields(RolloutConfig)}
    assert "num_generations" in names and not names & {"beta", "reward_weights", "sync_ref_model"}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "loss_type": st.sampled_from(POLICY_LOSS_NAMES),
            "importance_sampling_level": st.sampled_from(IMPORTANCE_LEVELS),
            "scale_rewards": st.sampled_from([*REWARD_SCALES, True, False]),
            "vllm_importance_sampling_mode": st.sampled_from(SAMPLER_CORRECTIONS),
            "gradient_accumulation_steps": st.integers(1, 4),
            "generation_batch_size": st.none() | st.sampled_from([8, 16, 32]),
            "temperature": st.floats(0.1, 2),
            "epsilon_high": st.none() | st.floats(0, 8),
            "beta": st.just(0.04),
            "bema_ref_model": st.just(False),
            "reward_weights": st.none() | st.lists(st.floats(-2, 2), max_size=3),
            "generation_kwargs": st.none() | st.just({"top_p": 0.9, "stop_strings": ["x"]}),
            "vllm_mode": st.sampled_from(("server", "colocate")),
            "pad_to_multiple_of": st.sampled_from(["auto", 8, "16", None]),
        },
    )
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_round_trips(values):
    config = GRPOConfig(OUT, **values)
    assert GRPOConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert GRPOConfig.from_json(config.to_json()) == config
    assert dataclasses.replace(config) == config
    assert dataclasses.replace(config, temperature=0.7).temperature == 0.7
