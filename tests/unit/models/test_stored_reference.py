"""Stored log-probabilities: the numbers of the live reference, found again on disk, never those of another set-up."""

from __future__ import annotations

import pytest
import torch

from preftune.data.tree import select_prompts
from preftune.errors import ReferenceError
from preftune.models import logprobs
from preftune.models.reference import MovableReference, Stored, make_reference
from preftune.models.stored import row_keys
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
    given = stored(policy, None, ref_model=tiny_model(seed=1))
    assert given.module is not None
    given.release()
    assert given.module is None


def test_a_second_run_finds_the_numbers(tmp_path, forwards):
    for expected in (1, 0, 1):
        policy = tiny_model()
        reference = stored(policy, tmp_path)
        trees = [TREE, OTHER_TREE] if expected and len(forwards) else [TREE]
        forwards.clear()
        reference.fill(trees, policy, layout="padded")
        assert len(forwards) == expected
        forwards.append(None)
    assert len(reference) == 3
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "change", ["ld_alpha", "layout", "precision", "weights", "config", "adapter scale", "given reference"]
)
def test_what_changes_the_numbers_changes_the_key(change, tmp_path, forwards):
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


def test_rows_are_told_apart_by_all_that_matters():
    from preftune.data.tree import build_tree

    rows = [
        ([1, 2], [[3], [4]], None),
        ([1], [[2, 3], [4]], None),
        ([1, 2], [[3, 4], []], None),
        ([1, 2], [[4], [3]], None),
        ([1, 2], [[3], [4]], [[1], [0]]),
    ]
    keys = [row_keys(build_tree([p], [b], None if m is None else [m]))[0] for p, b, m in rows]
    assert len(set(keys)) == len(rows)
    assert all(len(key) == 32 for key in keys)
    together = build_tree([p for p, _, _ in rows[:3]], [b for _, b, _ in rows[:3]])
    assert row_keys(together) == keys[:3]


def test_unknown_rows_and_other_options_are_refused(tmp_path):
    policy = tiny_model()
    reference = stored(policy, tmp_path)
    reference.fill([TREE], policy, layout="padded")
    with pytest.raises(ReferenceError, match=r"row 0 .*precompute_ref_log_probs=False"):
        reference.branch_logps(policy, OTHER_TREE, layout="padded")
    with pytest.raises(ReferenceError, match=r"ld_alpha=None, asked for 0.5"):
        reference.branch_logps(policy, TREE, layout="padded", ld_alpha=0.5)
    train(policy)
    with pytest.raises(ReferenceError, match="stored before training"):
        reference.fill([OTHER_TREE], policy, layout="padded")
    reference.release()
    with pytest.raises(ReferenceError, match="release"):
        reference.fill([OTHER_TREE], policy, layout="padded")


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
