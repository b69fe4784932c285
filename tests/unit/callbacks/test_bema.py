"""BEMA: its schedule, its numbers, what it saves, and the reference it writes, in a plain transformers.Trainer."""

from __future__ import annotations

import json
from unittest.mock import call, patch

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from preftune.callbacks.bema import BEMACallback
from preftune.callbacks.handler import RefModelCallbackHandler
from preftune.errors import CheckpointError, ConfigError, ReferenceError
from preftune.models.reference import DisabledAdapter, FrozenCopy, ReferenceAdapter
from preftune.trainers.state import load_extras, save_extras
from tests.unit.callbacks.reference_runs import Recorder, plain_trainer, tiny_model
from tests.unit.callbacks.tiny_trainer import weights_hash
from tests.unit.models.reference_helpers import lora, lora_policy


def slow_bema(policies, *, freq=1, after=0, kappa=0.5, eta=0.2, rho=10, gamma=1.0, minimum=0.0):
    """The paper's recursion, one number at a time in float64; returns the average after every step."""
    names = policies[0].keys()
    theta_0 = average = mean = None
    history = []
    for step, policy in enumerate(policies):
        theta = {n: policy[n].double() for n in names}
        if step == after:
            theta_0 = average = mean = theta
        elif step > after and (step - after) % freq == 0:
            beta = max((rho + gamma * step) ** (-kappa), minimum)
            alpha = (rho + gamma * step) ** (-eta)
            mean = {n: (1 - beta) * mean[n] + beta * theta[n] for n in names}
            average = {n: mean[n] + alpha * (theta[n] - theta_0[n]) for n in names}
        history.append(average)
    return history


def run(tmp_path, callback, *, model=None, **options):
    recorder = Recorder()
    trainer = plain_trainer(tmp_path, [callback, recorder], model=model, **options)
    trainer.train()
    return trainer, recorder


def assert_close(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name].double(), expected[name].double(), rtol=1e-5, atol=1e-6)


def test_average_equals_the_slow_recursion(tmp_path):
    names = {"freq": "update_freq", "after": "update_after", "kappa": "ema_power", "eta": "bias_power", "rho": "lag"}
    names |= {"gamma": "multiplier", "minimum": "min_ema_multiplier"}
    cases = [
        {},
        {"freq": 2},
        {"freq": 2, "after": 1},
        {"after": 3},
        {"eta": 0.0},
        {"kappa": 0.0},
        {"rho": 1, "gamma": 0.5},
        {"rho": 1, "gamma": 0.5, "minimum": 0.6},
    ]
    callbacks = [BEMACallback(**{"update_freq": 1, **{names[k]: v for k, v in case.items()}}) for case in cases]
    recorder = Recorder()
    plain_trainer(tmp_path, [*callbacks, recorder]).train()
    for case, callback in zip(cases, callbacks, strict=True):
        assert_close(callback.average, slow_bema(recorder.policy, **case)[-1])


def test_bias_power_from_full_correction_to_none(tmp_path):
    """R024: power 0 is the full correction for ever, a large power (or a negative one) the plain EMA."""
    full, large, off = (BEMACallback(update_freq=1, bias_power=power) for power in (0, 8, -1))
    recorder = Recorder()
    plain_trainer(tmp_path, [full, large, off, recorder], max_steps=3).train()
    start, end = recorder.policy[0], recorder.policy[-1]
    corrected = {n: full.ema[n] + (end[n] - start[n]) for n in full.ema}
    assert_close(full.average, corrected)
    for callback in (large, off):
        for name in callback.ema:
            torch.testing.assert_close(callback.average[name], callback.ema[name], rtol=0, atol=1e-6)


def test_updates_come_at_the_steps_asked_for(tmp_path):
    """R025: update_after=2, update_freq=2, 6 steps: the snapshot at 2, updates at 4 and 6."""
    callback = BEMACallback(update_after=2, update_freq=2)
    with patch.object(callback, "_update_bema_weights", wraps=callback._update_bema_weights) as update:
        _, recorder = run(tmp_path, callback)
    assert update.call_args_list == [call(4), call(6)]
    assert_close(callback.theta_0, recorder.policy[2])


