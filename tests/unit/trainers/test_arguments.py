"""Which config a trainer works with: its own, its default, one made of transformers' arguments, and no other's."""

from __future__ import annotations

import pytest
from transformers import TrainingArguments

from preftune import DPOConfig, GRPOConfig, SFTConfig
from preftune.trainers.arguments import own_config


def test_its_own_and_its_default():
    given = SFTConfig("unused-output")
    assert own_config(SFTConfig, given, "folder/my-model", "SFT") is given
    made = own_config(GRPOConfig, None, "folder/my-model", "GRPO")
    assert type(made) is GRPOConfig and made.output_dir == "my-model-GRPO"


def test_transformers_own_arguments_are_taken_over():
    """R175: what they have is kept; the rest has the defaults of here."""
    plain = TrainingArguments("unused-output", learning_rate=3e-4, use_cpu=True, hub_token="hf_x")
    made = own_config(SFTConfig, plain, "m", "SFT")
    assert (type(made), made.learning_rate, made.hub_token) == (SFTConfig, 3e-4, "hf_x")
    assert made.max_length == 1024 and made.logging_nan_inf_filter is False


@pytest.mark.parametrize(
    "wrong", [DPOConfig("unused-output"), {"output_dir": "x"}, "out"], ids=lambda w: type(w).__name__
)
def test_the_config_of_another_trainer_is_refused(wrong):
    with pytest.raises(TypeError, match=f"args is a {type(wrong).__name__}; a SFT trainer takes a SFTConfig"):
        own_config(SFTConfig, wrong, "m", "SFT")
