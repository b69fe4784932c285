"""Runs a training command: builds config, data and trainer from the parsed options, trains, saves, evaluates.

Everything that can fail cheaply has its turn before the trainer loads the model.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets import disable_progress_bars as disable_dataset_bars
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar as disable_model_bars

from preftune.callbacks.completions import LogCompletionsCallback
from preftune.callbacks.health import HealthCallback
from preftune.cli.commands import Command, load_object
from preftune.cli.launch import already_launched, check_world_size
from preftune.cli.load_data import load_splits
from preftune.cli.parse import Parsed
from preftune.cli.preflight import check_columns, check_writable
from preftune.configs.base import BaseConfig
from preftune.configs.model import ModelConfig, get_kbit_device_map, get_peft_config, get_quantization_config
from preftune.configs.script import DatasetMixtureConfig, RewardArguments, ScriptArguments
from preftune.errors import ConfigError
from preftune.losses.importing import import_callable
from preftune.losses.names import is_import_path

MOST_SCORED = 1000  # of the evaluation set; enough for an interval of three points


def run(command: Command, parsed: Parsed) -> int:
    """Train as the options say; returns the exit code.

    Raises:
        PreftuneError: An option, the data or the machine does not allow it.
    """
    script = ScriptArguments(**parsed.of("ScriptArguments"))
    model = ModelConfig(**parsed.of("ModelConfig"))
    mixture = DatasetMixtureConfig(**parsed.of("DatasetMixtureConfig"))
    rewards = reward_functions(RewardArguments(**parsed.of("RewardArguments"))) if command.rewards else None
    _warn_of_unused(model, parsed)
    _choose_bars(script.progress)
    args = build_args(command, parsed, model)
    trainer = build_trainer(command, parsed, args, script, mixture, model, rewards)
    show_answers(trainer, script)
    scores = {"before": score_held_out(command, trainer)}
    result = trainer.train()
    save(trainer, args, result.metrics)  # before anything else can fail
    scores["after"] = score_held_out(command, trainer)
    report_scores(trainer, scores)
    if trainer.eval_dataset is not None:
        trainer.save_metrics("eval", trainer.evaluate())
    if trainer.is_world_process_zero():
        print(f"The model and its metrics are in {args.output_dir}")
    if already_launched(os.environ):
        _leave_process_group()
    return 0


def reward_functions(arguments: RewardArguments) -> list[Any]:
    """The reward functions that are named; reward models stay names.

    Raises:
        ConfigError: a name that stands for nothing.
    """
    from preftune.rewards import resolve_reward

    return [resolve_reward(name) for name in arguments.names]


def build_args(command: Command, parsed: Parsed, model: ModelConfig) -> Any:
    """The trainer's config, with what the model options say about loading.

    Raises:
        ConfigError: A contradiction, an unwritable output folder, or a process that would train alone.
    """
    path = str(command.config)
    options = parsed.of(path.partition(":")[2])
    options.setdefault("output_dir", f"{Path(str(model.model_name_or_path)).name}-{command.name.upper()}")
    args = load_object(path)(**options)
    check_writable(Path(args.output_dir), "output_dir")
    check_world_size(os.environ, args.world_size)
    args.model_init_kwargs = {**model_init_kwargs(model), **(args.model_init_kwargs or {})}
    losses = options.get("loss_type", [])
    for name in [losses] if isinstance(losses, str) else losses:
        if is_import_path(name):
            import_callable(name, option="loss_type")
    return args


def model_init_kwargs(model: ModelConfig) -> dict[str, Any]:
    """What `from_pretrained` is to be told; `model_init_kwargs` of the config goes before it."""
    kwargs: dict[str, Any] = {"revision": model.model_revision, "dtype": model.dtype}
    if model.attn_implementation is not None:
        kwargs["attn_implementation"] = model.attn_implementation
    if model.load_in_4bit or model.load_in_8bit:
        kwargs["device_map"] = get_kbit_device_map()
    return kwargs


def build_trainer(
    command: Command,
    parsed: Parsed,
    args: Any,
    script: ScriptArguments,
    mixture: DatasetMixtureConfig,
    model: ModelConfig,
    rewards: list[Any] | None = None,
) -> Any:
    """Load the data, then the trainer with its model."""
    evaluate = args.eval_strategy != "no" or "dataset_test_split" in parsed.values or script.eval_completions > 0
    with args.main_process_first(desc="loading the dataset"):
        splits = load_splits(script, mixture, evaluate=evaluate)
    if splits.train.column_names is not None:
        where = script.dataset_name or "the mixture of datasets"
        check_columns(splits.train.column_names, args.columns, command.required, where)
    options: dict[str, Any] = {
        "model": os.path.expanduser(str(model.model_name_or_path)),
        "args": args,
        "train_dataset": splits.train,
        "eval_dataset": splits.evaluation,
        "peft_config": get_peft_config(model),
        "callbacks": [*progress_callbacks(script.progress, args), *([HealthCallback()] if script.health else [])],
    }
    if rewards is not None:
        options["reward_funcs"] = rewards
    quantization = get_quantization_config(model)
    if quantization is not None:
        options["quantization_config"] = quantization
    trainer = load_object(str(command.trainer))(**options)
    if script.progress == "none":
        trainer.remove_callback(PrinterCallback)
    if script.ignore_bias_buffers:
        buffers = [name for name, buffer in trainer.model.named_buffers() if str(buffer.dtype) == "torch.bool"]
        trainer.model._ddp_params_and_buffers_to_ignore = buffers
    return trainer


def _choose_bars(progress: str) -> None:
    """The bars of transformers and datasets are for terminals; in a log file each redraw would be a line."""
    if progress in ("plain", "none") or not sys.stderr.isatty():
        disable_model_bars()
        disable_dataset_bars()


def progress_callbacks(progress: str, args: BaseConfig) -> list[Any]:
    """The callbacks that show progress; beside ours, transformers' bar stays off."""
    if progress == "bar":
        return []
    args.disable_tqdm = True
    if progress == "none":
        return []
    from rich.console import Console

    from preftune.callbacks.progress import RichProgressCallback

    return [RichProgressCallback(Console(force_interactive=False) if progress == "plain" else None)]


