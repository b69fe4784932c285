"""The options of preftune: one dataclass a trainer, the model, the data; nothing here loads a model.

Names are imported on first use, since transformers' `TrainingArguments` alone costs seconds of CPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preftune.configs.base import BaseConfig
    from preftune.configs.distillation import DistillationConfig
    from preftune.configs.dpo import DPOConfig
    from preftune.configs.grpo import GRPOConfig
    from preftune.configs.kto import KTOConfig
    from preftune.configs.model import ModelConfig, get_kbit_device_map, get_peft_config, get_quantization_config
    from preftune.configs.offline import OfflineConfig
    from preftune.configs.online import OnlineConfig, RewardedConfig
    from preftune.configs.reference import ReferenceConfig, StorableReferenceConfig
    from preftune.configs.reward import RewardConfig
    from preftune.configs.rloo import RLOOConfig
    from preftune.configs.rollout import RolloutConfig
    from preftune.configs.script import DatasetConfig, DatasetMixtureConfig, ScriptArguments
    from preftune.configs.sdft import SDFTConfig
    from preftune.configs.sdpo import SDPOConfig
    from preftune.configs.sft import SFTConfig

__all__ = [
    "BaseConfig",
    "DPOConfig",
    "DatasetConfig",
    "DatasetMixtureConfig",
    "DistillationConfig",
    "GRPOConfig",
    "KTOConfig",
    "ModelConfig",
    "OfflineConfig",
    "OnlineConfig",
    "RLOOConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardedConfig",
    "RolloutConfig",
    "SDFTConfig",
    "SDPOConfig",
    "SFTConfig",
    "ScriptArguments",
    "StorableReferenceConfig",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]

_MODULES = {
    "base": ["BaseConfig"],
    "distillation": ["DistillationConfig"],
    "dpo": ["DPOConfig"],
    "grpo": ["GRPOConfig"],
    "kto": ["KTOConfig"],
    "model": ["ModelConfig", "get_kbit_device_map", "get_peft_config", "get_quantization_config"],
    "offline": ["OfflineConfig"],
    "online": ["OnlineConfig", "RewardedConfig"],
    "reference": ["ReferenceConfig", "StorableReferenceConfig"],
    "reward": ["RewardConfig"],
    "rloo": ["RLOOConfig"],
    "rollout": ["RolloutConfig"],
    "script": ["DatasetConfig", "DatasetMixtureConfig", "ScriptArguments"],
    "sdft": ["SDFTConfig"],
    "sdpo": ["SDPOConfig"],
    "sft": ["SFTConfig"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'preftune.configs' has no attribute {name!r}")
    return vars(import_module(f"preftune.configs.{_HOME[name]}"))[name]
