"""Writes `docs/migrating-from-trl.md` from our classes and `trl.yaml`: `python docs/migration/generate.py [--check]`.

What is there, and with which default, is read from the code; only reasons are written by hand, in `trl.yaml`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from transformers import TrainingArguments

import preftune
from preftune.configs import BaseConfig

FACTS = Path(__file__).parent / "trl.yaml"
PAGE = Path(__file__).parents[1] / "migrating-from-trl.md"
BASE = "TrainingArguments"  # theirs is `_BaseConfig`, which has these names and no others
TRAINER_OF = {
    f"{name}Config": f"{name}Trainer" for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "SDFT", "SDPO")
}
SAME, BETTER, ABSENT, NOT_YET = "same", "better", "absent", "not yet"
PLANNED = "planned"
IDLE = "accepted, and nothing reads it yet"
NO_REASON = "?"  # what the test looks for

INTRO = """# Migrating from TRL

This page compares preftune with TRL 1.16.0, name by name. It is generated: what is there, and with which default, is
read from the code (`python docs/migration/generate.py`), and a test keeps it true.

For most scripts the import is the whole change:

```python
from preftune import DPOConfig, DPOTrainer  # was: from trl import DPOConfig, DPOTrainer
```

What you will notice then:

* **The reference is the policy as it is when the trainer is built**, not the checkpoint that it was once loaded from.
  `sync_ref_model` works with PEFT, and a reference that moves is in the checkpoints.
* **Wrong values fail when the config is built**, with the values that are allowed and the nearest name.
* **Checkpointing of activations is off** unless asked for, and bf16 follows the hardware; both are on in TRL.
* **Means are over rows or tokens**, never means of means: the loss of an epoch's last short batch, `eval_loss` of SFT
  and all metrics do not depend on how rows were dealt to batches, ranks and accumulation steps. Curves may differ.
* **A row that is cut or dropped is reported**, with its number.
* **A loss that is not finite stops the run** before it spoils the weights.
* **No telemetry**, and a resumed run equals the uninterrupted one bit for bit.

In the tables **same** means that name, meaning and default are TRL's; **better** that the name is there and differs as
said; **absent** that it is not, and what to use instead; **not yet** that it is planned, or accepted without effect.
"""


class Row(NamedTuple):
    """A line of a table: their name and default, and how it is here."""

    name: str
    default: str
    status: str
    note: str = ""


Section = tuple[str, str | None, tuple[str, ...], list[Row]]


class Reasons:
    """The hand-written sentences, looked up by class and name."""

    def __init__(self, better: Mapping[str, str], absent: Mapping[str, str], planned: Mapping[str, str]) -> None:
        self.better, self.absent, self.planned, self.used = better, absent, planned, set()

    def find(self, status: str, owner: str, name: str) -> str | None:
        for key in (f"{owner}.{name}", f"{name}@{owner}", name):
            if key in vars(self)[status]:
                self.used.add(key)
                return " ".join(vars(self)[status][key].split())
        return None


def read_facts() -> dict[str, Any]:
    return yaml.safe_load(FACTS.read_text(encoding="utf-8"))


def our_class(name: str) -> type | None:
    """Ours of that name, or None while there is none; options of a trainer that is not there yet do not count."""
    if name == BASE:
        return BaseConfig
    needed = {name, TRAINER_OF.get(name, name)}
    return getattr(preftune, name) if needed <= set(preftune.__all__) else None


def plain(value: Any) -> Any:
    """A default as a config file has it."""
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def defaults_of(cls: type) -> dict[str, Any]:
    """Field -> default."""
    made = {f.name: f.default_factory for f in dataclasses.fields(cls) if f.init}
    given = {f.name: f.default for f in dataclasses.fields(cls) if f.init}
    missing = dataclasses.MISSING
    return {n: plain(v if v is not missing else None if made[n] is missing else made[n]()) for n, v in given.items()}


def their_defaults(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Field -> default there; of the base, transformers' own where TRL declares none."""
    own = facts["configs"][name]
    return {**defaults_of(TrainingArguments), **own} if name == BASE else own


@functools.cache
def words_that_act() -> frozenset[str]:
    """Every word of the package's code; of the configs only what functions read, since there all fields are named."""
    root = Path(preftune.__file__).parent
    words: set[str] = set()
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "configs" in path.relative_to(root).parts:
            words |= {name for owner, name in re.findall(r"(\w+)\.(\w+)", text) if owner != "self"}
        else:
            words |= set(re.findall(r"\w+", text))
    return frozenset(words)


def is_read(field: str) -> bool:
    """Whether some code acts on a field, by its name or the property that resolves it; transformers reads its own."""
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    return field in inherited or not words_that_act().isdisjoint({field, f"resolved_{field}"})


def spell(value: Any) -> str:
    """A default as it stands in a table."""
    return f"`{value!r}`".replace("|", "\\|")


def is_same(ours: Any, theirs: Any) -> bool:
    return ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool)


