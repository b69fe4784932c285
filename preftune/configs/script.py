"""What to train on: a dataset by name or file, or a mixture of several.

Only descriptions: loading is `preftune.cli.load_data`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from preftune.configs.fields import check_fields, did_you_mean, option
from preftune.errors import ConfigError

PROGRESS = ("auto", "plain", "bar", "none")


@dataclass
class ScriptArguments:
    """The dataset, and how the run is shown."""

    dataset_name: str | None = option(
        None, "A file (json, jsonl, csv, parquet), a folder, or a dataset on the hub. Several: see datasets."
    )
    dataset_config: str | None = option(None, "The configuration (subset) of a hub dataset.")
    dataset_train_split: str = option("train", "The split to train on.")
    dataset_test_split: str = option("test", "The split to evaluate on, where there is one and eval_strategy is set.")
    dataset_streaming: bool = option(False, "Read rows while training instead of loading them first.")
    ignore_bias_buffers: bool = option(False, "Leave boolean buffers of the model out of distributed training.")
    progress: str = option(
        "auto",
        "How progress is shown: auto (a panel in a terminal, else lines), plain (lines), bar (transformers'), none.",
        choices=PROGRESS,
    )
    health: bool = option(True, "Warn when the logs look like a failure that people have met before (docs/health.md).")
    eval_completions: int = option(
        0,
        "So many prompts of the evaluation set are answered at every eval_steps (else ten times in a run); the table "
        "goes to logs/tables and to the trackers of report_to.",
        low=0,
    )
    eval_completion_tokens: int = option(128, "The most tokens of such an answer.", low=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class DatasetConfig:
    """One dataset of a mixture."""

    path: str = option("", "A file, a folder, or a dataset on the hub.")
    name: str | None = option(None, "The configuration (subset) of a hub dataset.")
    data_dir: str | None = option(None, "The folder inside of the dataset.")
    data_files: Any = option(None, "The files of the dataset: one, a list, or a mapping from split to files.")
    split: str = option("train", "The split.")
    columns: Any = option(
        None, "Columns to keep (a list), or names of the columns in the data by standard name (a mapping)."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.path:
            raise ConfigError("A dataset of `datasets` has no path. Give a file, a folder or a hub name as path.")
        if not isinstance(self.columns, (type(None), list, dict)):
            raise ConfigError(f"columns={self.columns!r} of dataset {self.path!r}: give a list or a mapping.")


@dataclass
class DatasetMixtureConfig:
    """Several datasets, and how many rows to hold out of them (or of the one dataset)."""

    datasets: list[DatasetConfig] = option(
        [], "Several datasets, one mapping each: path, name, data_dir, data_files, split, columns."
    )
    streaming: bool = option(False, "Read the mixture while training instead of loading it first.")
    test_split_size: float | None = option(
        None,
        "Rows held out for evaluation, always the same ones: a number, or a share below 1. For one dataset too.",
        above=0,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self.datasets = [_dataset(one) for one in self.datasets]
        size = self.test_split_size
        if size is not None and size >= 1 and size != int(size):
            raise ConfigError(f"test_split_size={size}: give a whole number of rows, or a share below 1.")


@dataclass
class RewardArguments:
    """What completions are rewarded for."""

    reward_funcs: list[str] | None = option(
        None,
        "Rewards, one or several: built-in ones (numeric_match_reward, exact_match_reward, accuracy_reward, ...), your "
        "own as package.module:function, or reward models by folder or name.",
    )
    reward_model_name_or_path: str | None = option(None, "A reward model, beside reward_funcs.")

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.reward_funcs, str):
            self.reward_funcs = [self.reward_funcs]
        if not self.names:
            raise ConfigError(
                "No reward is given. Name at least one: --reward_funcs numeric_match_reward (or exact_match_reward, "
                "package.module:function, ...), or --reward_model_name_or_path FOLDER."
            )

    @property
    def names(self) -> list[str]:
        """All rewards, in the order of `reward_weights`."""
        own = [self.reward_model_name_or_path] if self.reward_model_name_or_path is not None else []
        return [*(self.reward_funcs or []), *own]


def _dataset(values: DatasetConfig | dict[str, Any]) -> DatasetConfig:
    if isinstance(values, DatasetConfig):
        return values
    known = [field.name for field in fields(DatasetConfig)]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"datasets has an entry with {key!r}{did_you_mean(key, known) or '.'} Allowed: {', '.join(known)}."
            )
    return DatasetConfig(**values)
