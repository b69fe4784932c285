"""GRPO through a server that samples with the weights which the trainer hands to it; and what a config asks for.

The server's log-probs, ends and weights must be the trainer's, or the checks here move.
"""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
from datasets import Dataset
from peft import LoraConfig

from preftune.configs.grpo import GRPOConfig
from preftune.configs.rloo import RLOOConfig
from preftune.errors import ConfigError, RolloutError
from preftune.rollouts.choose import make_backend, sampling_of
from preftune.rollouts.transfer import ReloadTransfer
from preftune.trainers.grpo import GRPOTrainer
from tests.support.runs import logged, options
from tests.support.vllm_server import FakeVllm

PROMPTS = ["the cat", "a longer prompt here", "dog", "one more of them"]


def letters(completions, **_):
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


def trained(server, folder, tiny_model, tokenizer, peft_config=None, **changes):
    defaults = {
        "num_generations": 4, "max_completion_length": 5, "per_device_train_batch_size": 8, "max_steps": 2,
        "rollout_backend": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 5.0, "beta": 0.0,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=letters,
        args=GRPOConfig(**options(folder, **defaults | changes)),
        train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


def posts(server):
    """Rounds and hand-overs in order."""
    names = {"/v1/completions": "draw", "/collective_rpc": "load"}
    sent = [names.get(path) for method, path, content in server.asked if "logit_bias" not in (content or {})]
    return [name for i, name in enumerate(sent) if name and (name != "draw" or sent[i - 1] != "draw")]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_server_draws_with_the_weights_of_each_step(tmp_path, tiny_model, tokenizer, lora):
    adapter = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian") if lora else None
    with FakeVllm(model=tiny_model(seed=5)) as server:  # started on other weights than the policy's
        trainer = trained(server, tmp_path, tiny_model, tokenizer, adapter, temperature=0.8, max_steps=3)
        assert posts(server) == ["load", "draw"] * 3
        first = server.completions()[0]
    assert first["temperature"] == 0.8 and first["n"] == 4 and first["stop_token_ids"] == [tokenizer.eos_token_id]
    # at lr 1e-2 weights of the step before, or those it was started on, would be far off
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * 3, abs=1e-4)
    assert len(set(logged(trainer, "reward"))) > 1


def test_reused_rounds_and_evaluation_load_once_a_step(tmp_path, tiny_model, tokenizer):
    """Two steps a round: one hand-over for both; the evaluation after the second needs the weights of then."""
    with FakeVllm(model=tiny_model()) as server:
        trainer = trained(
            server, tmp_path, tiny_model, tokenizer, max_steps=4, steps_per_generation=2, generation_batch_size=None,
            gradient_accumulation_steps=1, per_device_train_batch_size=4,
        )  # fmt: skip
        assert posts(server) == ["load", "draw"] * 2
        rows = Dataset.from_list([{"prompt": text} for text in PROMPTS])
        first = trainer.evaluate(rows)
        again = trainer.evaluate(rows)
        assert posts(server)[4:] == ["load", "draw"] or posts(server)[4:] == ["load", "draw", "draw"]
        assert first["eval_reward"] == again["eval_reward"]


def test_a_server_that_dies_ends_the_run(tmp_path, tiny_model, tokenizer):
    with FakeVllm(model=tiny_model()) as server:
        complete, calls = server.routes["POST /v1/completions"], []

        def dies(request):
            calls.append(1)
            return complete(request) if len(calls) < 6 else (500, {"error": {"message": "EngineCore died"}})

        server.routes["POST /v1/completions"] = dies
        with pytest.raises(RolloutError, match="EngineCore died"):
            trained(server, tmp_path, tiny_model, tokenizer, max_steps=9)


def test_without_log_probs_training_goes_on_uncorrected(tmp_path, tiny_model, tokenizer, caplog):
    with FakeVllm(model=tiny_model()) as server, caplog.at_level(logging.WARNING, "preftune"):
        trainer = trained(server, tmp_path, tiny_model, tokenizer, top_k=20)
    assert caplog.text.count("--logprobs-mode") == 1
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == []
    assert len(logged(trainer, "reward")) == 2


# What a config asks for


def config(tmp_path, kind=GRPOConfig, **changes):
    return kind(**options(tmp_path, num_generations=2, **changes))


@pytest.mark.parametrize("asked", [{"rollout_backend": "server"}, {"use_vllm": True, "vllm_mode": "server"}])
def test_a_config_makes_the_backend(tmp_path, tiny_model, tokenizer, asked):
    with FakeVllm(max_model_len=77) as server:
        args = config(tmp_path, vllm_server_port=server.port, vllm_server_timeout=5.0, ddp_timeout=1000, **asked)
        backend = make_backend(args, tiny_model(), tokenizer)
        assert backend.client.url == f"http://localhost:{server.port}" and backend._timeout == 900.0
        assert backend._transfer.folder == tmp_path / "vllm_weights"
        named = copy.copy(args)
        named.vllm_weights_dir = str(tmp_path / "elsewhere")
        assert make_backend(named, tiny_model(), tokenizer)._transfer.folder == tmp_path / "elsewhere"
        assert isinstance(backend._transfer, ReloadTransfer)


def test_a_regular_expression_goes_to_the_server(tmp_path):
    args = config(
        tmp_path, rollout_backend="server", vllm_structured_outputs_regex="a+", generation_kwargs={"stop": "x"}
    )
    sampling = sampling_of(args, [2])
    assert sampling.extra == {"stop": "x", "structured_outputs": {"regex": "a+"}} and not sampling.is_plain
    with pytest.raises(ConfigError, match="vllm_structured_outputs_regex='a\\+' needs a vLLM server"):
        config(tmp_path, vllm_structured_outputs_regex="a+")


@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig])
@pytest.mark.parametrize("asked", [{"use_vllm": True}, {"rollout_backend": "vllm"}])
def test_vllm_in_this_process_is_refused_with_the_way_out(tmp_path, kind, asked):
    with pytest.raises(ConfigError, match="vllm serve MODEL.*vllm_mode='server'"):
        config(tmp_path, kind, **asked)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("vllm_gpu_memory_utilization", 0.8, "--gpu-memory-utilization"),
        ("vllm_max_model_length", 500, "--max-model-len"),
        ("vllm_tensor_parallel_size", 2, "--tensor-parallel-size"),
        ("vllm_model_impl", "transformers", "--model-impl"),
        ("vllm_enable_sleep_mode", True, "no memory"),
        ("vllm_group_port", 5000, "without a port"),
    ],
)
def test_options_without_effect_warn(tmp_path, option, value, said):
    with pytest.warns(UserWarning, match=f"{option}={value!r} has no effect.*{said}"):
        config(tmp_path, rollout_backend="server", **{option: value})


def test_a_server_that_is_not_used_warns(tmp_path):
    with pytest.warns(UserWarning, match="vllm_server_port=9000 has no effect with rollout_backend='local'"):
        config(tmp_path, vllm_server_port=9000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(tmp_path, rollout_backend="server", vllm_server_port=9000)
