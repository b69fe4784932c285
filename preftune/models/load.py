"""From names or objects to a model and tokenizer ready to train: loading, special tokens, PEFT, dropout.

Every quirk of loading is here, once. Objects that a user hands in keep their tokenizer and PEFT settings as they were.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoProcessor, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import is_peft_available

from preftune.errors import ConfigError
from preftune.models.structure import router_coefficient, text_config

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel


def model_name(model: str | PreTrainedModel) -> str:
    """The name under which a model was loaded, or the name of its class."""
    if isinstance(model, str):
        return model
    return str(model.config._name_or_path or type(model).__name__)


def load_model(
    model: str | nn.Module,
    *,
    auto_class: Any,
    init_kwargs: dict[str, Any] | None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
) -> nn.Module:
    """Loads a model by name, or returns the object that was given.

    By name the weights come in float32 unless `init_kwargs` names another `dtype`, and on the CPU: the trainer moves
    them. `init_kwargs` for an object, or a quantisation given twice, is a ConfigError.
    """
    init_kwargs = dict(init_kwargs or {})
    if not isinstance(model, str):
        if init_kwargs or quantization_config is not None:
            raise ConfigError(
                "model_init_kwargs and quantization_config tell how to load a model by name, but `model` is already a "
                f"{type(model).__name__}. Load it with these options, or pass its name."
            )
        return model
    if quantization_config is not None:
        if "quantization_config" in init_kwargs:
            raise ConfigError(
                "quantization_config is given both as an argument and in model_init_kwargs; give it once."
            )
        init_kwargs["quantization_config"] = quantization_config
    dtype = init_kwargs.get("dtype", init_kwargs.pop("torch_dtype", "float32"))
    if isinstance(dtype, str) and dtype != "auto":
        known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if dtype not in known:
            raise ConfigError(f"model_init_kwargs['dtype'] is {dtype!r}; wanted one of {['auto', *known]}.")
        dtype = known[dtype]
    init_kwargs["dtype"] = dtype
    init_kwargs.setdefault("trust_remote_code", trust_remote_code)
    try:
        return auto_class.from_pretrained(model, **init_kwargs)
    except OSError as error:
        raise ConfigError(
            f"model {model!r} could not be loaded: {error}. Give a folder saved with save_pretrained or the name of a "
            "model that is on this machine or on the hub."
        ) from error


def load_processing_class(
    name: str, processing_class: Any, init_kwargs: dict[str, Any] | None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer or processor given, or the one saved under the model's name.

    Raises:
        ConfigError: none is given and none can be loaded.
        TypeError: something else than a tokenizer or a processor is given.
    """
    if processing_class is None:
        load = {"trust_remote_code": trust_remote_code, "revision": (init_kwargs or {}).get("revision", "main")}
        try:
            processing_class = AutoProcessor.from_pretrained(name, **load)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"no tokenizer could be loaded for model {name!r}: {error}. Pass processing_class=, or save the "
                "tokenizer beside the model (tokenizer.save_pretrained)."
            ) from error
    if not isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin):
        raise TypeError(
            f"processing_class is a {type(processing_class).__name__}; wanted a transformers tokenizer or processor."
        )
    return processing_class


def eos_token_ids(model: str | PreTrainedModel) -> tuple[int, ...]:
    """Every id that ends a text for this model, from its generation config; () where it has none.

    A tokenizer knows one such id; chat models often have several.
    """
    if isinstance(model, str):
        try:
            config = GenerationConfig.from_pretrained(model)
        except OSError:
            return ()
    else:
        config = model.generation_config
    ids = config.eos_token_id if config is not None else None
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def read_chat_template(path: str | None) -> str | None:
    """The text of a Jinja file, or the template of the tokenizer saved under `path`.

    Raises:
        ConfigError: there is neither.
    """
    if path is None:
        return None
    if path.endswith((".jinja", ".j2")):
        if not os.path.isfile(path):
            raise ConfigError(f"chat_template_path={path!r}: there is no such file.")
        return Path(path).read_text()
    try:
        template = AutoTokenizer.from_pretrained(path).chat_template
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template_path={path!r} is neither a .jinja file nor a folder with a tokenizer: {error}"
        ) from error
    if template is None:
        raise ConfigError(f"chat_template_path={path!r}: this tokenizer has no chat template.")
    return template


def tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer itself, or the one inside a processor."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def is_peft_model(model: nn.Module) -> bool:
    """Whether the model is a `PeftModel` (False where peft is not installed)."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def wrap_peft(model: nn.Module, peft_config: Any, *, seed: int, gradient_checkpointing: bool) -> nn.Module:
    """Puts a fresh adapter on the model, initialised from `seed` without touching the global random state.

    The config that was given is copied, so that it can be used again.

    Raises:
        TypeError: `peft_config` is no PeftConfig.
        ConfigError: the model already has an adapter.
    """
    if peft_config is not None:
        from peft import PeftConfig, get_peft_model

        if not isinstance(peft_config, PeftConfig):
            raise TypeError(
                f"peft_config is a {type(peft_config).__name__}; wanted a peft.PeftConfig such as LoraConfig."
            )
        if is_peft_model(model):
            raise ConfigError(
                "both a PeftModel and a peft_config were given. Pass the PeftModel alone to go on training its "
                "adapter, or merge it first (model.merge_and_unload()) to put a new one on."
            )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = get_peft_model(model, copy.deepcopy(peft_config))
    if gradient_checkpointing and is_peft_model(model):
        cast("PeftModel", model).enable_input_require_grads()
    return model


def enable_router_loss(model: nn.Module, coefficient: float | None) -> float:
    """The weight of the load-balancing loss to train with, 0 for none; the model is told to compute it.

    Args:
        coefficient: None takes the model's own.

    Raises:
        ConfigError: a weight for a model without a mixture of experts.
    """
    own = router_coefficient(model)
    if own is None:
        if coefficient:
            raise ConfigError(
                f"router_aux_loss_coef={coefficient}, but {type(model).__name__} has no experts to balance. Leave it "
                "out."
            )
        return 0.0
    coefficient = own if coefficient is None else coefficient
    if coefficient:
        vars(text_config(model))["output_router_logits"] = True
    return coefficient


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout of the base model to 0: modules and the functional attention dropout.

    Call it before an adapter is put on: the user's own LoRA dropout stays. On a ready PeftModel the adapter's dropout
    modules are skipped by their name.
    """
    for name, module in model.named_modules():
        if "lora_dropout" in name.split("."):
            continue
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(module.__dict__.get("attention_dropout"), float):
            vars(module)["attention_dropout"] = 0.0
