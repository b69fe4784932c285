"""Rollouts by a real vLLM server on the CPU: PREFTUNE_VLLM_PYTHON names the Python of an environment that has vLLM.

What the fake server of the unit tests pretends is true of this one, or a test here fails.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from preftune.configs.grpo import GRPOConfig
from preftune.errors import ConfigError, RolloutError
from preftune.rollouts.local import LocalBackend
from preftune.rollouts.server import ServerBackend
from preftune.rollouts.transfer import ReloadTransfer
from preftune.rollouts.weights import policy_weights
from preftune.trainers.grpo import GRPOTrainer
from preftune.types import Rollouts
from tests.support.models import tiny_model as make_model
from tests.support.runs import logged, options
from tests.unit.rollouts.helpers import keys, make_prompts, sampling

PYTHON = os.environ.get("PREFTUNE_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="set PREFTUNE_VLLM_PYTHON to a Python that has vLLM (docs/rollouts.md)"),
]
PROMPTS = make_prompts((2, 6, 9, 14))
KEYS = keys(4)
ENDS = tuple(range(2, 320, 7))


def model_of(seed: int):
    return make_model("llama", seed=seed, hidden_size=64, num_attention_heads=2, num_key_value_heads=2)


@pytest.fixture(scope="module")
def served(tmp_path_factory, tokenizer):
    """The address of a server of `model_of(0)`; it is ended with everything that it started."""
    folder = tmp_path_factory.mktemp("vllm")
    model_of(0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert PYTHON is not None
    line = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model"), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "16", "--enforce-eager",
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            line, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}", folder
    except BaseException:
        print((folder / "log").read_text()[-5000:])
        raise
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture(scope="module")
def backend(served):
    url, folder = served
    return ServerBackend(
        url, transfer=ReloadTransfer(folder / "weights"), connect_timeout=400.0, generation_timeout=200.0
    )


@pytest.fixture(autouse=True)
def _first_weights(backend):
    """Every test begins with those that the server was started with."""
    backend.load_weights(policy_weights(model_of(0)))


@torch.no_grad()
def largest_gap(model, rollouts: Rollouts, temperature: float) -> float:
    """Between the server's log-probabilities and those of a plain forward, over all tokens."""
    assert rollouts.logps is not None
    gaps = []
    for row, (ids, logps) in enumerate(zip(rollouts.completion_ids, rollouts.logps, strict=True)):
        prompt = list(rollouts.prompt_ids[row // rollouts.num_generations])
        scores = (model(torch.tensor([[*prompt, *ids]])).logits[0] / temperature).log_softmax(-1)
        gaps += [abs(float(scores[len(prompt) + i - 1, t]) - logps[i]) for i, t in enumerate(ids)]
    return max(gaps)


def test_samples_and_their_log_probs(backend):
    wanted = sampling(12, temperature=0.7, eos_token_ids=ENDS)
    rollouts = backend.generate(PROMPTS, 6, wanted, stream=KEYS)
    assert largest_gap(model_of(0), rollouts, 0.7) < 1e-4
    assert set(rollouts.finish_reasons) == {"stop", "length"}
    for ids, reason in zip(rollouts.completion_ids, rollouts.finish_reasons, strict=True):
        assert all(token not in ENDS for token in ids[:-1]) and (reason == "stop") == (ids[-1] in ENDS)
    assert len(set(map(tuple, rollouts.completion_ids))) > 18  # some end at once, and are the same
    alone = backend.generate(PROMPTS[2:3], 6, wanted, stream=KEYS[2:3])
    assert [list(ids) for ids in alone.completion_ids] == [list(ids) for ids in rollouts.completion_ids[12:18]]
    assert backend.generate(PROMPTS, 6, wanted, stream=keys(4, 1)).completion_ids != rollouts.completion_ids


def test_greedy_is_that_of_the_local_backend(backend):
    wanted = sampling(10, temperature=0.0, eos_token_ids=ENDS)
    local = LocalBackend(model_of(0)).generate(PROMPTS, 2, wanted, stream=KEYS)
    got = backend.generate(PROMPTS, 2, wanted, stream=KEYS)
    assert [list(ids) for ids in got.completion_ids] == [list(ids) for ids in local.completion_ids]
    assert list(got.finish_reasons) == list(local.finish_reasons)


def test_new_weights_are_drawn_with(backend):
    wanted = sampling(8)
    before = backend.generate(PROMPTS, 2, wanted, stream=KEYS)
    backend.load_weights(policy_weights(model_of(7)))
    after = backend.generate(PROMPTS, 2, wanted, stream=KEYS)
    assert after.completion_ids != before.completion_ids
    assert largest_gap(model_of(7), after, 1.0) < 1e-4 < largest_gap(model_of(0), after, 1.0)


def test_options_of_the_server(backend, tokenizer):
    regex = {"structured_outputs": {"regex": "(ab|cd){2}"}}
    ends = sampling(12, eos_token_ids=(tokenizer.eos_token_id,), extra=regex)
    rollouts = backend.generate(PROMPTS, 3, ends, stream=KEYS)
    texts = tokenizer.batch_decode(rollouts.completion_ids, skip_special_tokens=True)
    assert all(re.fullmatch("(ab|cd){2}", text) for text in texts) and len(set(texts)) > 1
    assert rollouts.logps is None  # drawn from a part of the vocabulary
    few = backend.generate(PROMPTS, 8, sampling(4, top_k=1), stream=KEYS)
    greedy = backend.generate(PROMPTS, 8, sampling(4, temperature=0.0), stream=KEYS)
    assert few.completion_ids == greedy.completion_ids
    with pytest.raises(ConfigError, match="did you mean 'min_tokens'"):
        backend.generate(PROMPTS, 2, sampling(4, extra={"min_token": 2}), stream=KEYS)


def test_what_the_server_refuses(backend):
    with pytest.raises(RolloutError, match="status 400: .*out of vocabulary"):
        backend.generate([[5, 320]], 1, sampling(4), stream=keys(1))
    with pytest.raises(RolloutError, match="a prompt of 64 tokens"):
        backend.generate(make_prompts((64,)), 1, sampling(4), stream=keys(1))


def test_training(served, tmp_path, tokenizer):
    """The policy begins with other weights than the server, and moves far at each step."""

    def letters(completions, **_):
        return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]

    changes = {
        "num_generations": 4, "max_completion_length": 8, "per_device_train_batch_size": 8, "temperature": 0.8,
        "rollout_backend": "server", "vllm_server_base_url": served[0], "max_steps": 4,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=model_of(7),
        reward_funcs=letters,
        args=GRPOConfig(**options(tmp_path, **changes)),
        train_dataset=Dataset.from_list([{"prompt": t} for t in ["the cat", "a longer prompt here", "dog", "one"]]),
        processing_class=tokenizer,
    )
    trainer.train()
    gaps = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(gaps) == 4 and max(gaps) < 1e-4
    assert Path(tmp_path / "vllm_weights" / "model.safetensors").is_file()