def config_rows(facts: Mapping[str, Any], name: str, reasons: Reasons) -> list[Row]:
    """One row for each field of theirs; of the base, those that TRL declares or that differ."""
    cls = our_class(name)
    if cls is None:
        return [Row(field, spell(value), NOT_YET) for field, value in facts["configs"][name].items()]
    ours, rows = defaults_of(cls), []
    for field, theirs in their_defaults(facts, name).items():
        if field not in ours:
            rows.append(Row(field, spell(theirs), ABSENT, reasons.find(ABSENT, name, field) or NO_REASON))
            continue
        note = reasons.find(BETTER, name, field)
        same = is_same(ours[field], theirs)
        if name == BASE and same and note is None and field not in facts["configs"][BASE]:
            continue
        if note is None and not is_read(field):
            rows.append(Row(field, spell(theirs), NOT_YET, IDLE))
            continue
        here = "" if same else f"default {spell(ours[field])}: "
        text = f"{here}{note or ('' if same else NO_REASON)}"
        rows.append(Row(field, spell(theirs), SAME if same and note is None else BETTER, text))
    return rows


def constructor_rows(name: str, arguments: Sequence[str], reasons: Reasons) -> list[Row]:
    """One row for each argument of a constructor, with its place as the "default"."""
    cls = our_class(name)
    if cls is None:
        return [Row(argument, str(place), NOT_YET) for place, argument in enumerate(arguments, 1)]
    ours, rows = list(inspect.signature(cls).parameters), []
    for place, argument in enumerate(arguments, 1):
        refused = reasons.find(ABSENT, name, argument)
        note = reasons.find(BETTER, name, argument)
        planned = reasons.find(PLANNED, name, argument)
        if argument not in ours and planned is not None:
            rows.append(Row(argument, str(place), NOT_YET, planned))
        elif argument not in ours or refused is not None:
            rows.append(Row(argument, str(place), ABSENT, refused or NO_REASON))
        elif ours.index(argument) + 1 != place:
            rows.append(Row(argument, str(place), BETTER, f"argument {ours.index(argument) + 1}: {note or NO_REASON}"))
        else:
            rows.append(Row(argument, str(place), SAME if note is None else BETTER, note or ""))
    return rows


def resolve(path: str, name: str) -> Any:
    """The object `path.name`, or None."""
    try:
        return getattr(importlib.import_module(path), name)
    except (ModuleNotFoundError, AttributeError):
        return None


def name_rows(group: Mapping[str, Any], reasons: Reasons) -> list[Row]:
    """One row for each name of a module; its "default" is where ours is."""
    rows, path = [], group.get("here", "preftune")
    for name in group["names"]:
        found = resolve(path, name) is not None
        reason = reasons.find(BETTER if found else ABSENT, group["module"], name)
        if found:
            rows.append(Row(name, f"`{path}`", SAME if reason is None else BETTER, reason or ""))
        else:
            rows.append(Row(name, "", NOT_YET if reason is None else ABSENT, reason or ""))
    return rows


def table(heads: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for name, default, status, note in rows:
        yield f"| `{name}` | {default} | {status} | {note} |".replace("|  |", "| |")
    yield ""


def besides(facts: Mapping[str, Any], name: str) -> str | None:
    """A sentence on the fields that only ours has."""
    cls = our_class(name)
    if cls is None:
        return "*Not there yet.*"
    known = {*their_defaults(facts, name), *(() if name == BASE else defaults_of(BaseConfig))}
    only = [f"`{field}`" for field in defaults_of(cls) if field not in known]
    return f"Here alone: {', '.join(only)}." if only else None


TITLES = {BASE: "Options of every trainer"}


def sections(facts: Mapping[str, Any], reasons: Reasons) -> Iterator[Section]:
    """(heading, sentence, heads of columns, rows) of each table, in the order of the page."""
    for group in facts["names"]:
        yield f"Names of `{group['module']}`", None, ("name", "here", "", "how or why"), name_rows(group, reasons)
    for name in facts["configs"]:
        heads = ("field", "default in TRL", "here", "how or why")
        yield TITLES.get(name, f"`{name}`"), besides(facts, name), heads, config_rows(facts, name, reasons)
    for name, arguments in facts["constructors"].items():
        heads = ("argument", "place in TRL", "here", "how or why")
        yield f"Arguments of `{name}`", None, heads, constructor_rows(name, arguments, reasons)


def reasons_of(facts: Mapping[str, Any]) -> Reasons:
    return Reasons(facts["better"], facts["absent"], facts["planned"])


def generate(facts: Mapping[str, Any]) -> str:
    """The page."""
    lines = [INTRO]
    for heading, sentence, heads, rows in sections(facts, reasons_of(facts)):
        lines += [f"## {heading}", "", *([sentence, ""] if sentence else []), *table(heads, rows)]
    return "\n".join(lines).rstrip() + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Writes the page, or compares it with `--check`; returns 1 where it is stale."""
    text = generate(read_facts())
    stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text
    if "--check" in (sys.argv[1:] if words is None else words):
        print("stale: run python docs/migration/generate.py" if stale else "up to date")
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
