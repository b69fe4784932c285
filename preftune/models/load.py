"""From names or objects to a model and tokenizer ready to train: loading, special tokens, PEFT, dropout.

Every quirk of loading is here, once. Objects that a user hands in keep their tokenizer and PEFT settings as they were.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import is_bitsandbytes_available, is_peft_available

from preftune.errors import ConfigError
from preftune.models.saved_adapters import base_model_name, is_saved_adapter, load_with_adapter
from preftune.models.structure import generation_config, router_coefficient, text_config

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
    """Loads a model by name, or returns the object that was given; a saved adapter comes on its base model.

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
    auto_class = _class_for(model, auto_class, init_kwargs)
    try:
        if is_saved_adapter(model):
            return load_with_adapter(model, auto_class, init_kwargs)
        return auto_class.from_pretrained(model, **init_kwargs)
    except OSError as error:
        raise ConfigError(
            f"model {model!r} could not be loaded: {error}. Give a folder saved with save_pretrained or the name of a "
            "model that is on this machine or on the hub."
        ) from error


def _class_for(name: str, auto_class: Any, init_kwargs: dict[str, Any]) -> Any:
    """`AutoModelForImageTextToText` for the checkpoint of a vision-language model, else `auto_class`."""
    if auto_class is not AutoModelForCausalLM:
        return auto_class
    source = {**_source(init_kwargs), "trust_remote_code": init_kwargs["trust_remote_code"]}
    try:
        config = AutoConfig.from_pretrained(base_model_name(name) if is_saved_adapter(name) else name, **source)
    except (OSError, ValueError):
        return auto_class  # which says what is wrong
    multimodal = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    # families in both lists say in their checkpoint which of the two it is
    is_multimodal = multimodal is not None and (causal is None or multimodal in (config.architectures or []))
    return AutoModelForImageTextToText if is_multimodal else auto_class


def check_quantization(quantization_config: Any, init_kwargs: dict[str, Any] | None) -> None:
    """Refuses, before anything is loaded, a quantisation whose package is not installed.

    Raises:
        ConfigError: bitsandbytes is asked for and missing.
    """
    config = quantization_config or (init_kwargs or {}).get("quantization_config")
    if config is None or is_bitsandbytes_available():
        return
    options = config if isinstance(config, dict) else config.to_dict()
    if str(options.get("quant_method", "")).endswith("bitsandbytes") or {"load_in_4bit", "load_in_8bit"} & {
        name for name, value in options.items() if value is True
    }:
        raise ConfigError(
            "the model is to be loaded in 4 or 8 bits, which needs the package bitsandbytes: pip install bitsandbytes. "
            "Or leave the quantisation out: LoRA on unquantised weights in bfloat16 needs four times the memory of 4 "
            "bits for them (model_init_kwargs={'dtype': 'bfloat16'})."
        )


