"""Writes help texts: of `preftune` itself, and of a command with all its options by group.

Plain text wrapped to the terminal; nothing is formatted with %, so texts may hold any sign.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping

from preftune.cli.options import GENERAL, Option
from preftune.errors import ConfigError

TITLES = {
    "ScriptArguments": "Data",
    "DatasetMixtureConfig": "Several datasets, rows held out",
    "ModelConfig": "Model and adapter",
    "SFTConfig": "Supervised fine-tuning",
    "DPOConfig": "Preference loss and stored reference",
    "RewardArguments": "Rewards",
    "GRPOConfig": "Loss, advantages, entropy, corrections",
    "RLOOConfig": "Leave-one-out",
    "SDFTConfig": "What the teacher is told",
    "SDPOConfig": "Attempts, feedback, policy gradient",
    "DistillationConfig": "Teacher and divergence",
    "OnlineConfig": "Trust region",
    "RewardedConfig": "Calling reward functions",
    "RolloutConfig": "Sampling, rounds, what generates",
    "ReferenceConfig": "Moving reference",
    "OfflineConfig": "Lengths and preparation",
    "BaseConfig": "Layout, columns, memory",
    "LaunchArguments": "Several processes",
    "TrainingArguments": "Training loop (transformers)",
}
_KINDS = {
    "int": "INT",
    "float": "NUMBER",
    "str": "TEXT",
    "list": "ITEM ...",
    "list[str]": "TEXT ...",
    "list[int]": "INT ...",
    "list[float]": "NUMBER ...",
    "list[dict]": "JSON ...",
    "dict": "KEY=VALUE ... | JSON",
    "dict[str]": "KEY=VALUE ...",
    "any": "VALUE",
}


def overview(commands: Iterable[tuple[str, str]], width: int | None = None) -> str:
    """Help of `preftune` itself: the commands and how to go on."""
    columns = width or _width()
    lines = ["usage: preftune COMMAND [options]", ""]
    lines += _wrap("Tune language models from preferences.", columns)
    lines += ["", "commands:"]
    for name, summary in commands:
        lines += _entry(name, summary, columns)
    lines += ["", "options:"]
    lines += _entry("--help", "Show this text.", columns)
    lines += _entry("--version", "Show the version.", columns)
    lines += ["", *_wrap("preftune COMMAND --help lists the options of a command.", columns)]
    return "\n".join(lines)


def render(
    command: str, summary: str, options: Mapping[str, Option], word: str | None = None, width: int | None = None
) -> str:
    """Help of a command: its options by group, or those that have `word` in their name or text.

    Raises:
        ConfigError: No option has `word`.
    """
    columns = width or _width()
    shown = [option for option in options.values() if word is None or _mentions(option, word)]
    if not shown:
        raise ConfigError(f"no option of {command} has {word!r} in its name or text; {command} --help lists all.")
    lines = [*_wrap(f"usage: {command} [--config FILE] [options]", columns)]
    if summary:
        lines += ["", *_wrap(summary, columns)]
    if word is None:
        lines += ["", "general:"]
        for name, text in GENERAL.items():
            lines += _entry(f"--{name}" + {"config": " FILE", "help": " [WORD]"}.get(name, ""), text, columns)
    for group in _in_order(option.group for option in shown):
        lines += ["", f"{TITLES.get(group, group)}:"]
        for option in shown:
            if option.group == group:
                lines += _entry(f"--{option.name}{_metavar(option)}", describe(option), columns)
    return "\n".join(lines)


def describe(option: Option) -> str:
    """The help text with choices and default after it."""
    choices = f" One of: {', '.join(option.choices)}." if option.choices else ""
    if option.rules.get("paths"):
        choices = choices[:-1] + ", or package.module:function."
    default = "" if option.default is None or option.default in ("", []) else f" (default: {_spell(option.default)})"
    if option.default is True:
        default = f" (default: true; --no_{option.name} turns it off)"
    return " ".join(option.help.split()) + choices + default


def _mentions(option: Option, word: str) -> bool:
    text = f"{option.name} {option.help}".lower()
    return word.lower() in text or word.lower().lstrip("-").replace("-", "_") in option.name


def _in_order(groups: Iterable[str]) -> list[str]:
    present = list(dict.fromkeys(groups))
    titled = [group for group in TITLES if group in present]
    return titled[:-1] + [group for group in present if group not in TITLES] + titled[-1:]


def _metavar(option: Option) -> str:
    if option.choices:
        plural = " ..." if option.takes("list") else ""
        return " WORD" + plural
    kinds = [_KINDS[kind] for kind in option.kinds if kind in _KINDS]
    if option.takes("list") and len(kinds) > 1:
        kinds = [kind for kind in kinds if kind.endswith("...")]
    if option.takes("dict"):
        kinds = [kind for kind in kinds if "KEY" in kind]
    wanted = "|".join(dict.fromkeys(kinds))
    if not option.flag:
        return f" {wanted}"
    return f" [{wanted}]" if wanted else ""


def _spell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _entry(head: str, text: str, width: int) -> list[str]:
    """A head and its text: beside it where there is room, below it in a narrow terminal."""
    indent = 28 if width >= 72 else 6
    body = _wrap(text, width, " " * indent)
    if len(head) + 4 <= indent and body:
        return ["  " + head.ljust(indent - 2) + body[0].lstrip(), *body[1:]]
    return [*_wrap(head, width, "      ", "  "), *body]


def _wrap(text: str, width: int, indent: str = "", first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 110)
