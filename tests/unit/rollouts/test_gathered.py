"""Rollouts of a policy sharded by FSDP2 over two processes: those of the whole model, on every rank, from one gather.

The yardstick is the same backend on the model before it is sharded, adapters and all.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import PromptTuningConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from preftune.configs import GRPOConfig
from preftune.errors import ConfigError, RolloutError
from preftune.models.distributed import local_shard, reshard
from preftune.rollouts.choose import make_backend
from preftune.rollouts.continuous import ContinuousBackend
from preftune.rollouts.local import LocalBackend
from preftune.rollouts.weights import policy_weights, without_peft
from tests.unit.rollouts.helpers import keys, make_prompts, sampling
from tests.unit.rollouts.test_kept import Counted
from tests.unit.rollouts.test_server_weights import CASES, forked
from tests.unit.rollouts.test_snapshot import weights

PROMPTS = make_prompts((3, 5, 9, 9))
OWN = [PROMPTS, []]  # the second rank has no prompt


def drawn(backend, prompts=PROMPTS):
    rollouts = backend.generate(prompts, 2, sampling(6), stream=keys(len(prompts)))
    return rollouts.completion_ids, rollouts.logps


def shard(model, *, again=True):
    """`again`: each layer gives its weights back after a forward."""
    base = without_peft(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=again)
    return fully_shard(model, mesh=mesh)


def meet(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)


def _draws(rank, folder, models, results):
    meet(rank, folder)
    report = {}
    for case, model in models.items():
        whole = copy.deepcopy(model)
        precisions = ("model", "bfloat16") if case in ("tied", "lora") else ("model",)
        wanted = {precision: drawn(LocalBackend(whole, precision=precision)) for precision in precisions}
        shards = {name: local_shard(p).clone() for name, p in weights(shard(model, again=case != "tied")).items()}
        with torch.no_grad():
            model(torch.tensor(PROMPTS[:1]))  # leaves the outermost weights whole, or all
        for precision, (ids, logps) in wanted.items():
            backend = LocalBackend(model, precision=precision)
            for prompts in (PROMPTS, OWN[rank]):
                got = drawn(backend, prompts)
                assert got[0] == ids[: len(got[0])], (case, precision)
                assert all(a == pytest.approx(b, abs=1e-4) for a, b in zip(got[1], logps)), (case, precision)
            assert not any(p.numel() for p in backend._snapshot.model.parameters()), case
        reshard(model)
        assert all(torch.equal(local_shard(p), shards[name]) for name, p in model.named_parameters()), case
        sent, merged = ({name: t.clone() for name, t in policy_weights(m)} for m in (model, whole))
        assert sent.keys() == merged.keys() and all(torch.equal(sent[name], merged[name]) for name in sent), case
        report[case] = len(sent)
    results.put((rank, report))
    dist.destroy_process_group()


def test_draws_what_the_whole_model_draws(tmp_path, tiny_model):
    """Also the weights that a server would get are those of the whole model."""
    models = {case: make(tiny_model) for case, make in CASES.items()}
    (_, first), (_, second) = forked(_draws, tmp_path, models)
    assert first == second and first.keys() == CASES.keys()


def _alone(rank, folder, model, results):
    """The mesh has one rank, whose shards are the weights themselves: an adapter must not be merged into those."""
    meet(rank, folder)
    ids, _ = drawn(LocalBackend(copy.deepcopy(model)))
    before = {name: p.clone() for name, p in weights(model).items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "one"))["one"])
    assert drawn(LocalBackend(model))[0] == ids
    results.put((rank, all(torch.equal(local_shard(p), before[name]) for name, p in model.named_parameters())))
    dist.destroy_process_group()


def test_the_policy_is_only_read(tmp_path, tiny_model):
    assert forked(_alone, tmp_path, CASES["lora"](tiny_model)) == [(0, True), (1, True)]


def _talks(rank, folder, model, results):
    """The first rank has one turn, the second three; then weights change, and a call outside follows them."""
    meet(rank, folder)
    shard(model)
    backend = LocalBackend(model)
    with backend.conversations():
        first = drawn(backend)
        for _ in range(2 * rank):
            assert drawn(backend)[0] == first[0]
    with torch.no_grad():
        for p in model.parameters():
            local_shard(p).mul_(-1)
    with backend.conversations():
        second = drawn(backend)
    assert second[0] == drawn(backend)[0] != first[0]
    with pytest.raises(RolloutError, match="rollout_backend='local'"):
        ContinuousBackend(model).generate(PROMPTS, 1, sampling(2), stream=keys(4))
    results.put((rank, first[0]))
    dist.destroy_process_group()


def test_a_block_of_conversations_gathers_once(tmp_path, tiny_model):
    """Ranks with more turns wait for no other."""
    (_, one), (_, two) = forked(_talks, tmp_path, tiny_model("llama"))
    assert one == two


def test_of_a_copy_in_bfloat16_too(tiny_model):
    """In a block it stays as it was at its beginning, whatever is written."""
    model = tiny_model("llama")
    backend = LocalBackend(model, precision="bfloat16")
    with backend.conversations():
        first = drawn(backend)
        model.model.layers[0].mlp.down_proj.weight.data.mul_(-1)
        assert drawn(backend)[0] == first[0]
    assert drawn(backend)[0] != first[0]


def accelerator(kind="FSDP", stage=3, is_fsdp2=True):
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    return SimpleNamespace(distributed_type=SimpleNamespace(value=kind), state=state, is_fsdp2=is_fsdp2)


@pytest.mark.parametrize(
    ("options", "world", "said"),
    [
        ({"ds3_gather_for_generation": False}, accelerator(), "Set it to True"),
        ({"ds3_gather_for_generation": False}, accelerator("DEEPSPEED"), "rollout_backend='server'"),
        ({"rollout_backend": "continuous"}, accelerator(), "rollout_backend='local'"),
        ({}, accelerator(is_fsdp2=False), "fsdp_version: 2"),
    ],
)
def test_what_is_refused_when_the_trainer_is_built(tmp_path, tiny_model, tokenizer, options, world, said):
    args = GRPOConfig(str(tmp_path), report_to="none", **options)
    with pytest.raises(ConfigError, match=said):
        make_backend(args, tiny_model("llama"), tokenizer, world)


def test_what_cannot_be_copied_is_refused_too(tmp_path, tiny_model, tokenizer):
    args = GRPOConfig(str(tmp_path), report_to="none")
    virtual = get_peft_model(tiny_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match="virtual tokens"):
        make_backend(args, virtual, tokenizer, accelerator())
    make_backend(args, virtual, tokenizer, accelerator("MULTI_GPU"))


def test_weights_that_stay_whole_need_no_copy(tmp_path, tiny_model, tokenizer):
    """ZeRO-2, DDP and one process, where the option says nothing."""
    args = GRPOConfig(str(tmp_path), report_to="none", ds3_gather_for_generation=False)
    for world in (accelerator("DEEPSPEED", stage=2), accelerator("MULTI_GPU"), accelerator("NO"), None):
        backend = make_backend(args, model := tiny_model("llama"), tokenizer, world)
        drawn(backend)
        assert backend._snapshot is None
        with Counted(model) as counted:
            drawn(backend)
        assert counted.tokens
