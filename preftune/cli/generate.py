"""`python -m preftune.cli.generate`: writes `help_text/*.json` from the dataclasses (`--check`: only compares).

Run it after a change of a config or of the transformers version; a test fails until then.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preftune.cli.commands import COMMANDS, SHARED_CLASSES, load_object
from preftune.cli.options import options_of, to_json

FOLDER = Path(__file__).parent / "help_text"
_BASE = "BaseConfig"


def described_classes() -> dict[str, type]:
    """Every config class that a command takes its options from, the base first."""
    paths = {name: f"{module}:{name}" for name, module in SHARED_CLASSES.items()}
    for command in COMMANDS.values():
        if command.config is not None:
            paths[command.config.partition(":")[2]] = command.config
    return {name: load_object(path) for name, path in paths.items()}


def generate() -> dict[str, str]:
    """File names and contents; a config of a trainer holds only what differs from the base."""
    classes = described_classes()
    shared = [to_json(option) for option in options_of(classes[_BASE])]
    contents = {}
    for name, cls in classes.items():
        extends = _BASE if name != _BASE and issubclass(cls, classes[_BASE]) else None
        own = [to_json(option) for option in options_of(cls)]
        if extends is not None:
            own = [option for option in own if option not in shared]
        contents[f"{name}.json"] = _text(name, extends, own)
    return contents


def _text(name: str, extends: str | None, options: list[dict[str, Any]]) -> str:
    """JSON with one option a line, so that a change reads well in a diff."""
    head = {"class": name, "extends": extends, "transformers": importlib.metadata.version("transformers")}
    lines = ",\n".join(json.dumps(option, ensure_ascii=False) for option in options)
    return json.dumps(head)[:-1] + f', "options": [\n{lines}\n]}}\n'


def main(words: Sequence[str] | None = None) -> int:
    """Write the files, or compare them with `--check`; returns 1 where they differ."""
    check = "--check" in (sys.argv[1:] if words is None else words)
    contents = generate()
    stale = [name for name, text in contents.items() if _read(FOLDER / name) != text]
    stale += [path.name for path in sorted(FOLDER.glob("*.json")) if path.name not in contents]
    if check:
        print(f"stale: {', '.join(stale)}" if stale else "up to date")
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        path = FOLDER / name
        path.write_text(contents[name], encoding="utf-8") if name in contents else path.unlink()
        print(f"wrote {name}" if name in contents else f"removed {name}")
    return 0


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
