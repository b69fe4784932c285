"""Model, adapter and dataset options: what they refuse, and the objects of peft and transformers they turn into.

Values of the built objects are read back field by field, not compared with the options that made them.
"""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from preftune.configs.model import ModelConfig, get_kbit_device_map, get_peft_config, get_quantization_config
from preftune.configs.script import DatasetConfig, DatasetMixtureConfig, ScriptArguments
from preftune.errors import ConfigError

MODEL_DEFAULTS = {
    "model_name_or_path": None,
    "model_revision": "main",
    "dtype": "float32",
    "attn_implementation": None,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "lora_target_parameters": None,
    "lora_modules_to_save": None,
    "lora_task_type": "CAUSAL_LM",
    "use_rslora": False,
    "use_dora": False,
    "load_in_8bit": False,
    "load_in_4bit": False,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False,
    "bnb_4bit_quant_storage": None,
}


def test_model_defaults():
    assert dataclasses.asdict(ModelConfig()) == MODEL_DEFAULTS


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"load_in_8bit": True, "load_in_4bit": True}, "load_in_8bit.*load_in_4bit"),
        ({"dtype": "bf16"}, "dtype='bf16' is not known"),
        ({"dtype": "float23"}, "did you mean 'float32'"),
        ({"lora_r": 0}, "at least 1"),
        ({"lora_dropout": 1.5}, "at most 1"),
        ({"lora_target_modules": 3}, "text"),
    ],
)
def test_model_refuses(wrong, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**wrong)


def test_one_target_module_is_a_pattern():
    """peft reads a text such as all-linear as a keyword or pattern, and a list as exact names."""
    assert ModelConfig(lora_target_modules=["all-linear"]).lora_target_modules == "all-linear"
    assert ModelConfig(lora_target_modules=["q_proj", "v_proj"]).lora_target_modules == ["q_proj", "v_proj"]


def test_no_adapter_unless_asked_for():
    assert get_peft_config(ModelConfig(lora_r=4)) is None


def test_lora_config():
    config = get_peft_config(
        ModelConfig(
            use_peft=True,
            lora_r=4,
            lora_alpha=8,
            lora_dropout=0.0,
            lora_target_modules=["q_proj", "v_proj"],
            use_rslora=True,
        )
    )
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (4, 8, 0.0, "none")
    assert set(config.target_modules) == {"q_proj", "v_proj"} and config.use_rslora and config.task_type == "CAUSAL_LM"


def test_peft_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="pip install peft"):
        get_peft_config(ModelConfig(use_peft=True))


def test_quantization():
    assert get_quantization_config(ModelConfig()) is None
    eight = get_quantization_config(ModelConfig(load_in_8bit=True))
    assert eight.load_in_8bit and not eight.load_in_4bit
    four = get_quantization_config(ModelConfig(load_in_4bit=True, dtype="bfloat16", use_bnb_nested_quant=True))
    assert four.load_in_4bit and four.bnb_4bit_compute_dtype is torch.bfloat16 and four.bnb_4bit_use_double_quant


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about a machine without an accelerator")
def test_device_map_on_cpu():
    assert get_kbit_device_map() is None


def test_script_defaults():
    script = ScriptArguments()
    assert (script.dataset_name, script.dataset_train_split, script.dataset_test_split) == (None, "train", "test")
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        ScriptArguments(progress="plan")


def test_mixture():
    mixture = DatasetMixtureConfig(datasets=[{"path": "a.json", "columns": ["x"]}, DatasetConfig(path="b.json")])
    assert [one.path for one in mixture.datasets] == ["a.json", "b.json"]
    assert mixture.datasets[0].columns == ["x"] and mixture.datasets[1].split == "train"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"datasets": [{"pth": "a"}]}, "did you mean 'path'"),
        ({"datasets": [{"name": "a"}]}, "has no path"),
        ({"datasets": [{"path": "a", "columns": 3}]}, "list or a mapping"),
        ({"datasets": ["a.json"]}, "list of mappings"),
        ({"test_split_size": 0}, "more than 0"),
        ({"test_split_size": 10.5}, "whole number"),
    ],
)
def test_mixture_refuses(wrong, message):
    with pytest.raises(ConfigError, match=message):
        DatasetMixtureConfig(**wrong)
