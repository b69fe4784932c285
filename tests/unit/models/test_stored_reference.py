"""Stored log-probabilities: the numbers of the live reference, found again on disk, never those of another set-up."""

from __future__ import annotations

import random
from importlib import metadata

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file

from preftune.data.tree import build_tree, select_prompts
from preftune.errors import ReferenceError
from preftune.models import logprobs
from preftune.models.reference import MovableReference, Stored, make_reference
from preftune.models.stored import branch_keys
from tests.support.models import tiny_model
from tests.unit.models.reference_helpers import OTHER_TREE, TREE, lora_policy, train


@pytest.fixture
def forwards(monkeypatch):
    """Counts passes through the scorer."""
    calls, real = [], logprobs.token_scores
    monkeypatch.setattr(logprobs, "token_scores", lambda *a, **k: calls.append(a[1]) or real(*a, **k))
    return calls


def stored(policy, root, **options) -> Stored:
    reference = make_reference(policy, precompute=True, store_dir=root, **options)
    assert isinstance(reference, Stored)
    return reference


SET_UPS = {
    "full": (tiny_model, {}),
    "given": (tiny_model, {"ref_model": None}),
    "fresh adapter": (lora_policy, {"peft_is_fresh": True}),
    "ready adapter": (lambda: lora_policy(nonzero=True), {}),
}


@pytest.mark.parametrize("set_up", SET_UPS)
def test_the_numbers_are_those_of_the_live_reference(set_up, tmp_path):
    """R009: also after training, in another order and in other batches."""
    make, options = SET_UPS[set_up]
    options = dict(options)
    if "ref_model" in options:
        options["ref_model"] = tiny_model(seed=5)
    policy, twin = make(), make()
    live = make_reference(twin, **options).branch_logps(twin, TREE, layout="padded")
    reference = stored(policy, tmp_path, **options)
    assert reference.fill([TREE, OTHER_TREE], policy, layout="padded") == 3
    train(policy)
    got = reference.branch_logps(policy, select_prompts(TREE, [1, 0]), layout="padded")
    torch.testing.assert_close(got, live[[2, 3, 0, 1]], rtol=0, atol=1e-5)
    assert got.dtype == torch.float32


def test_no_second_model_is_held():
    """R012: nothing is copied, and a model that was given is let go when the numbers are there."""
    policy = tiny_model()
    reference = stored(policy, None)
    assert reference.module is None
    assert not [v for v in vars(reference.live).values() if isinstance(v, torch.nn.Module)]
    other = stored(policy, None, ref_model=tiny_model(seed=1))
    assert other.module is not None
    other.release()
    assert other.module is other.live is None


def test_a_second_run_finds_the_numbers(tmp_path, forwards):
    for expected in (1, 0, 1):
        policy = tiny_model()
        reference = stored(policy, tmp_path)
        trees = [TREE, OTHER_TREE] if expected and len(forwards) else [TREE]
        forwards.clear()
        reference.fill(trees, policy, layout="padded")
        assert len(forwards) == expected
        forwards.append(None)
    assert len(reference) == 6
    assert len(list(tmp_path.iterdir())) == 1


