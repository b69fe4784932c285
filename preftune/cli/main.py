"""The entry point: finds the command, and turns mistakes of the user into one line and exit code 2.

`--traceback` or PREFTUNE_TRACEBACK=1 shows where an error came from.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from preftune.cli.commands import COMMANDS, Command, load_object
from preftune.configs.fields import did_you_mean
from preftune.errors import ConfigError, PreftuneError

USER_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `preftune` with the words `argv` (those of the process by default); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # losses and rewards may stand in the user's folder
    try:
        return _dispatch(words)
    except PreftuneError as error:
        if _wants_traceback(words):
            raise
        print(f"preftune{_rank()}: error: {error}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; without this Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("preftune: interrupted", file=sys.stderr)
        return INTERRUPTED


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        from preftune.cli.help import overview

        print(overview([(command.name, command.summary) for command in COMMANDS.values()]))
        return 0
    if words[0] == "--version":
        from preftune import __version__

        print(__version__)
        return 0
    name, *rest = words
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or "."
        raise ConfigError(f"there is no command {name!r}{hint} Commands: {', '.join(COMMANDS)}.")
    command = COMMANDS[name]
    if command.config is None:
        return load_object(command.run)(rest)
    return _run_with_options(command, rest)


def _run_with_options(command: Command, words: list[str]) -> int:
    """Help, launch in several processes, or run here."""
    from preftune.cli.options import load_options

    if words and words[0] == "-h":
        words = ["--help", *words[1:]]
    typed = f"preftune {command.name}"
    if "--help" in words:
        from preftune.cli.help import render

        after = words[words.index("--help") + 1 :]
        word = after[0].lstrip("-") if after else None
        print(render(typed, command.summary, load_options(command.option_classes), word))
        return 0
    warnings.showwarning = _show_warning
    from preftune.cli import launch, preflight
    from preftune.cli.parse import parse

    parsed = parse(words, preflight.current_options(command), typed)
    os.environ.update(parsed.environment)
    preflight.check(command, parsed)
    settings = parsed.of("LaunchArguments")
    if settings and not launch.already_launched(os.environ):
        line, processes = launch.launch_command(command.name, settings, parsed.tokens_without("LaunchArguments"))
        return launch.launch(line, processes)
    return load_object(command.run)(command, parsed)


def _wants_traceback(words: Sequence[str]) -> bool:
    return "--traceback" in words or os.environ.get("PREFTUNE_TRACEBACK", "") not in ("", "0")


def _rank() -> str:
    rank = os.environ.get("RANK")
    return f" (process {rank})" if rank not in (None, "0") else ""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line a warning, of the first process; what dependencies say to one another of their future is left out."""
    others = issubclass(category, (FutureWarning, DeprecationWarning)) and "preftune" not in Path(filename).parts
    if others or os.environ.get("RANK", "0") != "0":
        return
    print(f"preftune: {category.__name__}: {message}", file=file or sys.stderr)
