"""Which model to load, in which precision, quantised or not, and the adapter to train on it.

`get_peft_config` and `get_quantization_config` turn the options into the libraries' own objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from preftune.configs.fields import check_fields, option
from preftune.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class ModelConfig:
    """The model and its adapter."""

    model_name_or_path: str | None = option(None, "The model: a folder, or a name on the hub.")
    model_revision: str = option("main", "The branch, tag or commit of a hub model.")
    dtype: str | None = option("float32", "Type of the weights; auto: that of the checkpoint.", choices=DTYPES)
    attn_implementation: str | None = option(
        None, "Attention of transformers (sdpa, eager, flash_attention_2, ...). Unset: its default."
    )
    use_peft: bool = option(False, "Train an adapter (LoRA) instead of all weights.")
    lora_r: int = option(16, "LoRA rank.", low=1)
    lora_alpha: int = option(32, "LoRA alpha: the update is scaled by alpha / r.", low=1)
    lora_dropout: float = option(0.05, "LoRA dropout.", low=0, high=1)
    lora_target_modules: list[str] | str | None = option(
        None, "Modules that get an adapter (names, or all-linear). Unset: peft's choice for the model."
    )
    lora_target_parameters: list[str] | None = option(None, "Parameters (not modules) that get an adapter.")
    lora_modules_to_save: list[str] | None = option(None, "Modules trained and saved in full beside the adapter.")
    lora_task_type: str = option("CAUSAL_LM", "Task type of the adapter; SEQ_CLS for reward models.")
    use_rslora: bool = option(False, "Rank-stabilised LoRA: scale by alpha / sqrt(r).")
    use_dora: bool = option(False, "Weight-decomposed LoRA.")
    load_in_8bit: bool = option(False, "Load the frozen weights in 8 bits (bitsandbytes).")
    load_in_4bit: bool = option(False, "Load the frozen weights in 4 bits (bitsandbytes).")
    bnb_4bit_quant_type: str = option("nf4", "4-bit type.", choices=("nf4", "fp4"))
    use_bnb_nested_quant: bool = option(False, "Quantise the 4-bit constants once more.")
    bnb_4bit_quant_storage: str | None = option(None, "Storage type of 4-bit weights; FSDP needs that of the model.")

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_8bit=True and load_in_4bit=True exclude each other. Set one of them to False.")
        check_fields(self)
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]


def get_peft_config(model_args: ModelConfig) -> PeftConfig | None:
    """The LoRA config that `model_args` describe, or None without `use_peft`.

    Raises:
        ConfigError: peft is not installed.
    """
    if not model_args.use_peft:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError("use_peft=True needs the package peft: pip install peft.") from error
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """The bitsandbytes config that `model_args` describe, or None without quantisation.

    4-bit weights compute in `dtype`, and are stored in it under FSDP (`bnb_4bit_quant_storage`).
    """
    if not (model_args.load_in_8bit or model_args.load_in_4bit):
        return None
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = None if model_args.dtype == "auto" else model_args.dtype
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """All of a quantised model on this process's accelerator; None on the CPU."""
    import torch
    from accelerate import PartialState

    return {"": PartialState().local_process_index} if torch.accelerator.is_available() else None