CHANGES = (
    "ld_alpha", "layout", "precision", "weights", "weights of the adapter", "dtype", "config", "adapter scale",
    "given reference", "attention", "torch", "transformers", "peft", "matmul",
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_numbers_changes_the_key(change, tmp_path, forwards, monkeypatch):
    policy = lora_policy(nonzero=True)
    stored(policy, tmp_path).fill([TREE], policy, layout="padded")
    options: dict = {"layout": "padded"}
    ref_model = None
    if change == "ld_alpha":
        options["ld_alpha"] = 0.5
    elif change == "layout":
        options["layout"] = "tree"
    elif change == "precision":
        options["precision"] = "bf16"
    elif change == "weights":
        with torch.no_grad():
            policy.get_parameter("base_model.model.model.norm.weight")[0] += 1e-3
    elif change == "config":
        policy.config.rope_parameters["rope_theta"] = 123.0
    elif change == "weights of the adapter":
        with torch.no_grad():
            next(p for n, p in policy.named_parameters() if "lora_B" in n)[0, 0] += 1e-3
    elif change == "dtype":
        policy = policy.double()
    elif change == "attention":
        policy.set_attn_implementation("eager")
    elif change in ("torch", "transformers", "peft"):
        real = metadata.version
        monkeypatch.setattr(metadata, "version", lambda name: "99.0" if name == change else real(name))
    elif change == "matmul":
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    elif change == "adapter scale":
        policy.peft_config["default"].lora_alpha = 4
    else:
        ref_model = tiny_model(seed=7)
    forwards.clear()
    stored(policy, tmp_path, ref_model=ref_model).fill([TREE], policy, **options)
    assert len(forwards) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_where_the_model_lies_does_not_change_the_key(tmp_path, forwards):
    for path in ("here", "there"):
        policy = tiny_model()
        policy.config._name_or_path = path
        stored(policy, tmp_path).fill([TREE], policy, layout="padded")
    assert len(forwards) == 1


def test_where_an_adapter_lies_does_not_change_the_key(tmp_path, forwards):
    for path in ("here", "there"):
        policy = lora_policy(nonzero=True)
        policy.peft_config["default"].base_model_name_or_path = path
        stored(policy, tmp_path).fill([TREE], policy, layout="padded")
    assert len(forwards) == 1


def test_branches_are_told_apart_by_all_that_matters():
    rows = [
        ([1, 2], [[3], [4]], None),
        ([1], [[2, 3], [4]], None),
        ([1, 2], [[3, 4]], None),
        ([1, 2, 3], [[4]], None),
        ([], [[1, 2, 3, 4]], None),
        ([1, 2], [[3, 4]], [[0, 1]]),
        ([1, 2], [[3, 4]], [[1, 0]]),
    ]
    keys = [branch_keys(build_tree([p], [b], None if m is None else [m])) for p, b, m in rows]
    flat = [key for row in keys for key in row]
    assert len(set(flat)) == len(flat) == 9
    # [1, 2] -> [3, 4] with a sibling or without one is the same branch, but for length desensitising
    assert branch_keys(build_tree([[1, 2]], [[[9], [3, 4]]]))[1] == keys[2][0]
    alone, beside = ([[3, 4], [5, 6]], [[3, 4], [5]])
    differ = [branch_keys(build_tree([[1, 2]], [pair]), 0.5)[0] for pair in (alone, beside)]
    assert differ[0] != differ[1]


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), max_size=3),
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


@given(ROWS, st.randoms(use_true_random=False))
def test_a_branch_has_the_same_key_in_every_batch(rows, shuffler: random.Random):
    """Any number of prompts, and of branches a prompt; equal keys if and only if prompt and branch are equal."""
    tree = build_tree([prompt for prompt, _ in rows], [branches for _, branches in rows])
    content = [(tuple(prompt), tuple(branch)) for prompt, branches in rows for branch in branches]
    keys = branch_keys(tree)
    assert len(set(zip(content, keys, strict=True))) == len(set(content)) == len(set(keys))
    order = list(range(len(rows)))
    shuffler.shuffle(order)
    shuffled = build_tree([rows[i][0] for i in order], [rows[i][1] for i in order])
    again = [(tuple(rows[i][0]), tuple(branch)) for i in order for branch in rows[i][1]]
    assert dict(zip(again, branch_keys(shuffled), strict=True)) == dict(zip(content, keys, strict=True))


def test_unknown_rows_and_other_options_are_refused(tmp_path):
    policy = tiny_model()
    reference = stored(policy, tmp_path)
    reference.fill([TREE], policy, layout="padded")
    with pytest.raises(ReferenceError, match=r"branch 0 .*precompute_ref_log_probs=False"):
        reference.branch_logps(policy, OTHER_TREE, layout="padded")
    with pytest.raises(ReferenceError, match=r"'padded', None.*asked for.*0.5"):
        reference.branch_logps(policy, TREE, layout="padded", ld_alpha=0.5)
    with pytest.raises(ReferenceError, match="'tree'"):
        reference.fill([TREE], policy, layout="tree")
    with pytest.raises(ReferenceError, match="stream"):
        reference.expect_streams()
    reference.release()
    reference.fill([select_prompts(OTHER_TREE, [0])], policy, layout="padded")  # still what it was
    train(policy)
    reference.fill([TREE], policy, layout="padded")  # nothing is missing
    with pytest.raises(ReferenceError, match="stored before training"):
        reference.fill([build_tree([[1]], [[[2], [3]]])], policy, layout="padded")


def test_a_released_reference_cannot_score_more(tmp_path):
    policy = tiny_model()
    reference = stored(policy, tmp_path, ref_model=tiny_model(seed=1))
    reference.fill([TREE], policy, layout="padded")
    reference.release()
    with pytest.raises(ReferenceError, match="released"):
        reference.fill([OTHER_TREE], policy, layout="padded")
    with pytest.raises(ReferenceError, match="not there any more"):
        reference.branch_logps(policy, OTHER_TREE, layout="padded")
    with pytest.raises(ReferenceError, match="IterableDataset"):
        reference.expect_streams()