def show_answers(trainer: Any, script: ScriptArguments) -> None:
    """What the policy answers to held-out prompts, where it is asked for.

    Raises:
        ConfigError: rows without prompts, or a model that cannot answer.
    """
    if not script.eval_completions:
        return
    count, length = script.eval_completions, script.eval_completion_tokens
    try:
        trainer.add_callback(LogCompletionsCallback(trainer, num_prompts=count, max_new_tokens=length))
    except ValueError as error:
        raise ConfigError(f"eval_completions={count}: {error}.") from error


def save(trainer: Any, args: Any, metrics: dict[str, float]) -> None:
    """The model, the state and the metrics of training; to the hub too where asked."""
    trainer.save_model(args.output_dir)
    trainer.save_state()
    trainer.save_metrics("train", metrics)
    if args.push_to_hub:
        trainer.push_to_hub()


def score_held_out(command: Command, trainer: Any) -> Any:
    """Scores of the first held-out rows under the policy as it is, or None where there are none to score."""
    rows = trainer.eval_dataset
    if command.scores is None or not isinstance(rows, Dataset):
        return None
    return getattr(trainer, command.scores)(rows.select(range(min(len(rows), MOST_SCORED))))


def report_scores(trainer: Any, scores: dict[str, Any]) -> None:
    """Print and save what held-out rows show before and after training."""
    measured = {when: table for when, table in scores.items() if table is not None}
    if not measured or not trainer.is_world_process_zero():
        return
    figures = {}
    for when, table in measured.items():
        print(f"{when} training, {table}")
        for form, share in table.shares.items():
            figures |= {
                f"{form}_{when}": share.value,
                f"{form}_{when}_low": share.low,
                f"{form}_{when}_high": share.high,
            }
    (name,) = {table.name for table in measured.values()}
    trainer.save_metrics(name, figures)


def _leave_process_group() -> None:
    """Without this torch warns, and some exits hang."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _warn_of_unused(model: ModelConfig, parsed: Parsed) -> None:
    adapter = [
        name for name in parsed.of("ModelConfig") if name.startswith("lora_") or name in ("use_dora", "use_rslora")
    ]
    if adapter and not model.use_peft:
        warnings.warn(f"{', '.join(adapter)} without use_peft has no effect: all weights are trained.", stacklevel=2)
