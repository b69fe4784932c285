"""The rules of the house, read from the source: layers, no cycles, no guessing, lengths, docstrings.

Each rule is first shown to catch a fault in a made-up file, then applied to the package.
"""

from __future__ import annotations

import functools
import graphlib
from pathlib import Path

import pytest

from tests.support import structure
from tests.support.structure import Source

ROOT = Path(__file__).resolve().parents[2]
FILE_AIM, FILE_LIMIT = 300, 400
FUNCTION_AIM, FUNCTION_LIMIT = 60, 90


@functools.cache
def package() -> tuple[Source, ...]:
    return tuple(structure.read_package(ROOT / "preftune"))


def joined(faults: list[str]) -> str:
    return "\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("losses/a.py", "from preftune.models.head import x", "losses imports preftune.models.head"),
        ("losses/a.py", "def f():\n    import preftune.trainers.dpo", "a.py:2 losses imports preftune.trainers.dpo"),
        ("losses/a.py", "from preftune.configs.dpo import DPOConfig", "losses imports preftune.configs.dpo"),
        ("data/a.py", "if TYPE_CHECKING:\n    from preftune.models.head import x", "data imports preftune.models.head"),
        ("data/a.py", "from preftune import DPOTrainer", "takes DPOTrainer from the root"),
        ("data/a.py", "from . import tree", "relative import"),
        ("data/a.py", "from preftune.elsewhere import x", "has no place in LAYERS"),
        ("trainers/a.py", "from preftune.experimental import x", "trainers imports preftune.experimental"),
    ],
)
def test_layer_rule_catches(path, text, fault):
    assert fault in joined(structure.layer_faults(Source.of(text, path)))


def test_layer_rule_allows_what_is_below():
    text = "from preftune.types import PromptTree\nfrom preftune.models import head\nfrom preftune import __version__\n"
    assert structure.layer_faults(Source.of(text, "callbacks/a.py")) == []
    assert structure.layer_faults(Source.of("from preftune.cli.main import main", "__init__.py")) == []


def test_layers():
    faults = [f for source in package() for f in structure.layer_faults(source)]
    assert not faults, joined(faults)


def cycle(sources: tuple[Source, ...]) -> list[str] | None:
    """One cycle of imports between modules, as a list of names, or None. Imports for type checkers do not count."""
    names = [s.name for s in sources]
    graph = {
        s.name: {m for _, m in structure.imports(s, names, type_checking=False) if m in names and m != "preftune"}
        for s in sources
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_cycle_rule_catches():
    a = Source.of("from preftune.data import b", "data/a.py")
    b = Source.of("def f():\n    from preftune.data.a import x", "data/b.py")
    harmless = Source.of("if TYPE_CHECKING:\n    from preftune.data.a import x", "data/b.py")
    assert cycle((a, b)) is not None
    assert cycle((a, harmless)) is None


def test_no_cycles():
    assert cycle(package()) is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hasattr(x, 'y')", "hasattr"),
        ("getattr(x, 'y', None)", "getattr(x, 'y', None)"),
        ("model.load_state_dict(d, strict=False)", "strict=False"),
        ("try:\n    f()\nexcept:\n    pass", "bare except"),
        ("x = 1  # TO" + "DO: more", "unfinished"),
    ],
)
def test_forbidden_rule_catches(text, fault):
    assert fault in joined(structure.forbidden(Source.of(text, "data/a.py")))


def test_forbidden_rule_allows():
    fine = "getattr(x, name)\nzip(a, b, strict=False)\ntry:\n    f()\nexcept ValueError:\n    g()\n"
    assert structure.forbidden(Source.of(fine, "data/a.py")) == []
    assert structure.forbidden(Source.of("getattr(x, 'y', None)", structure.READS_OPTIONAL_FIELDS)) == []


def test_nothing_forbidden():
    faults = [f for source in package() for f in structure.forbidden(source)]
    assert not faults, joined(faults)


def test_lengths():
    """Over the limit fails; over the aim is printed (`pytest -rP`), since a longer file is a question, not a crime."""
    sources = package()
    print("over the aim:", *structure.long_files(sources, FILE_AIM), sep="\n  ")
    print(*structure.long_functions(sources, FUNCTION_AIM), sep="\n  ")
    faults = structure.long_files(sources, FILE_LIMIT) + structure.long_functions(sources, FUNCTION_LIMIT)
    assert not faults, joined(faults)


def test_length_rule_catches():
    body = "\n".join(f"    x = {n}" for n in range(10))
    source = Source.of(f'def f():\n    """Two\n    lines."""\n{body}\n', "data/a.py")
    assert structure.long_functions([source], 10) == ["data/a.py:1 f: 11 lines"]
    assert structure.long_functions([source], 11) == []
    assert structure.long_files([source], 12) == ["data/a.py: 13 lines"]


def test_module_docstrings():
    assert structure.docstring_fault(Source.of('"""One line."""', "data/a.py")) is not None
    faults = [f for f in map(structure.docstring_fault, package()) if f]
    assert not faults, joined(faults)
