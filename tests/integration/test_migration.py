"""The page for those who come from TRL is up to date, its claims are those of the code, differences have reasons."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

import preftune
from preftune.configs import BaseConfig

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("migration", ROOT / "docs" / "migration" / "generate.py")
assert _SPEC is not None and _SPEC.loader is not None
migration = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(migration)

FACTS = migration.read_facts()
SOURCES = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "preftune").rglob("*.py"))
REMEDY = "run `python docs/migration/generate.py`"


def tables() -> dict[str, list[list[str]]]:
    """Heading -> rows of cells, as the page has them."""
    found: dict[str, list[list[str]]] = {}
    for part in migration.PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        lines = [line for line in body.splitlines() if line.startswith("| `")]
        found[heading.strip("`")] = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return found


def test_page_is_up_to_date():
    assert migration.generate(FACTS) == migration.PAGE.read_text(encoding="utf-8"), REMEDY


def test_every_name_and_field_has_a_row():
    page = tables()
    for name, fields in FACTS["configs"].items():
        rows = [row[0].strip("`") for row in page[migration.TITLES.get(name, name)]]
        assert set(fields) <= set(rows) and len(rows) == len(set(rows)), name
    for group in FACTS["names"]:
        rows = [row[0].strip("`") for row in page[f"Names of `{group['module']}"]]
        assert rows == group["names"]


@pytest.mark.parametrize("name", FACTS["configs"])
def test_claims_about_defaults_are_true(name):
    """Read back from the page and compared with the class, not with what the generator computed."""
    rows = tables()[migration.TITLES.get(name, name)]
    trainer = migration.TRAINER_OF.get(name, name)
    if name != migration.BASE and not {name, trainer} <= set(preftune.__all__):
        assert {status for _, _, status, _ in rows} == {migration.NOT_YET}
        return
    cls = BaseConfig if name == migration.BASE else getattr(preftune, name)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for field, theirs, status, note in rows:
        found = fields.get(field.strip("`"))
        assert (found is None) == (status == migration.ABSENT), field
        if found is None:
            continue
        default = found.default if found.default is not dataclasses.MISSING else found.default_factory()
        assert (f"`{default!r}`" == theirs) == (not note.startswith("default `")), field
        if note == migration.IDLE:
            assert status == migration.NOT_YET and f"args.{field.strip('`')}" not in SOURCES, field
        else:
            assert status == (migration.BETTER if note else migration.SAME), field


def test_every_difference_has_a_reason_and_every_reason_a_difference():
    reasons = migration.reasons_of(FACTS)
    rows = {heading: table for heading, _, _, table in migration.sections(FACTS, reasons)}
    bare = [f"{heading}: {row.name}" for heading, table in rows.items() for row in table if "?" in row.note[-1:]]
    assert not bare, f"say in docs/migration/trl.yaml why these differ: {bare}"
    waiting = {row.name for table in rows.values() for row in table if row.status == migration.NOT_YET}
    unused = (set(reasons.better) | set(reasons.absent)) - reasons.used
    unused = {key for key in unused if not waiting & {re.split(r"[@.]", key)[0], re.split(r"[@.]", key)[-1]}}
    assert not unused, f"these lines of docs/migration/trl.yaml say nothing of what there is: {sorted(unused)}"


def test_a_wrong_claim_is_found(monkeypatch):
    """The comparison sees a changed default, a missing field and a difference that nobody has explained."""

    @dataclasses.dataclass
    class Mine:
        same: int = 1
        other: float = 0.5
        flag: bool = True
        idle: int = 0

    facts = {"configs": {"Mine": {"same": 1, "other": 0.1, "gone": None, "flag": 1, "idle": 0}}}
    monkeypatch.setattr(migration, "our_class", lambda name: Mine)
    monkeypatch.setattr(migration, "is_read", lambda field: field != "idle")
    rows = migration.config_rows(facts, "Mine", migration.Reasons({"other": "since"}, {}, {}))
    assert [tuple(row)[2:] for row in rows] == [
        ("same", ""),
        ("better", "default `0.5`: since"),
        ("absent", "?"),
        ("better", "default `True`: ?"),
        ("not yet", migration.IDLE),
    ]
    monkeypatch.setattr(migration, "our_class", lambda name: None)
    assert {row.status for row in migration.config_rows(facts, "Mine", migration.Reasons({}, {}, {}))} == {"not yet"}
