"""Options that every trainer has: transformers' `TrainingArguments` with preftune's defaults and checks.

A wrong value or a contradiction raises `ConfigError` when the config is built; subclasses add rules in `_check`.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from accelerate import ParallelismConfig
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_xla_available

from preftune.configs.fields import check_fields, did_you_mean, option
from preftune.configs.plain import plain
from preftune.errors import ConfigError

Config = TypeVar("Config", bound="BaseConfig")

LAYOUTS = ("auto", "tree", "padded")
_SECRETS = ("hub_token",)


@dataclass(repr=False)
class BaseConfig(TrainingArguments):
    """`TrainingArguments` for preference tuning.

    Where it differs from transformers on purpose: a machine without an accelerator sets `use_cpu`; bf16 is chosen by
    the hardware; NaN losses are shown, not filtered; every field survives `dataclasses.replace` and JSON.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "columns"]
    _OWN_DICT_FIELDS: ClassVar[tuple[str, ...]] = (
        "model_init_kwargs",
        "columns",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
    )

    logging_steps: float = option(10, "Log every N optimizer steps; a number below 1 is a share of all steps.", low=0)
    bf16: bool | None = option(
        None,
        "Train in bfloat16 mixed precision. Left unset: on where the accelerator supports it, off on CPU or with fp16.",
    )
    activation_checkpointing: bool | None = option(
        None, "Recompute activations in the backward pass: less memory, about a third more time. Off unless asked for."
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None,
        "Options of activation checkpointing, such as use_reentrant (false unless set), every_n_layers or offload.",
    )
    gradient_checkpointing: bool | None = option(None, "The older name of activation_checkpointing; same meaning.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "The older name of activation_checkpointing_kwargs; same meaning."
    )
    logging_nan_inf_filter: bool = option(
        False, "Replace NaN and infinite losses in the logs by the last good ones. Off: trouble should be seen."
    )
    use_cpu: bool = option(
        False, "Train on the CPU even where there is an accelerator. Set by itself where there is none."
    )
    use_liger_kernel: bool = option(
        False, "Use Liger's layer kernels (deprecated; its fused losses are not used, preftune has its own head)."
    )
    resume_from_checkpoint: str | bool | None = option(
        None, "Go on from this checkpoint folder; true means the newest one in output_dir. The trainer honours it."
    )
    model_init_kwargs: dict[str, Any] | str | None = option(
        None, "Options for from_pretrained when the model is given by name, for instance dtype or revision."
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with a model or tokenizer. Only if you trust it."
    )
    router_aux_loss_coef: float | None = option(
        None, "Weight of a mixture-of-experts model's load balancing loss. Unset: the model's own; 0: off.", low=0
    )
    disable_dropout: bool = option(False, "Switch dropout off in the policy and the reference model.")
    activation_offloading: bool = option(False, "Keep activations in host memory between forward and backward pass.")
    columns: dict[str, str] | str | None = option(
        None,
        "Your names for the columns, standard name first: prompt=question chosen=good rejected=bad.",
    )
    attention_layout: str = option(
        "auto",
        "How rows are laid out: tree (no padding, shared prompts computed once), padded (one row per completion), or "
        "auto (tree where a probe shows that the model can take it).",
        choices=LAYOUTS,
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Split a batch by length into pieces of at most this many tokens. Changes memory and speed, not the result. "
        "Unset: on a CPU 1024, or those of the longest prompt with its completions; elsewhere a batch is one piece.",
        low=1,
    )

    def __post_init__(self) -> None:
        self._normalise()
        check_fields(self)
        self._check()
        self._agree_on_checkpointing()
        self._choose_device()
        try:
            super().__post_init__()
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._deal_out_rows()

    def _normalise(self) -> None:
        """Bring accepted spellings of a value into its one form; runs before the checks. Extend with `super()`."""
        for name in self._OWN_DICT_FIELDS:
            value = vars(self)[name]
            if isinstance(value, str):
                setattr(self, name, _parse_mapping(name, value))
        for name in _SECRETS:
            if vars(self)[name] == f"<{name.upper()}>":  # what `to_dict` writes instead of the secret
                setattr(self, name, None)
        if isinstance(self.parallelism_config, dict):
            self.parallelism_config = ParallelismConfig(**self.parallelism_config)

    def _check(self) -> None:
        """Refuse contradictions; every single value is already of its type and range. Extend with `super()`."""
        if self.label_smoothing_factor != 0:
            raise ConfigError(
                f"label_smoothing_factor={self.label_smoothing_factor} is an option of transformers' own loss, which "
                "preftune does not use. DPO takes label_smoothing."
            )
        if self.use_liger_kernel:
            self._check_liger()
        self._check_parallelism()

    def _check_parallelism(self) -> None:
        """Every rank has rows of its own: ranks that share rows would each count them, and gradients be wrong."""
        parallel = self.parallelism_config
        for name in ("tp_size", "cp_size", "sp_size"):
            size = 1 if parallel is None else vars(parallel)[name] or 1
            if size > 1:
                raise ConfigError(
                    f"parallelism_config has {name}={size}, which splits layers or sequences over ranks; preftune "
                    "splits rows (DDP, FSDP2, ZeRO). Set it to 1; max_tokens_per_micro_batch, activation_checkpointing "
                    "and FSDP2 or ZeRO-3 save memory instead."
                )

    def _check_liger(self) -> None:
        fused = "fused_linear_cross_entropy"
        if (self.liger_kernel_config or {}).get(fused):
            raise ConfigError(
                f"liger_kernel_config has {fused}=True, but losses are computed by preftune's own chunked head. "
                f"Remove it or set it to False; Liger's layer kernels still apply."
            )
        deprecated("use_liger_kernel", "only Liger's layer kernels apply; the loss is preftune's own")
        self.liger_kernel_config = {**(self.liger_kernel_config or {}), fused: False}

    def _agree_on_checkpointing(self) -> None:
        """Let both names of activation checkpointing hold one value; reentrant only where asked for."""
        enabled = self._either("activation_checkpointing", "gradient_checkpointing")
        kwargs = self._either("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
        if enabled:
            kwargs = {"use_reentrant": False, **(kwargs or {})}
            if "selective" in kwargs:
                raise ConfigError(
                    "activation_checkpointing_kwargs has 'selective', which preftune does not offer. "
                    "every_n_layers trades memory for time instead, for instance every_n_layers=2."
                )
        self.activation_checkpointing = self.gradient_checkpointing = enabled
        self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs = kwargs

    def _either(self, new: str, old: str) -> Any:
        """The one value of an option with two names."""
        given = [vars(self)[name] for name in (new, old) if vars(self)[name] is not None]
        if len(given) == 2 and given[0] != given[1]:
            raise ConfigError(
                f"{new}={given[0]} and {old}={given[1]} disagree, and they are two names of one option. "
                "Set one of them, or (in dataclasses.replace, where both have a value) both."
            )
        return given[0] if given else None

    def _choose_device(self) -> None:
        """No accelerator, or a launcher that says so: `use_cpu`. Unset bf16: what the hardware has."""
        asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        if asked or not (torch.accelerator.is_available() or is_torch_xla_available()):
            self.use_cpu = True
        if self.bf16 is None:
            half = self.fp16 or os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16"
            self.bf16 = not half and not self.use_cpu and is_torch_bf16_gpu_available()

    def _deal_out_rows(self) -> None:
        """Each rank reads rows of its own: accelerate would cut the flat tensors of streams along their first axis."""
        if not isinstance(self.accelerator_config, AcceleratorConfig):
            return
        if self.accelerator_config.dispatch_batches:
            warnings.warn("dispatch_batches=True has no effect: every rank reads its own rows.", stacklevel=2)
        self.accelerator_config = replace(self.accelerator_config, dispatch_batches=False)

    def to_dict(self) -> dict[str, Any]:
        """Every option as JSON-able values: `type(config)(**config.to_dict())` equals `config`, secrets aside."""
        values = {field.name: plain(vars(self)[field.name], field.name) for field in fields(self) if field.init}
        for name in _SECRETS:
            values[name] = f"<{name.upper()}>" if values[name] is not None else None
        return values

    def to_json(self) -> str:
        """The config as JSON text, read back by `from_json`."""
        return json.dumps(self.to_dict(), indent=2)

    to_json_string = to_json

    @classmethod
    def from_json(cls: type[Config], text: str) -> Config:
        """Build a config from JSON text.

        Raises:
            ConfigError: It is no JSON object, or has a name that this config does not have.
        """
        return cls.from_dict(_parse_mapping("text", text))

    @classmethod
    def from_dict(cls: type[Config], values: dict[str, Any]) -> Config:
        """Build a config from a mapping; an unknown name is a `ConfigError` with the nearest one."""
        known = [field.name for field in fields(cls) if field.init]
        for name in values:
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no option {name!r}{did_you_mean(name, known) or '.'}")
        return cls(**values)

    @classmethod
    def from_training_arguments(cls: type[Config], args: TrainingArguments) -> Config:
        """The same options as this class of config; what `args` does not have keeps its default here.

        The NaN filter is switched off, whatever `args` says: transformers' default for it is on.
        """
        theirs = {field.name for field in fields(args) if field.init}
        shared = {field.name: vars(args)[field.name] for field in fields(cls) if field.init and field.name in theirs}
        shared["logging_nan_inf_filter"] = False
        return cls(**shared)


def deprecated(name: str, instead: str) -> None:
    """Warn (FutureWarning) that an option of earlier libraries is accepted, and say what holds instead."""
    warnings.warn(f"{name} is deprecated: {instead}.", FutureWarning, stacklevel=2)


def _parse_mapping(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f'{name}={text!r} is not JSON ({error}). Write a mapping such as {{"a": 1}}.') from error
    if not isinstance(value, dict):
        raise ConfigError(f'{name}={text!r} is a JSON {type(value).__name__}; it takes a mapping such as {{"a": 1}}.')
    return value
