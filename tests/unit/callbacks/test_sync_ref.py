"""TR-DPO sync: which steps, by how much, with modules and adapters, in a plain trainer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from preftune.callbacks.handler import RefModelCallbackHandler
from preftune.callbacks.sync_ref import SyncRefModelCallback, SyncTeacherModelCallback
from preftune.configs.sdft import SDFTConfig
from preftune.errors import ConfigError, ReferenceError
from preftune.models.reference import DisabledAdapter, FrozenCopy, ReferenceAdapter
from tests.unit.callbacks.reference_runs import Recorder, plain_trainer, tiny_model
from tests.unit.models.reference_helpers import lora_policy


@dataclass
class SyncArguments(TrainingArguments):
    ref_model_mixup_alpha: float = 0.3
    ref_model_sync_steps: int = 2


def test_schedule_and_mixture_on_a_plain_trainer(tmp_path):
    """Steps 2, 4, 6 of 6, each ref <- 0.3 policy + 0.7 ref, followed in float64 from the recorded policies."""
    module, recorder = tiny_model(seed=1), Recorder()
    callback = SyncRefModelCallback(module, None, mixup_alpha=0.3, sync_steps=2)
    trainer = plain_trainer(tmp_path, [callback, recorder])
    expected = {name: p.detach().double() for name, p in module.named_parameters()}
    trainer.train()
    for step in (2, 4, 6):
        expected = {name: 0.7 * p + 0.3 * recorder.policy[step][name].double() for name, p in expected.items()}
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert (callback.reference.moves, callback.reference.last_move_step) == (3, 6)
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())


def test_options_come_from_the_arguments(tmp_path):
    module = tiny_model(seed=1)
    callback = SyncRefModelCallback(module, None)
    trainer = plain_trainer(tmp_path, [callback])
    with pytest.raises(ConfigError, match=r"TrainingArguments has no ref_model_mixup_alpha.*mixup_alpha=0.6"):
        trainer.train()
    trainer.args = SyncArguments(**{f: getattr(trainer.args, f) for f in ("output_dir", "max_steps", "use_cpu")})
    callback.on_train_begin(trainer.args, trainer.state, None)
    trainer.state.global_step = 3
    callback.on_step_end(trainer.args, trainer.state, None, model=trainer.model)
    assert callback.reference.moves == 0
    trainer.state.global_step = 4
    callback.on_step_end(trainer.args, trainer.state, None, model=trainer.model)
    assert callback.reference.moves == 1
    with pytest.raises(ConfigError, match="alpha is 2"):
        SyncRefModelCallback(module, mixup_alpha=2.0, sync_steps=1).on_train_begin(trainer.args, None, None)


def test_a_teachers_options(tmp_path):
    """Every third step a quarter of the student; the names are those of SDFT and SDPO."""
    module = tiny_model(seed=1)
    callback = SyncTeacherModelCallback(module, None)
    trainer = plain_trainer(tmp_path, [])
    with pytest.raises(ConfigError, match="no teacher_update_rate and teacher_sync_steps.*SyncTeacherModelCallback"):
        callback.on_train_begin(trainer.args, trainer.state, None)
    args = SDFTConfig(str(tmp_path), teacher_update_rate=0.25, teacher_sync_steps=3)
    before = {name: p.detach().double().clone() for name, p in module.named_parameters()}
    for step in range(1, 6):
        trainer.state.global_step = step
        callback.on_step_end(args, trainer.state, None, model=trainer.model)
    assert (callback.reference.moves, callback.reference.last_move_step) == (1, 3)
    students = dict(trainer.model.named_parameters())
    for name, p in module.named_parameters():
        expected = 0.75 * before[name] + 0.25 * students[name].double()
        torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-6)


def test_adapter_follows_adapter(tmp_path):
    """R002: with alpha 1 every step, the reference adapter has the bits of the policy's; base weights stand still."""
    policy, recorder = lora_policy(), Recorder()
    reference = ReferenceAdapter(policy)
    callback = SyncRefModelCallback(reference, None, mixup_alpha=1.0, sync_steps=1)
    trainer = plain_trainer(tmp_path, [callback], model=policy, max_steps=2)
    trainer.callback_handler = RefModelCallbackHandler.from_handler(trainer.callback_handler, reference)
    trainer.add_callback(recorder)
    trainer.train()
    first, last = recorder.policy[0], recorder.policy[-1]
    for name in first:
        moved = not torch.equal(first[name], last[name])
        assert moved == ("lora_" in name), name
    for name, p in recorder.reference[-1].items():
        assert torch.equal(p, last[name])
    assert policy.active_adapters == ["default"]


def test_static_sync_of_two_models():
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    expected = {n: 0.25 * p.double() + 0.75 * target.get_parameter(n).double() for n, p in source.named_parameters()}
    SyncRefModelCallback.sync_target_model(source, target, 0.25)
    for name, p in target.named_parameters():
        torch.testing.assert_close(p.double(), expected[name].detach(), rtol=1e-6, atol=1e-7)
        assert p.requires_grad
    with pytest.raises(ReferenceError, match="shape"):
        SyncRefModelCallback.sync_target_model(source, nn.Linear(3, 2), 0.25)


def test_a_wrapped_module_of_the_trainer_is_moved_through_the_trainers_object():
    """Else its float32 averages would be in no checkpoint."""
    policy, module = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).bfloat16()
    ours = FrozenCopy(module)
    callback = SyncRefModelCallback(module, None, mixup_alpha=0.1, sync_steps=1)

    class State:
        global_step = 1

    callback.on_step_end(None, State(), None, model=policy, reference=ours)
    assert (ours.moves, callback.reference.moves) == (1, 0)
    other = FrozenCopy(nn.Linear(2, 2).bfloat16())
    callback.on_step_end(None, State(), None, model=policy, reference=other)
    assert (other.moves, callback.reference.moves) == (0, 1)


@pytest.mark.parametrize("wrong", [DisabledAdapter(), None])
def test_what_cannot_move_is_refused(wrong):
    with pytest.raises(ReferenceError, match="can move"):
        SyncRefModelCallback(wrong)