def test_training_is_not_disturbed(tmp_path):
    """Dropout, `random` and numpy are all in use: the weights are those of a run without the callback."""
    with_it, _ = run(tmp_path / "a", BEMACallback(update_freq=1))
    without = plain_trainer(tmp_path / "b", [])
    without.train()
    assert weights_hash(with_it.model) == weights_hash(without.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_model_loads_and_is_the_average(tmp_path, dtype):
    callback = BEMACallback(update_freq=1)
    model = tiny_model(dtype=dtype, tie_word_embeddings=True)
    model.model.embed_tokens.weight.requires_grad_(False)
    trainer, recorder = run(tmp_path, callback, model=model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bema", dtype="auto")
    assert loaded.dtype == dtype
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert "model.embed_tokens.weight" not in callback.average
    for name, p in loaded.named_parameters():
        expected = callback.average[name] if name in callback.average else recorder.policy[-1][name]
        assert torch.equal(p, expected.to(dtype)), name
    assert len(AutoTokenizer.from_pretrained(tmp_path / "bema")) == len(trainer.processing_class)


def test_frozen_parameters_are_no_obstacle(tmp_path):
    """C7: the trained ones are matched by name, wherever the frozen ones stand."""
    model = tiny_model()
    for p in list(model.parameters())[::2]:
        p.requires_grad_(False)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    callback = BEMACallback(update_freq=1)
    _, recorder = run(tmp_path, callback, model=model)
    assert callback.average.keys() == trained
    policies = [{n: p[n] for n in trained} for p in recorder.policy]
    assert_close(callback.average, slow_bema(policies)[-1])


@pytest.mark.parametrize("name", ["default", "mine"])
def test_under_peft_an_adapter_is_averaged_and_saved(tmp_path, name):
    from peft import get_peft_model

    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora(), adapter_name=name)
    callback = BEMACallback(update_freq=1)
    run(tmp_path, callback, model=model)
    assert all("lora_" in key for key in callback.average)
    assert json.loads((tmp_path / "bema" / "adapter_config.json").read_text())["r"] == 4
    loaded = dict(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "bema").named_parameters())
    for key, average in callback.average.items():
        assert torch.equal(loaded[key.replace(f".{name}.", ".default.")], average)
    for key, p in base.named_parameters():
        assert torch.equal(model.get_parameter(_inside_peft(key)), p)


def _inside_peft(name):
    targeted = "q_proj" in name or "v_proj" in name
    return "base_model.model." + (name.replace("proj.", "proj.base_layer.") if targeted else name)


def test_nothing_is_saved_before_the_snapshot(tmp_path, caplog):
    run(tmp_path, BEMACallback(update_after=100))
    assert not (tmp_path / "bema").exists()
    assert "update_after=100" in caplog.text


# The reference


def with_reference(tmp_path, callback, reference, *, model=None, **options):
    recorder = Recorder()
    trainer = plain_trainer(tmp_path, [callback], model=model, **options)
    trainer.callback_handler = RefModelCallbackHandler.from_handler(trainer.callback_handler, reference)
    trainer.add_callback(recorder)
    trainer.train()
    return recorder


def test_reference_gets_the_last_average_at_its_own_steps(tmp_path):
    """Averages at 2, 4, 6; writes at 1, 3, 5 (from 1, every 2): theta_0 at 1, the average of 2 at 3, of 4 at 5."""
    callback = BEMACallback(update_freq=2, update_ref_model=True, ref_model_update_freq=2, ref_model_update_after=1)
    recorder = with_reference(tmp_path, callback, FrozenCopy(tiny_model(seed=1)))
    averages = slow_bema(recorder.policy, freq=2)
    start = {n: p.double() for n, p in tiny_model(seed=1).named_parameters()}
    expected = [start, averages[0], averages[0], averages[2], averages[2], averages[4], averages[4]]
    assert len(recorder.reference) == 7
    for got, wanted in zip(recorder.reference, expected, strict=True):
        assert_close(got, wanted)


def test_an_update_of_the_same_step_comes_first(tmp_path):
    callback = BEMACallback(update_freq=3, update_ref_model=True, ref_model_update_freq=3)
    recorder = with_reference(tmp_path, callback, FrozenCopy(tiny_model(seed=1)))
    averages = slow_bema(recorder.policy, freq=3)
    for step in (3, 6):
        assert_close(recorder.reference[step], averages[step])
    assert_close(recorder.reference[2], dict(tiny_model(seed=1).named_parameters()))  # not at step 0


def test_reference_is_left_alone_before_the_snapshot(tmp_path):
    callback = BEMACallback(update_freq=1, update_after=4, update_ref_model=True, ref_model_update_freq=1)
    recorder = with_reference(tmp_path, callback, FrozenCopy(tiny_model(seed=1)))
    assert_close(recorder.reference[3], dict(tiny_model(seed=1).named_parameters()))
    assert_close(recorder.reference[4], recorder.policy[4])


def test_under_peft_only_the_reference_adapter_is_written(tmp_path):
    policy = lora_policy(nonzero=True)
    base = {n: p.detach().clone() for n, p in policy.named_parameters() if "lora_" not in n}
    callback = BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)
    recorder = with_reference(tmp_path, callback, ReferenceAdapter(policy), model=policy)
    trained = [{n: p for n, p in step.items() if ".default." in n} for step in recorder.policy]
    assert_close(recorder.reference[-1], slow_bema(trained)[-1])
    assert all(torch.equal(p, policy.get_parameter(n)) for n, p in base.items())
    plain = plain_trainer(tmp_path / "plain", [], model=lora_policy(nonzero=True))
    plain.train()
    for name, p in plain.model.named_parameters():
        assert torch.equal(p, policy.get_parameter(name)), name


