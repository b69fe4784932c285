"""Checks before anything heavy is imported or loaded: files, folders, columns, what must be given.

Each refusal here saves the minutes that loading a model takes.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from preftune.cli.commands import SHARED_CLASSES, Command, load_object
from preftune.cli.options import Option, by_name, load_options, options_of, read_file
from preftune.cli.parse import Parsed
from preftune.configs.fields import did_you_mean
from preftune.errors import ConfigError, DataFormatError

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_FIRST_BYTES = 1 << 20


def current_options(command: Command) -> dict[str, Option]:
    """The options of a command as the installed transformers has them.

    The generated files hold those of one version; with another one the dataclasses themselves are read, which takes
    seconds.
    """
    names = command.option_classes
    if read_file("BaseConfig")["transformers"] == importlib.metadata.version("transformers"):
        return load_options(names)
    classes = [load_object(str(command.config))]
    classes += [load_object(f"{SHARED_CLASSES[name]}:{name}") for name in names if name in SHARED_CLASSES]
    return by_name(option for cls in classes for option in options_of(cls))


def check(command: Command, parsed: Parsed) -> None:
    """Refuse what is known to fail.

    Raises:
        ConfigError: No model or dataset is given, one of them is not there, or the output folder cannot be written.
        DataFormatError: The dataset is a file without the columns that the command needs.
    """
    values = parsed.values
    _check_model(values.get("model_name_or_path"), command)
    _check_dataset(values, command)
    output = values.get("output_dir")
    if output is not None:
        check_writable(Path(output).expanduser(), "output_dir")
    resume = values.get("resume_from_checkpoint")
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise ConfigError(
            f"resume_from_checkpoint={resume!r}: there is no such folder{_near(Path(resume))} "
            "Give a checkpoint-N folder, or true for the newest one in output_dir."
        )


def _check_model(name: str | None, command: Command) -> None:
    if name is None:
        raise ConfigError(
            f"no model is given. Add --model_name_or_path FOLDER_OR_HUB_NAME (or model_name_or_path in the YAML file); "
            f"preftune {command.name} --help model lists its options."
        )
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise ConfigError(f"model_name_or_path={name!r} is a folder without config.json or adapter_config.json.")
    elif path.exists():
        raise ConfigError(f"model_name_or_path={name!r} is a file; give the model's folder or its name on the hub.")
    elif looks_local(name):
        raise ConfigError(f"model_name_or_path={name!r}: there is no such folder{_near(path)}")


def _check_dataset(values: Mapping[str, Any], command: Command) -> None:
    name, several = values.get("dataset_name"), values.get("datasets")
    if name is not None and several:
        raise ConfigError("dataset_name and datasets are both given. Put the one dataset into datasets, or remove it.")
    if name is None and not several:
        raise ConfigError(
            "no dataset is given. Add --dataset_name FILE_OR_HUB_NAME (or dataset_name in the YAML file), or datasets "
            "for several."
        )
    names = [name] if name is not None else [one.get("path") for one in several or [] if isinstance(one, dict)]
    for one in names:
        if isinstance(one, str):
            check_exists(one, "dataset_name" if name is not None else "datasets")
    if name is not None and Path(name).is_file():
        found = columns_in(Path(name))
        if found:
            check_columns(found, values.get("columns"), command.required, name)


def looks_local(name: str) -> bool:
    """Whether a name can only be meant as a path: it is absolute, relative, or has more parts than a hub name."""
    return name.startswith(("/", "./", "../", "~", ".\\")) or name.count("/") > 1 or "\\" in name


def check_exists(name: str, option: str) -> None:
    """Refuse a dataset that is neither there nor a possible name on the hub."""
    path = Path(name).expanduser()
    if not path.exists() and (looks_local(name) or path.suffix.lower() in DATA_SUFFIXES):
        raise ConfigError(f"{option}={name!r}: there is no such file or folder{_near(path)}")
    if path.is_file() and not any(suffix.lower() in DATA_SUFFIXES for suffix in path.suffixes):
        raise ConfigError(f"{option}={name!r}: files of this kind are not read. Known: {', '.join(DATA_SUFFIXES)}.")


def check_writable(folder: Path, option: str) -> None:
    """Refuse a folder that cannot be made or written to."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{option}={str(folder)!r}: {str(there)!r} is a file, not a folder. Choose another folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}={str(folder)!r}: {str(there)!r} cannot be written to. Choose another folder.")


def check_columns(found: Iterable[str], renamed: Mapping[str, str] | None, required: Iterable[str], where: str) -> None:
    """Refuse a column map that names columns which are not there, and rows without a required column.

    Args:
        found: Columns of the data.
        renamed: The column map, standard name to column.
        required: Standard names without which no row can be read.
        where: The dataset, for the message.
    """
    names = list(found)
    mapping = dict(renamed or {})
    for standard, column in mapping.items():
        if column not in names:
            raise DataFormatError(
                f"columns maps {standard!r} to {column!r}, which {where} does not have"
                f"{did_you_mean(column, names) or '.'} It has: {', '.join(names)}."
            )
    missing = [name for name in required if name not in mapping and name not in names]
    if missing:
        raise DataFormatError(
            f"{where} has columns {', '.join(names)}; {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"missing. If they have other names, say so: --columns {' '.join(f'{name}=YOUR_NAME' for name in missing)}."
        )


def columns_in(path: Path) -> list[str]:
    """The columns of a local data file as its beginning shows them; empty where that would take reading it all."""
    suffix = path.suffix.lower()
    try:
        if suffix in (".json", ".jsonl"):
            return _json_columns(path)
        if suffix in (".csv", ".tsv"):
            with path.open(newline="", encoding="utf-8") as file:
                return next(csv.reader(file, delimiter="\t" if suffix == ".tsv" else ","), [])
    except UnicodeDecodeError as error:
        raise DataFormatError(f"{path}: it is not text in UTF-8 ({error}).") from error
    return []


def _json_columns(path: Path) -> list[str]:
    """Keys of the first row, of a list of rows or of one row a line."""
    with path.open("rb") as file:
        text = file.read(_FIRST_BYTES).decode("utf-8", errors="ignore").lstrip("\ufeff \t\r\n")
    if not text:
        raise DataFormatError(f"{path} is empty.")
    start = text.find("{")
    if start < 0 or text[:start].strip() not in ("", "["):
        return []
    try:
        row, _ = json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError:
        return []  # a first row beyond what was read, or a fault that the loader names with its line
    if text[0] == "{" and len(row) == 1 and isinstance(next(iter(row.values())), list):
        return []  # perhaps {"data": [rows]}: the loader decides
    return list(row)


def _near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.R_OK):
        return "."
    return did_you_mean(path.name, [entry.name for entry in folder.iterdir()]) or "."
