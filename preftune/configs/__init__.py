"""The options of preftune: one dataclass a trainer, the model, the data; nothing here loads a model.

Names are imported on first use, since transformers' `TrainingArguments` alone costs seconds of CPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preftune.configs.base import BaseConfig
    from preftune.configs.dpo import DPOConfig
    from preftune.configs.model import ModelConfig, get_kbit_device_map, get_peft_config, get_quantization_config
    from preftune.configs.offline import OfflineConfig
    from preftune.configs.reference import ReferenceConfig
    from preftune.configs.script import DatasetConfig, DatasetMixtureConfig, ScriptArguments
    from preftune.configs.sft import SFTConfig

__all__ = [
    "BaseConfig",
    "DPOConfig",
    "DatasetConfig",
    "DatasetMixtureConfig",
    "ModelConfig",
    "OfflineConfig",
    "ReferenceConfig",
    "SFTConfig",
    "ScriptArguments",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]

_MODULES = {
    "base": ["BaseConfig"],
    "dpo": ["DPOConfig"],
    "model": ["ModelConfig", "get_kbit_device_map", "get_peft_config", "get_quantization_config"],
    "offline": ["OfflineConfig"],
    "reference": ["ReferenceConfig"],
    "script": ["DatasetConfig", "DatasetMixtureConfig", "ScriptArguments"],
    "sft": ["SFTConfig"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'preftune.configs' has no attribute {name!r}")
    return vars(import_module(f"preftune.configs.{_HOME[name]}"))[name]