def test_a_plain_trainer_with_update_ref_model(tmp_path):
    trainer = plain_trainer(tmp_path, [BEMACallback(update_ref_model=True)])
    with pytest.raises(ValueError, match="got no ref_model"):
        trainer.train()


def test_a_bare_module_in_the_event_is_enough(tmp_path):
    callback, module = BEMACallback(update_ref_model=True, update_freq=1, ref_model_update_freq=1), tiny_model(seed=1)
    trainer = plain_trainer(tmp_path, [])
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model, ref_model=module)
    trainer.state.global_step = 1
    with torch.no_grad():
        trainer.model.lm_head.weight.add_(1.0)
    callback.on_step_end(trainer.args, trainer.state, trainer.control, model=trainer.model, ref_model=module)
    assert torch.equal(module.lm_head.weight, callback.average["lm_head.weight"])
    other = BEMACallback(update_ref_model=True)
    with pytest.raises(ReferenceError, match="disabled_adapter"):
        other.on_train_begin(trainer.args, trainer.state, None, model=trainer.model, reference=DisabledAdapter())


# State


class SaveAndStop(BEMACallback):
    """Stands in for preftune's trainers, which save the state of callbacks in the checkpoint."""

    folder: str = ""

    def on_save(self, args, state, control, **kwargs):
        save_extras(self.folder, self.state_dict())


@pytest.mark.parametrize("stop", [2, 5])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, stop):
    options = {"update_freq": 2, "update_after": 1, "bias_power": 0.3}
    straight = BEMACallback(**options)
    run(tmp_path / "straight", straight, steady=True, save_strategy="steps", save_steps=100)
    first = SaveAndStop(**options)
    first.folder = str(tmp_path)
    run(tmp_path / "run", first, steady=True, save_strategy="steps", save_steps=stop, max_steps=stop)
    second = BEMACallback(**options)
    second.load_state_dict(load_extras(str(tmp_path)))
    trainer = plain_trainer(tmp_path / "run", [second], steady=True, save_strategy="steps", save_steps=100)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{stop}"))
    for one, two in (
        (straight.theta_0, second.theta_0),
        (straight.ema, second.ema),
        (straight.average, second.average),
    ):
        assert one.keys() == two.keys()
        assert one
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_resume_without_the_state_is_said_aloud(tmp_path, caplog):
    run(tmp_path, BEMACallback(), save_strategy="steps", save_steps=3, max_steps=3)
    callback = BEMACallback(update_freq=1)
    trainer = plain_trainer(tmp_path, [callback])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert "starts anew from the weights of step 3" in caplog.text
    assert callback.average


def test_state_of_another_run_is_refused(tmp_path):
    trainer, _ = run(tmp_path, BEMACallback(update_freq=1))
    callback = BEMACallback(update_freq=1)
    run(tmp_path, callback)
    state = callback.state_dict()
    fresh = BEMACallback()
    fresh.load_state_dict(state)
    trainer.state.global_step = 2
    with pytest.raises(CheckpointError, match="step 6.*step 2"):
        fresh.on_train_begin(trainer.args, trainer.state, None, model=trainer.model)
    fresh.load_state_dict(state)
    trainer.state.global_step = 6
    with pytest.raises(CheckpointError, match="does not fit"):
        fresh.on_train_begin(trainer.args, trainer.state, None, model=lora_policy())


def test_a_second_training_starts_anew(tmp_path):
    callback = BEMACallback(update_freq=1)
    run(tmp_path, callback)
    _, recorder = run(tmp_path, callback)
    assert_close(callback.average, slow_bema(recorder.policy)[-1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"update_freq": 0},
        {"ref_model_update_freq": 0},
        {"update_after": -1},
        {"ema_power": -0.5},
        {"min_ema_multiplier": 1.5},
        {"lag": 0, "multiplier": 0.0},
    ],
)
def test_wrong_options_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BEMACallback(**wrong)


def test_defaults_are_those_of_the_paper_and_positions_are_kept():
    callback = BEMACallback(400, 0.5, 0.2, 10, 0, 1.0, 0.0, "cpu", False, 400, 0)
    assert vars(callback).items() >= {k: v for k, v in vars(BEMACallback()).items() if not isinstance(v, dict)}.items()


def test_a_callback_of_full_copies_works_with_a_frozen_copy_of_lower_precision(tmp_path):
    """The average is in float32 in the callback; the bfloat16 reference gets its rounding, not a sum of roundings."""
    callback = BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)
    reference = FrozenCopy(tiny_model(seed=1, dtype=torch.bfloat16))
    with_reference(tmp_path, callback, reference)
    for name, p in reference.module.named_parameters():
        assert torch.equal(p, callback.average[name].bfloat16())
