"""Which callbacks a trainer attaches: the table of options, references and the user's own callbacks."""

from __future__ import annotations

import pytest
from transformers import TrainerCallback

from preftune.callbacks.attach import reference_callbacks
from preftune.callbacks.bema import BEMACallback
from preftune.callbacks.sync_ref import SyncRefModelCallback, SyncTeacherModelCallback
from preftune.configs.dpo import DPOConfig
from preftune.configs.sdft import SDFTConfig
from preftune.errors import ConfigError
from preftune.models.reference import CurrentPolicy, DisabledAdapter, FrozenCopy, ReferenceAdapter, Stored
from tests.support.models import tiny_model
from tests.unit.models.reference_helpers import lora_policy


def config(tmp_path, **options):
    return DPOConfig(output_dir=str(tmp_path), report_to="none", **options)


MOVABLE = {
    "frozen_copy": lambda: FrozenCopy(tiny_model()),
    "reference_adapter": lambda: ReferenceAdapter(lora_policy()),
}
FIXED = {"disabled_adapter": DisabledAdapter, "stored": lambda: Stored(CurrentPolicy(), None), "none": lambda: None}


@pytest.mark.parametrize("form", [*MOVABLE, *FIXED])
def test_nothing_is_attached_unless_asked(tmp_path, form):
    reference = {**MOVABLE, **FIXED}[form]()
    assert reference_callbacks(config(tmp_path), reference) == []
    assert reference_callbacks(config(tmp_path), reference, [BEMACallback(), TrainerCallback()]) == []


@pytest.mark.parametrize("form", MOVABLE)
def test_sync_is_attached(tmp_path, form):
    reference = MOVABLE[form]()
    (callback,) = reference_callbacks(config(tmp_path, sync_ref_model=True), reference)
    assert isinstance(callback, SyncRefModelCallback)
    assert callback.reference is reference


def test_a_teacher_is_averaged_where_it_is_asked_for(tmp_path):
    reference = MOVABLE["reference_adapter"]()
    args = SDFTConfig(str(tmp_path), teacher_model_kind="ema")
    (callback,) = reference_callbacks(args, reference)
    assert isinstance(callback, SyncTeacherModelCallback) and callback.reference is reference
    assert reference_callbacks(SDFTConfig(str(tmp_path)), reference) == []
    with pytest.raises(ConfigError, match="teacher_model_kind='ema' and BEMACallback would each move"):
        reference_callbacks(args, reference, [BEMACallback(update_ref_model=True)])


@pytest.mark.parametrize("form", MOVABLE)
def test_bema_is_attached_with_every_option(tmp_path, form):
    options = {
        "bema_update_freq": 3, "bema_ema_power": 0.6, "bema_bias_power": 0.1, "bema_lag": 4, "bema_update_after": 5,
        "bema_multiplier": 0.5, "bema_min_ema_multiplier": 0.05, "bema_device": "meta",
    }  # fmt: skip
    args = config(tmp_path, bema_ref_model=True, ref_model_update_freq=7, ref_model_update_after=8, **options)
    (callback,) = reference_callbacks(args, MOVABLE[form]())
    assert isinstance(callback, BEMACallback)
    assert callback.moves_reference
    got = {f"bema_{k}": v for k, v in vars(callback).items() if f"bema_{k}" in options}
    assert {**got, "bema_device": str(got["bema_device"])} == options
    assert (callback.ref_model_update_freq, callback.ref_model_update_after) == (7, 8)


@pytest.mark.parametrize("form", FIXED)
@pytest.mark.parametrize("option", ["sync_ref_model", "bema_ref_model"])
def test_what_cannot_move_is_refused_with_the_remedy(tmp_path, form, option):
    with pytest.raises(ConfigError, match=rf"{option}=True.*'{form}' cannot move.*\. (Set|Let) .*leave {option} out"):
        reference_callbacks(config(tmp_path, **{option: True}), FIXED[form]())


@pytest.mark.parametrize("option", ["sync_ref_model", "bema_ref_model"])
def test_a_second_mover_is_refused(tmp_path, option):
    mover = BEMACallback(update_ref_model=True)
    args, reference = config(tmp_path, **{option: True}), FrozenCopy(tiny_model())
    with pytest.raises(ConfigError, match=rf"{option}=True and BEMACallback"):
        reference_callbacks(args, reference, [mover])
    with pytest.raises(ConfigError, match="BEMACallback and BEMACallback"):
        reference_callbacks(config(tmp_path), reference, [mover, BEMACallback(update_ref_model=True)])
    assert reference_callbacks(config(tmp_path), reference, [mover]) == []
    with pytest.raises(ConfigError, match="BEMACallback.*cannot move"):
        reference_callbacks(config(tmp_path), DisabledAdapter(), [mover])


def test_both_options_are_refused_even_where_the_config_was_changed_later(tmp_path):
    args = config(tmp_path, sync_ref_model=True)
    args.bema_ref_model = True
    with pytest.raises(ConfigError, match="sync_ref_model=True and bema_ref_model=True"):
        reference_callbacks(args, FrozenCopy(tiny_model()))