LASTING = {
    "copy": (tiny_model, {"streams": True}),
    "given": (tiny_model, {"ref_model": None}),
    "fresh adapter": (lora_policy, {"peft_is_fresh": True}),
    "ready adapter": (lambda: lora_policy(nonzero=True), {"streams": True}),
}


@pytest.mark.parametrize("set_up", LASTING)
def test_rows_that_come_later_are_scored_once_by_what_training_does_not_change(set_up, tmp_path, forwards):
    make, options = LASTING[set_up]
    if "ref_model" in options:
        options = {"ref_model": tiny_model(seed=5)}
    policy, twin = make(), make()
    live = make_reference(twin, **{k: v for k, v in options.items() if k != "streams"})
    expected = live.branch_logps(twin, TREE, layout="padded")
    reference = stored(policy, tmp_path, **options)
    reference.fill([], policy, layout="padded")
    reference.expect_streams()
    train(policy)
    forwards.clear()
    for _ in range(2):
        got = reference.branch_logps(policy, TREE, layout="padded")
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert len(forwards) == 1
    reference.save()
    fresh = make()
    again = stored(fresh, tmp_path, **options)
    assert again.fill([TREE], fresh, layout="padded") == 0


def test_two_runs_at_once_keep_the_rows_of_both(tmp_path):
    """Each writes a file of its own: what one has found the other does not overwrite."""
    policy = tiny_model()
    one, two = stored(policy, tmp_path), stored(policy, tmp_path)
    for reference in (one, two):
        reference.fill([], policy, layout="padded")
    one.fill([TREE], policy, layout="padded")
    two.fill([OTHER_TREE], policy, layout="padded")
    third = stored(policy, tmp_path)
    assert third.fill([TREE, OTHER_TREE], policy, layout="padded") == 0
    assert len(list(third.folder.glob("*.safetensors"))) == 2


def test_a_damaged_file_is_computed_anew(tmp_path, caplog):
    policy = tiny_model()
    reference = stored(policy, tmp_path)
    reference.fill([TREE], policy, layout="padded")
    (path,) = reference.folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:40])
    assert stored(policy, tmp_path).fill([TREE], policy, layout="padded") == 2
    assert "computed anew" in caplog.text
    assert load_file(path)["values"].shape == (4,)


def test_many_branches_of_a_prompt_are_stored_one_by_one(tmp_path, forwards):
    """Branches of one prompt may come back in other company, as a completion beside one that is not its own does."""
    policy = tiny_model()
    reference = stored(policy, tmp_path)
    reference.fill([build_tree([[5, 6]], [[[7], [8, 9], [10]]])], policy, layout="tree")
    live = make_reference(tiny_model())
    for branches in ([[8, 9]], [[10], [7]], [[10], [8, 9], [7]]):
        tree = build_tree([[5, 6]], [branches])
        got = reference.branch_logps(policy, tree, layout="tree")
        torch.testing.assert_close(got, live.branch_logps(policy, tree, layout="tree"), rtol=0, atol=1e-4)


def test_under_a_fresh_adapter_more_rows_can_be_stored_while_it_trains(tmp_path):
    policy = lora_policy()
    live = make_reference(lora_policy(), peft_is_fresh=True)
    reference = stored(policy, tmp_path, peft_is_fresh=True)
    reference.fill([TREE], policy, layout="padded")
    train(policy)
    reference.fill([OTHER_TREE], policy, layout="padded")
    got = reference.branch_logps(policy, OTHER_TREE, layout="padded")
    torch.testing.assert_close(got, live.branch_logps(policy, OTHER_TREE, layout="padded"), rtol=0, atol=1e-5)


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path, caplog):
    """R010."""
    file = tmp_path / "file"
    file.write_text("")
    policy = tiny_model()
    reference = stored(policy, file / "below")
    reference.fill([TREE], policy, layout="padded")
    assert reference.branch_logps(policy, TREE, layout="padded").shape == (4,)
    assert "stay in memory" in caplog.text


def test_it_cannot_move_and_has_no_tokens():
    reference = stored(tiny_model(), None)
    assert not isinstance(reference, MovableReference)
    assert "token_scores" not in dir(reference)
    assert "blend_" not in dir(reference)
