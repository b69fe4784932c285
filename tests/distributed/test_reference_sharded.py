"""FSDP2 over two processes: the reference and the averages move shard by shard, to the values of one whole model.

The processes are forked by torch; gloo on the CPU has all that FSDP2 asks for.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.models import tiny_model

pytestmark = pytest.mark.dist


def launch(worker, folder: Path) -> None:
    mp.spawn(_start, args=(worker, str(folder)), nprocs=2, join=True)


def _start(rank: int, worker, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        worker(rank, Path(folder))
    finally:
        dist.destroy_process_group()


def shard(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


class State:
    global_step = 0


class Arguments:
    ref_model_mixup_alpha = 0.3
    ref_model_sync_steps = 1
    should_save = True

    def __init__(self, folder: Path) -> None:
        self.output_dir = str(folder)


def move(policy, reference, folder: Path, *, steps: int = 3):
    """Steps that change the policy by known amounts, with sync and BEMA after each."""
    from preftune.callbacks.bema import BEMACallback
    from preftune.callbacks.sync_ref import SyncRefModelCallback

    bema, sync = BEMACallback(update_freq=1), SyncRefModelCallback(reference)
    args, state = Arguments(folder), State()
    args.should_save = not dist.is_initialized() or dist.get_rank() == 0
    bema.on_train_begin(args, state, None, model=policy)
    for state.global_step in range(1, steps + 1):
        with torch.no_grad():
            for number, p in enumerate(policy.parameters()):
                p.mul_(1 + 0.01 * number * state.global_step)
        bema.on_step_end(args, state, None, model=policy)
        sync.on_step_end(args, state, None, model=policy)
    return bema, args


def check_fsdp2(rank: int, folder: Path) -> None:
    from torch.distributed.tensor import DTensor

    from preftune.data.tree import build_tree
    from preftune.models.distributed import full_state_dict
    from preftune.models.reference import CurrentPolicy, FrozenCopy, Stored, make_reference

    tree = build_tree([[5, 6, 7]], [[[8, 9], [10, 11, 12]]])
    whole, whole_reference = tiny_model(), FrozenCopy(tiny_model(seed=1))
    policy = shard(tiny_model())
    reference = make_reference(policy, ref_model=shard(tiny_model(seed=1)), will_move=True)
    # a forward without backward leaves the outer groups whole, which the moves below must not stumble over
    before = reference.branch_logps(policy, tree, layout="tree")
    torch.testing.assert_close(before, whole_reference.branch_logps(whole, tree, layout="tree"), rtol=0, atol=1e-5)

    (folder / f"whole{rank}").mkdir()
    bema, _ = move(whole, whole_reference, folder / f"whole{rank}")
    sharded_bema, args = move(policy, reference, folder)
    assert all(isinstance(p, DTensor) for p in reference.module.parameters())
    for name, tensor in full_state_dict(reference.module, {}).items():
        assert torch.equal(tensor, whole_reference.module.state_dict()[name]), name
    torch.testing.assert_close(reference.drift(policy), whole_reference.drift(whole), rtol=1e-5, atol=0)
    for name, tensor in full_state_dict(policy, sharded_bema.average).items():
        assert torch.equal(tensor, bema.average[name]), name

    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in reference.state_dict().items()}
    other = FrozenCopy(shard(tiny_model(seed=2)))
    other.load_state_dict(state)
    scores = [r.branch_logps(policy, tree, layout="tree") for r in (reference, other)]
    assert torch.equal(scores[0], scores[1])

    sharded_bema.on_train_end(args, None, None)
    dist.barrier()
    saved = type(whole).from_pretrained(folder / "bema")
    assert all(torch.equal(p, bema.average[name]) for name, p in saved.named_parameters())

    # each rank scores a row of its own, and both know both
    rows = [tree, build_tree([[20, 21]], [[[22], [23, 24]]])]
    store = Stored(CurrentPolicy(), folder / "store")
    assert store.fill([rows[rank]], policy, layout="tree") == 1
    twin = copy.deepcopy(whole)
    for row in rows:
        expected = FrozenCopy(twin).branch_logps(twin, row, layout="tree")
        torch.testing.assert_close(store.branch_logps(policy, row, layout="tree"), expected, rtol=0, atol=1e-4)

    # a row of a stream that one rank does not know yet: the other takes part in its forward
    late = Stored(reference, folder / "late")
    late.fill([rows[0]], policy, layout="tree")
    late.expect_streams()
    got = late.branch_logps(policy, rows[rank], layout="tree")
    expected = [reference.branch_logps(policy, row, layout="tree") for row in rows]
    torch.testing.assert_close(got, expected[rank], rtol=0, atol=1e-4)
    late.save()
    assert len(late) == 4


def test_fsdp2_equals_one_whole_model(tmp_path):
    launch(check_fsdp2, tmp_path)


def check_fsdp2_adapter(rank: int, folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard

    from preftune.data.tree import build_tree
    from preftune.models.logprobs import token_scores
    from preftune.models.reference import make_reference

    torch.manual_seed(0)
    policy = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    reference = make_reference(policy, peft_is_fresh=True, will_move=True)
    for layer in policy.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    tree = build_tree([[5, 6, 7]], [[[8, 9], [10, 11, 12]]])
    # the first forward that FSDP2 sees is the reference's: the policy must still get its gradients
    start = reference.branch_logps(policy, tree, layout="padded")
    policy.train()
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        token_scores(policy, tree, layout="padded").logps.mean().backward()
        assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(reference.branch_logps(policy, tree, layout="padded"), start)
    reference.blend_(None, 1.0, policy=policy)
    policy.eval()
    moved = token_scores(policy, tree, layout="padded").branch_logps
    assert (moved - start).abs().min() > 1e-4
    assert torch.equal(reference.branch_logps(policy, tree, layout="padded"), moved)


def test_fsdp2_adapters_keep_their_gradients(tmp_path):
    launch(check_fsdp2_adapter, tmp_path)