def load_processing_class(
    name: str, processing_class: Any, init_kwargs: dict[str, Any] | None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer or processor given, or the one saved under the model's name.

    Raises:
        ConfigError: none is given and none can be loaded.
        TypeError: something else than a tokenizer or a processor is given.
    """
    if processing_class is None:
        load = {"trust_remote_code": trust_remote_code, **_source(init_kwargs)}
        try:
            processing_class = _load_processor(name, load)
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


def _load_processor(name: str, load: dict[str, Any]) -> Any:
    if not is_saved_adapter(name):
        return AutoProcessor.from_pretrained(name, **load)
    if os.path.isfile(os.path.join(name, "tokenizer_config.json")):
        return AutoTokenizer.from_pretrained(name, **load)
    return AutoProcessor.from_pretrained(base_model_name(name), trust_remote_code=load["trust_remote_code"])


def eos_token_ids(
    model: str | PreTrainedModel, tokenizer: Any = None, init_kwargs: dict[str, Any] | None = None
) -> tuple[int, ...]:
    """Every id that ends a text: those of the model's generation config and that of the tokenizer; () where none is.

    A tokenizer knows one such id; chat models often have several, and not always the tokenizer's among them.

    Args:
        init_kwargs: How a model given by name is loaded: from which revision, ...
    """
    if isinstance(model, str):
        adapted = is_saved_adapter(model)
        try:
            config = GenerationConfig.from_pretrained(
                base_model_name(model) if adapted else model, **({} if adapted else _source(init_kwargs))
            )
        except OSError:
            config = None
    else:
        config = generation_config(model)
    ids = config.eos_token_id if config is not None else None
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    own = tokenizer.eos_token_id if tokenizer is not None else None
    return tuple(dict.fromkeys([*ids, *([own] if own is not None else [])]))


def _source(init_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of the options of `from_pretrained` that say where the files of a name are."""
    return {name: value for name, value in (init_kwargs or {}).items() if name in ("revision", "token", "cache_dir")}


def read_chat_template(path: str | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text of a Jinja file, or the template of the tokenizer saved under `path`, for use with `tokenizer`.

    Raises:
        ConfigError: there is neither, or the template writes special tokens that `tokenizer` would take for plain text.
    """
    if path is None:
        return None
    if path.endswith((".jinja", ".j2")):
        if not os.path.isfile(path):
            raise ConfigError(f"chat_template_path={path!r}: there is no such file.")
        return Path(path).read_text()
    try:
        source = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template_path={path!r} is neither a .jinja file nor a folder with a tokenizer: {error}"
        ) from error
    template = source.chat_template
    if template is None:
        raise ConfigError(f"chat_template_path={path!r}: this tokenizer has no chat template.")
    known = tokenizer.get_vocab()
    added = [token.content for token in source.added_tokens_decoder.values()]
    unknown = [token for token in added if token in str(template) and token not in known]
    if unknown:
        raise ConfigError(
            f"chat_template_path={path!r}: this template writes {', '.join(unknown)}, which the tokenizer does not "
            "have and would take for plain text. Copy template and tokens with preftune.clone_chat_template(model, "
            "tokenizer, path), and pass model and tokenizer."
        )
    return template


def with_tokens(
    processing_class: Any,
    *,
    pad_token: str | None = None,
    eos_token: str | None = None,
    chat_template: str | None = None,
    pads: bool = True,
) -> Any:
    """The tokenizer or processor with these settings: itself where it has them, else a changed copy.

    Args:
        pads: There must be a padding token; a tokenizer without one then pads with its EOS token.

    Raises:
        ConfigError: a token that the vocabulary does not have; with `pads`, neither padding nor EOS token.
    """
    tokenizer = tokenizer_of(processing_class)
    for option, token in (("pad_token", pad_token), ("eos_token", eos_token)):
        if token is not None and token not in tokenizer.get_vocab():
            raise ConfigError(
                f"{option}={token!r} is not in the tokenizer's vocabulary. Name a token it has (its own is "
                f"{getattr(tokenizer, option)!r}), or add it with tokenizer.add_tokens and resize the embeddings."
            )
    eos = eos_token or tokenizer.eos_token
    pad = pad_token or tokenizer.pad_token or (eos if pads else None)
    if pad is None and pads:
        raise ConfigError(
            f"the tokenizer ({type(tokenizer).__name__} {tokenizer.name_or_path!r}) has no padding and no EOS token. "
            "Set tokenizer.pad_token to one of its tokens."
        )
    wanted = {"eos_token": eos, "pad_token": pad, "chat_template": chat_template or tokenizer.chat_template}
    changes = {name: value for name, value in wanted.items() if getattr(tokenizer, name) != value}
    if not changes and chat_template in (None, processing_class.chat_template):
        return processing_class
    processing_class = copy.deepcopy(processing_class)
    for name, value in changes.items():
        setattr(tokenizer_of(processing_class), name, value)
    if chat_template is not None:
        processing_class.chat_template = chat_template  # a processor has one of its own
    return processing_class


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

    4-bit weights are kept in the form that gradients pass through.

    The config that was given is copied, so that it can be used again.

    Raises:
        TypeError: `peft_config` is no PeftConfig.
        ConfigError: the model already has an adapter.
    """
    _keep_gradients_of_4bit(model)
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
        if cast("PeftModel", model).active_peft_config.peft_type in ("PREFIX_TUNING", "CARTRIDGE"):
            raise ConfigError(
                "prefix tuning keeps its tokens in a cache of keys and values, which gradient checkpointing drops: the "
                "prefix would have no effect. Set gradient_checkpointing=False, or use prompt tuning."
            )
        cast("PeftModel", model).enable_input_require_grads()
    return model


def _keep_gradients_of_4bit(model: nn.Module) -> None:
    """Without it, on CPUs with AVX512-BF16, no gradient passes through a 4-bit layer that was once in eval mode.

    bitsandbytes 0.50 packs it for inference at its first forward there, and does not say so.

    Raises:
        ConfigError: it has happened already.
    """
    for name, module in model.named_modules():
        if "support_avx512bf16_for_cpu" not in vars(module):
            continue
        vars(module)["support_avx512bf16_for_cpu"] = False
        if vars(vars(module.weight)["quant_state"]).get("packing_format_for_cpu"):
            raise ConfigError(
                f"the 4-bit weights of {name!r} are packed for inference, because the model was called in eval mode "
                "before: bitsandbytes would train nothing. Load the model anew and give it to the trainer first."
            )


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
