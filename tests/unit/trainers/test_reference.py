"""The reference of a trainer: one set of options for all that have one, and a model of its own by name."""

from __future__ import annotations

import pytest
import torch

from preftune import DPOConfig, GRPOConfig, KTOConfig, RLOOConfig
from preftune.trainers import reference
from tests.support.runs import logged
from tests.unit.trainers.test_step import build

MOVING = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 1}


@pytest.mark.parametrize("config", [DPOConfig, KTOConfig, GRPOConfig, RLOOConfig])
def test_the_options_are_the_same_everywhere(config):
    """R004."""
    made = config("unused-output")
    assert (made.sync_ref_model, made.ref_model_mixup_alpha, made.ref_model_sync_steps) == (False, 0.6, 512)


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "rloo"])
def test_they_move_the_reference(tmp_path, tokenizer, kind):
    """R004: with alpha 1 the reference is the policy of the last step, bit for bit."""
    trainer = build(tmp_path, kind, tokenizer, **MOVING)
    start = trainer.ref_model.lm_head.weight.clone()
    trainer.train()
    for name, parameter in trainer.ref_model.named_parameters():
        assert torch.equal(parameter, trainer.model.get_parameter(name)), name
    assert not torch.equal(start, trainer.ref_model.lm_head.weight)
    assert logged(trainer, "reference/moves") == [1.0, 2.0, 2.0]
    assert logged(trainer, "reference/last_move_step")[-1] == 2.0


def test_a_reference_by_name_is_loaded_as_the_policy_is(tmp_path, tiny_model, tokenizer, monkeypatch):
    """Also code of its own is only run where the user trusts it, and then for both."""
    tiny_model(seed=5).save_pretrained(tmp_path / "ref")
    seen, load = [], reference.load_model
    monkeypatch.setattr(reference, "load_model", lambda *args, **how: seen.append((args, how)) or load(*args, **how))
    for trusted in (False, True):
        trainer = build(tmp_path, "dpo", tokenizer, trust_remote_code=trusted, ref_model=str(tmp_path / "ref"))
        assert torch.equal(trainer.ref_model.lm_head.weight, tiny_model(seed=5).lm_head.weight)
    assert [how["trust_remote_code"] for _, how in seen] == [False, True]
