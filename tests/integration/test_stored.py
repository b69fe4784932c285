"""Stored references in training: the numbers of a live one for every kind of set, and one model where one is enough.

Every comparison is with a run whose reference is live, step by step.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, IterableDataset, disable_caching, enable_caching
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from preftune import DPOConfig, DPOTrainer
from preftune.errors import ReferenceError
from preftune.models import logprobs
from preftune.models.reference import Stored
from tests.support.models import tiny_model
from tests.support.runs import digest, logged, options

KEYS = ("loss", "logps/chosen", "logps/rejected", "rewards/margins")
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


@pytest.fixture(autouse=True)
def _own_store(tmp_path, monkeypatch):
    monkeypatch.setattr("preftune.models.stored._default_root", lambda: tmp_path / "store")


@pytest.fixture
def rows(preference_rows):
    return preference_rows["text"]


@pytest.fixture
def scored(monkeypatch):
    """The trees that a live reference was asked for."""
    trees, real = [], logprobs.token_scores
    monkeypatch.setattr(logprobs, "token_scores", lambda *a, **k: trees.append(a[1]) or real(*a, **k))
    return trees


def build(folder, tokenizer, rows, *, stored=True, **changes):
    given = {k: changes.pop(k) for k in ("ref_model", "peft_config", "eval_dataset") if k in changes}
    changes.setdefault("train_sampling_strategy", "sequential")
    args = options(folder, precompute_ref_log_probs=stored, max_steps=6, per_device_eval_batch_size=2, **changes)
    return DPOTrainer(
        model=tiny_model(num_hidden_layers=1),
        args=DPOConfig(**args),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        processing_class=tokenizer,
        **given,
    )


def stream(rows) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def same_metrics(one, two) -> None:
    for key in KEYS:
        assert logged(one, key) == pytest.approx(logged(two, key), abs=1e-4), key


SET_UPS = {
    "full": {},
    "adapter": {"peft_config": LORA},
    "given": {"ref_model": 5},
    "ld_alpha": {"ld_alpha": 0.3},
}


def set_up_of(name: str) -> dict:
    changes = dict(SET_UPS[name])
    if "ref_model" in changes:
        changes["ref_model"] = tiny_model(seed=changes["ref_model"], num_hidden_layers=1)
    return changes


@pytest.mark.parametrize(
    "set_up,kind",
    [("full", "map"), ("full", "stream"), ("adapter", "stream"), ("given", "map"), ("ld_alpha", "stream")],
)
def test_training_is_that_with_a_live_reference(tmp_path, tokenizer, rows, set_up, kind, scored):
    """R009: over two passes of the data; a stream's rows are scored in the first pass alone."""
    data = stream(rows[:6]) if kind == "stream" else Dataset.from_list(rows[:6])
    live = build(tmp_path / "a", tokenizer, data, stored=False, **set_up_of(set_up))
    live.train()
    trainer = build(tmp_path / "b", tokenizer, data, **set_up_of(set_up))
    scored.clear()
    trainer.train()
    same_metrics(trainer, live)
    assert sum(tree.num_prompts for tree in scored) == (6 if kind == "stream" else 0)
    assert isinstance(trainer.reference, Stored)
    # a second run finds them on disk, whatever its learning rate
    again = build(tmp_path / "c", tokenizer, data, learning_rate=1e-5, **set_up_of(set_up))
    scored.clear()
    again.train()
    assert not scored


def test_precomputed_batches_do_not_matter(tmp_path, tokenizer, preference_rows):
    """R009: conversations without a prompt column, scored one by one or three at a time."""
    runs = []
    for size in (1, 3):
        trainer = build(tmp_path / str(size), tokenizer, preference_rows["messages"], precompute_ref_batch_size=size)
        trainer.train()
        runs.append(trainer)
    live = build(tmp_path / "live", tokenizer, preference_rows["messages"], stored=False)
    live.train()
    for trainer in runs:
        same_metrics(trainer, live)


def models_held(trainer) -> int:
    """Whole models that can be reached from the trainer's attributes."""
    seen, todo, models = set(), [trainer], set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, PreTrainedModel | PeftModel):
            models.add(id(thing))
        elif isinstance(thing, dict | list | tuple) or type(thing).__module__.startswith("preftune"):
            todo.extend(gc.get_referents(thing))
    return len(models)


def test_one_model_is_held_where_one_is_enough(tmp_path, tokenizer, rows):
    """R012: one model for rows that are known; a stream keeps the reference until it is over."""
    reference = tiny_model(seed=5, num_hidden_layers=1)
    assert models_held(build(tmp_path / "a", tokenizer, rows)) == 1
    given = build(tmp_path / "b", tokenizer, rows, ref_model=reference)
    assert given.ref_model is None
    assert models_held(build(tmp_path / "c", tokenizer, stream(rows))) == 2
    assert models_held(build(tmp_path / "d", tokenizer, rows, stored=False)) == 2
    assert models_held(build(tmp_path / "e", tokenizer, stream(rows), peft_config=LORA)) == 1


