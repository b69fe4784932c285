"""Preference tuning of language models: SFT and DPO with a reference model that can move.

Public names are imported on first use: `import preftune` alone loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from preftune.callbacks.bema import BEMACallback
    from preftune.callbacks.completions import LogCompletionsCallback
    from preftune.callbacks.handler import CallbackHandlerWithRefModel, RefModelCallbackHandler
    from preftune.callbacks.health import HealthCallback
    from preftune.callbacks.progress import RichProgressCallback
    from preftune.callbacks.sync_ref import SyncRefModelCallback, SyncTeacherModelCallback
    from preftune.callbacks.weave import WeaveCallback
    from preftune.cli.parse import TrlParser
    from preftune.configs.dpo import DPOConfig
    from preftune.configs.grpo import GRPOConfig
    from preftune.configs.kto import KTOConfig
    from preftune.configs.model import ModelConfig, get_peft_config, get_quantization_config
    from preftune.configs.reward import RewardConfig
    from preftune.configs.rloo import RLOOConfig
    from preftune.configs.script import DatasetMixtureConfig, ScriptArguments
    from preftune.configs.sdft import SDFTConfig
    from preftune.configs.sdpo import SDPOConfig
    from preftune.configs.sft import SFTConfig
    from preftune.data.formats import (
        extract_prompt,
        is_conversational,
        is_conversational_from_value,
        maybe_convert_to_chatml,
        maybe_extract_prompt,
        maybe_unpair_preference_dataset,
        unpair_preference_dataset,
    )
    from preftune.data.multimodal import prepare_multimodal_messages
    from preftune.data.packing import pack_dataset
    from preftune.data.responses import add_response_schema
    from preftune.data.templates import (
        apply_chat_template,
        clone_chat_template,
        get_training_chat_template,
        maybe_apply_chat_template,
        supports_tool_calling,
    )
    from preftune.models.reference import create_reference_model
    from preftune.trainers.dpo import DPOTrainer
    from preftune.trainers.grpo import GRPOTrainer
    from preftune.trainers.kto import KTOTrainer
    from preftune.trainers.reward import RewardTrainer
    from preftune.trainers.rloo import RLOOTrainer
    from preftune.trainers.sdft import SDFTTrainer
    from preftune.trainers.sdpo import SDPOTrainer
    from preftune.trainers.sft import SFTTrainer

# Where each public name is defined. Type checkers need the imports above and a literal `__all__` as well; a test proves
# that the three agree and that every name resolves.
_NAMES_BY_MODULE = {
    "callbacks.bema": ["BEMACallback"],
    "callbacks.handler": ["CallbackHandlerWithRefModel", "RefModelCallbackHandler"],
    "callbacks.completions": ["LogCompletionsCallback"],
    "callbacks.health": ["HealthCallback"],
    "callbacks.progress": ["RichProgressCallback"],
    "callbacks.sync_ref": ["SyncRefModelCallback", "SyncTeacherModelCallback"],
    "callbacks.weave": ["WeaveCallback"],
    "cli.parse": ["TrlParser"],
    "configs.dpo": ["DPOConfig"],
    "configs.grpo": ["GRPOConfig"],
    "configs.kto": ["KTOConfig"],
    "configs.model": ["ModelConfig", "get_peft_config", "get_quantization_config"],
    "configs.reward": ["RewardConfig"],
    "configs.rloo": ["RLOOConfig"],
    "configs.script": ["DatasetMixtureConfig", "ScriptArguments"],
    "configs.sdft": ["SDFTConfig"],
    "configs.sdpo": ["SDPOConfig"],
    "configs.sft": ["SFTConfig"],
    "data.formats": [
        "extract_prompt",
        "is_conversational",
        "is_conversational_from_value",
        "maybe_convert_to_chatml",
        "maybe_extract_prompt",
        "maybe_unpair_preference_dataset",
        "unpair_preference_dataset",
    ],
    "data.multimodal": ["prepare_multimodal_messages"],
    "data.packing": ["pack_dataset"],
    "data.responses": ["add_response_schema"],
    "data.templates": [
        "apply_chat_template",
        "clone_chat_template",
        "get_training_chat_template",
        "maybe_apply_chat_template",
        "supports_tool_calling",
    ],
    "models.reference": ["create_reference_model"],
    "trainers.dpo": ["DPOTrainer"],
    "trainers.kto": ["KTOTrainer"],
    "trainers.reward": ["RewardTrainer"],
    "trainers.grpo": ["GRPOTrainer"],
    "trainers.rloo": ["RLOOTrainer"],
    "trainers.sdft": ["SDFTTrainer"],
    "trainers.sdpo": ["SDPOTrainer"],
    "trainers.sft": ["SFTTrainer"],
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "BEMACallback",
    "CallbackHandlerWithRefModel",
    "DPOConfig",
    "DPOTrainer",
    "DatasetMixtureConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "HealthCallback",
    "KTOConfig",
    "KTOTrainer",
    "LogCompletionsCallback",
    "ModelConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "RefModelCallbackHandler",
    "RewardConfig",
    "RewardTrainer",
    "RichProgressCallback",
    "SDFTConfig",
    "SDFTTrainer",
    "SDPOConfig",
    "SDPOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "SyncRefModelCallback",
    "SyncTeacherModelCallback",
    "TrlParser",
    "WeaveCallback",
    "__version__",
    "add_response_schema",
    "apply_chat_template",
    "clone_chat_template",
    "create_reference_model",
    "extract_prompt",
    "get_peft_config",
    "get_quantization_config",
    "get_training_chat_template",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "prepare_multimodal_messages",
    "supports_tool_calling",
    "unpair_preference_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'preftune' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"preftune.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
