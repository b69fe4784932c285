"""How a server gets the weights: what is written or sent is the policy as a checkpoint has it; all ranks see errors.

NCCL itself is not here: only the order of the requests around it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from preftune.errors import ConfigError, RolloutError
from preftune.rollouts.server import ServerBackend
from preftune.rollouts.transfer import NcclTransfer, ReloadTransfer
from preftune.rollouts.vllm_client import VllmClient
from preftune.rollouts.weights import Follow, policy_weights
from tests.support.vllm_server import FakeVllm
from tests.unit.rollouts.helpers import keys, make_prompts, sampling

IDS = torch.tensor(make_prompts((12,)))


def with_adapter(model, **options):
    torch.manual_seed(0)
    changes = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | options
    adapted = get_peft_model(model, LoraConfig(**changes))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save.default" in name or "delta" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return adapted.eval()


CASES = {
    "plain": lambda tiny_model: tiny_model("llama"),
    "tied": lambda tiny_model: tiny_model("gemma2"),
    "experts": lambda tiny_model: tiny_model("qwen3_moe"),
    "lora": lambda tiny_model: with_adapter(tiny_model("llama")),
    "lora on experts": lambda tiny_model: with_adapter(tiny_model("qwen3_moe"), target_modules=["q_proj"]),
    "whole modules": lambda tiny_model: with_adapter(tiny_model("llama"), modules_to_save=["lm_head"]),
    "tokens": lambda tiny_model: with_adapter(tiny_model("llama"), trainable_token_indices=[3, 9]),
    "switched off": lambda tiny_model: switched_off(with_adapter(tiny_model("llama"))),
}


def switched_off(model):
    model.base_model.disable_adapter_layers()
    return model


@pytest.mark.parametrize("case", CASES)
def test_the_folder_is_the_policy(case, tiny_model, tmp_path):
    """A model loaded from it gives the policy's logits, and the policy is as it was."""
    model = CASES[case](tiny_model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        wanted = model(IDS).logits
    transfer = ReloadTransfer(tmp_path)
    transfer._write({name: t.cpu().contiguous() for name, t in policy_weights(model)})
    base = model.get_base_model() if case not in ("plain", "tied", "experts") else model
    base.config.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        assert torch.allclose(loaded.eval()(IDS).logits, wanted, atol=2e-5)
        assert torch.equal(model(IDS).logits, wanted)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_names_are_those_of_a_checkpoint(tiny_model, tmp_path):
    for family in ("llama", "qwen3_moe"):
        model = tiny_model(family)
        model.save_pretrained(tmp_path / family)
        saved = load_file(tmp_path / family / "model.safetensors")
        assert {name: t.shape for name, t in policy_weights(model)} == {name: t.shape for name, t in saved.items()}


def test_plain_weights_come_one_by_one(tiny_model):
    """A sharded model must never be whole."""
    model = tiny_model("llama")
    name, tensor = next(iter(policy_weights(model)))
    assert tensor.data_ptr() == dict(model.named_parameters())[name].data_ptr()


def test_adapters_that_cannot_be_merged_are_refused(tiny_model):
    virtual = get_peft_model(tiny_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match="virtual tokens"):
        list(policy_weights(virtual))
    tied = get_peft_model(tiny_model("gemma2"), LoraConfig(target_modules=["embed_tokens"]))
    with pytest.raises(ConfigError, match="tied embeddings"):
        list(policy_weights(tied))


def test_a_reload_changes_what_is_drawn(tiny_model, tmp_path):
    old, new = tiny_model("llama"), tiny_model("llama", seed=1)
    with FakeVllm(model=old) as server:
        backend = ServerBackend(server.url, transfer=ReloadTransfer(tmp_path / "w"), connect_timeout=5)
        ask = (make_prompts((4, 6)), 2, sampling(4))
        before = backend.generate(*ask, stream=keys(2))
        backend.load_weights(policy_weights(new))
        after = backend.generate(*ask, stream=keys(2))
        assert after.completion_ids != before.completion_ids
        posts = [path for method, path, _ in server.asked if method == "POST" and path != "/v1/completions"]
        assert posts == ["/collective_rpc", "/reset_prefix_cache"]
        assert (
            str(tmp_path / "w")
            == next(c for _, p, c in server.asked if p == "/collective_rpc")["kwargs"]["weights_path"]
        )
    with FakeVllm(model=new) as server:
        fresh = ServerBackend(server.url, connect_timeout=5).generate(*ask, stream=keys(2))
    assert fresh.completion_ids == after.completion_ids


def test_old_files_do_not_stay(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"):
        (tmp_path / name).write_text("old")
    ReloadTransfer(tmp_path)._write({"a": torch.ones(2)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_server_is_restarted_by_a_function(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ReloadTransfer(tmp_path, restart=lambda: None)
    (tmp_path / "config.json").write_text("{}")
    with FakeVllm() as server:
        answers = iter([(503, b""), (200, b"")])

        def restart():
            assert load_file(tmp_path / "model.safetensors").keys() == {"a"}
            server.routes["GET /health"] = lambda _: next(answers)

        backend = ServerBackend(server.url, transfer=ReloadTransfer(tmp_path, restart=restart), connect_timeout=5)
        backend.load_weights([("a", torch.ones(2))])
        assert next(answers, None) is None  # it waited until the server was up again
        assert "/collective_rpc" not in [path for _, path, _ in server.asked]


def test_failures_of_a_reload_are_named(tmp_path, tiny_model):
    with FakeVllm(model=tiny_model("llama")) as server:
        backend = ServerBackend(server.url, transfer=ReloadTransfer(tmp_path), connect_timeout=5)
        weights = dict(policy_weights(tiny_model("llama")))
        server.routes["POST /reset_prefix_cache"] = lambda _: (200, {"success": False})
        with pytest.raises(RolloutError, match="kept its prefix cache"):
            backend.load_weights(weights.items())
        del server.routes["POST /collective_rpc"]
        with pytest.raises(RolloutError, match="VLLM_SERVER_DEV_MODE=1"):
            backend.load_weights(weights.items())


class Sent:
    """Stands for the group of NCCL: keeps what is broadcast, and what the server had been asked for by then."""

    def __init__(self, server):
        self.server, self.tensors = server, []

    def broadcast(self, tensor):
        self.tensors.append(tensor.clone())
        while not [p for _, p, _ in self.server.asked if p == "/update_weights"]:
            time.sleep(0.005)  # the server's side must run at the same time


def test_the_order_of_requests_around_nccl(monkeypatch):
    monkeypatch.setattr("preftune.rollouts.transfer._CHUNK_BYTES", 40)
    weights = [("a", torch.ones(2, 5)), ("b", torch.zeros(3, dtype=torch.bfloat16)), ("c", torch.full((2,), 7.0))]
    with FakeVllm() as server:
        for route in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            server.routes[f"POST /{route}"] = lambda _: (200, {"message": "done"})
        sent, joined = Sent(server), []

        def connect(world, key):
            joined.append((world, key))
            return sent

        transfer = NcclTransfer("cpu", connect=connect, unique_id=lambda: b"u" * 128)
        backend = ServerBackend(server.url, transfer=transfer, connect_timeout=5)
        for _ in range(2):
            backend.load_weights(iter(weights))
        asked = [(path, content) for _, path, content in server.asked if "weight" in path or "prefix" in path]
    assert joined == [(3, b"u" * 128)]  # the two workers and this process; once
    once = [
        "/start_weight_update",
        "/update_weights",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
    ]
    assert [path for path, _ in asked] == ["/init_weight_transfer_engine", *once, *once]
    info = asked[0][1]["init_info"]
    assert info["rank_offset"] == 1 and info["world_size"] == 3 and len(info["nccl_unique_id_b64"]) == 172
    updates = [content["update_info"] for path, content in asked if path == "/update_weights"][:2]
    assert updates == [
        {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 5]]},
        {"names": ["b", "c"], "dtype_names": ["bfloat16", "float32"], "shapes": [[3], [2]]},
    ]
    assert all(torch.equal(got, tensor) for got, (_, tensor) in zip(sent.tensors, weights * 2, strict=True))


def test_a_refused_update_does_not_wait_for_the_other_side():
    with FakeVllm() as server:
        server.routes["POST /init_weight_transfer_engine"] = lambda _: (400, {"error": {"message": "no engine"}})
        never = threading.Event()
        transfer = NcclTransfer("cpu", connect=lambda *_: never.wait(20), unique_id=lambda: b"u" * 128)
        with pytest.raises(RolloutError, match="no engine"):
            transfer.push(VllmClient(server.url), [("a", torch.ones(1))], 5.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_nccl_without_cuda_names_the_folder():
    with pytest.raises(ConfigError, match="vllm_weights_dir"):
        NcclTransfer()


def test_weights_follow_steps(tiny_model):
    given = []

    class Backend:
        needs_weights = True

        def load_weights(self, named):
            given.append(len(dict(named)))

    follow = Follow(Backend())
    model = tiny_model("llama")
    for step in (0, 0, 1, 1, 1, 0):
        follow(model, step)
    assert given == [len(dict(model.named_parameters()))] * 3
    Backend.needs_weights = False
    follow(model, 5)
    assert len(given) == 3


def _rank(rank, url, folder, results):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    backend = ServerBackend(url, transfer=ReloadTransfer(f"{folder}/w"), connect_timeout=20)
    prompts = make_prompts((3, 4, 5, 6))[2 * rank :][:2]
    drawn = backend.generate(prompts, 2, sampling(3), stream=keys(4)[2 * rank :][:2])
    backend.load_weights(iter([("a", torch.ones(1))]))
    said = ""
    try:
        backend.load_weights(iter([("b", torch.ones(1))]))
    except RolloutError as error:
        said = str(error)
    results.put((rank, drawn.completion_ids, said))
    dist.destroy_process_group()


def _sharded_rank(rank, folder, model, results):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model(IDS)  # leaves the outermost weights whole
    got = {name: t.clone() for name, t in policy_weights(model)}
    same = got.keys() == whole.keys() and all(torch.equal(got[name], whole[name]) for name in whole)
    parts = sum(p.to_local().numel() for p in model.parameters())
    results.put((rank, same, parts < 0.6 * sum(p.numel() for p in whole.values())))
    dist.destroy_process_group()


def forked(target, *arguments) -> list:
    """What two processes of their own put into a queue, in order; where one fails, both end at once."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=target, args=(rank, *arguments, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        multiprocessing.connection.wait([process.sentinel for process in ranks], timeout=60)
        assert all(process.exitcode in (None, 0) for process in ranks), "a rank has failed"
        return sorted(results.get(timeout=60) for _ in ranks)
    finally:
        for process in ranks:
            process.join(20 if sys.exc_info()[0] is None else 0)
            process.kill()


def test_sharded_weights_arrive_whole(tmp_path, tiny_model):
    assert forked(_sharded_rank, tmp_path, tiny_model("llama")) == [(0, True, True), (1, True, True)]


def test_two_ranks(tmp_path):
    """Each draws its own part; one pushes; where that fails both know it."""
    with FakeVllm() as server:
        pushed = []

        def rpc(content):
            pushed.append(set(load_file(tmp_path / "w" / "model.safetensors")))
            return (200, {}) if len(pushed) == 1 else (500, {"error": {"message": "out of memory"}})

        server.routes["POST /collective_rpc"] = rpc
        got = forked(_rank, server.url, tmp_path)
        whole = ServerBackend(server.url, connect_timeout=5).generate(
            make_prompts((3, 4, 5, 6)), 2, sampling(3), stream=keys(4)
        )
    assert [ids for _, part, _ in got for ids in part] == list(whole.completion_ids)
    assert pushed == [{"a"}, {"b"}]
    assert "out of memory" in got[0][2] and "rank 0 could not push" in got[1][2] and "out of memory" in got[1][2]