def sets_of(kind: str, rows):
    a, b = Dataset.from_list(rows[:3]), Dataset.from_list(rows[3:7])
    return {
        "dataset_dict": DatasetDict({"a": a, "b": b}),
        "mixed": {"a": a, "b": stream(rows[3:7])},
    }[kind]


@pytest.mark.parametrize("kind", ["dataset_dict", "mixed"])
def test_eval_sets_given_to_the_constructor(tmp_path, tokenizer, rows, kind):
    """R014: a stream among them is scored when it comes, with the reference, not with the trained policy."""
    results = []
    for stored in (False, True):
        trainer = build(tmp_path / str(stored), tokenizer, rows, stored=stored, eval_dataset=sets_of(kind, rows))
        trainer.train()
        results.append(trainer.evaluate())
    for key in ("eval_a_loss", "eval_b_loss", "eval_b_rewards/margins"):
        assert results[1][key] == pytest.approx(results[0][key], abs=1e-4)


def test_eval_sets_given_later(tmp_path, tokenizer, rows):
    """R015: right numbers while there is a reference, else an error before any row is evaluated."""
    train, later = rows[:4], Dataset.from_list(rows[4:])
    for lora in ({"peft_config": LORA}, {}):
        live = build(tmp_path / "a", tokenizer, train, stored=False, **lora)
        trainer = build(tmp_path / "b", tokenizer, train, **lora)
        for one in (live, trainer):
            one.train()
        expected = live.evaluate({"x": later, "y": later})
        if lora:
            got = trainer.evaluate({"x": later, "y": later})
            assert got.keys() == expected.keys()
            assert got["eval_y_loss"] == pytest.approx(expected["eval_y_loss"], abs=1e-4)
            assert trainer.evaluate(stream(rows[4:]))["eval_loss"] == pytest.approx(expected["eval_x_loss"], abs=1e-4)
            continue
        known = trainer.evaluate(Dataset.from_list(train))
        assert known["eval_loss"] == pytest.approx(live.evaluate(Dataset.from_list(train))["eval_loss"], abs=1e-4)
        with pytest.raises(ReferenceError, match=r"stored before training.*precompute_ref_log_probs=False"):
            trainer.evaluate({"x": later})
        with pytest.raises(ReferenceError, match=r"precompute_ref_log_probs=True.*IterableDataset"):
            trainer.evaluate({"x": stream(rows[4:])})
    # before training the policy still is the reference
    fresh = build(tmp_path / "c", tokenizer, train)
    assert fresh.evaluate(later)["eval_rewards/margins"] == pytest.approx(0, abs=1e-5)


def test_resume_equals_uninterrupted(tmp_path, tokenizer, rows):
    def make(folder):
        return build(tmp_path / folder, tokenizer, stream(rows[:6]), save_strategy="steps", save_steps=2)

    straight, resumed = make("a"), make("b")
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert digest(resumed) == digest(straight)


def test_the_cache_folder_does_not_matter(tmp_path, tokenizer, rows, monkeypatch):
    """R010: another TMPDIR, rows in memory, caching switched off."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    disable_caching()
    try:
        trainer = build(tmp_path / "out", tokenizer, rows)
        trainer.train()
    finally:
        enable_caching()
    assert Path(trainer.reference.folder).is_dir()


def test_the_live_reference_is_scored_in_micro_batches(tmp_path, tokenizer, rows, scored):
    """R184: never more rows at a time than the policy, and in precomputing as many as asked for."""
    trainer = build(tmp_path / "a", tokenizer, rows, stored=False, gradient_accumulation_steps=3)
    trainer.train()
    assert scored
    assert max(tree.num_prompts for tree in scored) <= 2
    scored.clear()
    build(tmp_path / "b", tokenizer, rows, precompute_ref_batch_size=3)
    assert [tree.num_prompts for tree in scored] == [3, 3, 2]


def test_an_evaluation_keeps_no_logits(tmp_path, tokenizer, rows):
    """R185: without compute_metrics there are no predictions."""
    trainer = build(tmp_path, tokenizer, rows, stored=False, eval_dataset=Dataset.from_list(rows))
    asked, real = [], trainer.prediction_step
    trainer.prediction_step = lambda model, inputs, loss_only, *a, **k: (
        asked.append(loss_only) or real(model, inputs, loss_only, *a, **k)
    )
    trainer.plain_logits = None
    assert trainer.evaluate()["eval_loss"] > 0
    assert asked == [True] * 4
