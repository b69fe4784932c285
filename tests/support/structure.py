"""Reads source code as syntax trees and answers questions about its shape: imports, lengths, forbidden calls.

Nothing is imported or run, so the checks take a second and work on a tree that does not import yet.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# From the bottom up; a package may import what stands before it, and itself. Names in one set do not know each other.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"types", "errors"}),
    frozenset({"losses"}),
    frozenset({"configs"}),  # reads the names of the losses, which load no torch
    frozenset({"data"}),
    frozenset({"models"}),
    frozenset({"rewards"}),
    frozenset({"rollouts"}),
    frozenset({"callbacks"}),
    frozenset({"trainers"}),
    frozenset({"experimental"}),
    frozenset({"cli"}),
)
_RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# The one file that may ask an object of transformers for a field that is perhaps not there.
READS_OPTIONAL_FIELDS = "models/structure.py"
_UNFINISHED = re.compile(r"#.*\b(TODO|FIXME|XXX)\b")


@dataclass(frozen=True)
class Source:
    """A parsed file; `path` is relative to the package folder, `name` the dotted module name."""

    path: str
    name: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, text: str, path: str, package: str = "preftune") -> Source:
        dotted = ".".join([package, *Path(path).with_suffix("").parts])
        return cls(path, dotted.removesuffix(".__init__"), text, ast.parse(text))

    @property
    def layer(self) -> str:
        """First part below the package: "data" for `data/tree.py`, "types" for `types.py`, "" for the root."""
        return self.name.partition(".")[2].partition(".")[0]


def read_package(folder: Path) -> list[Source]:
    files = sorted(folder.rglob("*.py"))
    return [Source.of(f.read_text(encoding="utf-8"), f.relative_to(folder).as_posix(), folder.name) for f in files]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _statements(tree: ast.AST, type_checking: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        yield child
        if _is_type_checking(child) and not type_checking:
            for other in child.orelse:
                yield from _statements(other, type_checking)
        else:
            yield from _statements(child, type_checking)


def imports(source: Source, modules: Iterable[str] = (), *, type_checking: bool = True) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that `source` imports, also inside functions.

    Args:
        source: The file.
        modules: Known module names, by which `from preftune.data import tree` is seen as `preftune.data.tree`.
        type_checking: Count imports under `if TYPE_CHECKING` as well.
    """
    known = frozenset(modules)
    found: list[tuple[int, str]] = []
    for node in _statements(source.tree, type_checking):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                found.append((node.lineno, deeper if deeper in known else base))
    return found


def layer_faults(source: Source) -> list[str]:
    """Imports that go up, sideways between peers, or are relative. The root knows all and is known by none."""
    faults = []
    for line, name in imports(source):
        where = f"{source.path}:{line}"
        if name.startswith("."):
            faults.append(f"{where} relative import of {name}")
            continue
        parts = name.split(".")
        if parts[0] != "preftune" or source.layer in ("", "__main__") or parts[1:2] == [source.layer]:
            continue
        if len(parts) == 1:
            continue  # `from preftune import __version__`; names of higher layers are lazy and checked by name below
        if parts[1] not in _RANK or source.layer not in _RANK:
            faults.append(f"{where} {source.layer} or {parts[1]} has no place in LAYERS")
        elif _RANK[parts[1]] >= _RANK[source.layer]:
            faults.append(f"{where} {source.layer} imports {name}")
    return faults + _root_faults(source)


def _root_faults(source: Source) -> list[str]:
    if source.layer in ("", "cli"):  # the command line stands above everything and may read like a user's script
        return []
    return [
        f"{source.path}:{node.lineno} takes {alias.name} from the root; import it from where it is defined"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.module == "preftune"
        for alias in node.names
        if alias.name not in _RANK and alias.name != "__version__"
    ]


def _is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_guess(node: ast.AST) -> bool:
    """`hasattr(x, name)` or `getattr(x, name, default)`."""
    return _is_call_of(node, "hasattr") or (_is_call_of(node, "getattr") and len(node.args) == 3)


def _has_strict_false(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or _is_call_of(node, "zip"):
        return False
    return any(
        k.arg == "strict" and isinstance(k.value, ast.Constant) and k.value.value is False for k in node.keywords
    )


def forbidden(source: Source) -> list[str]:
    """`hasattr`, `getattr` with a default, `strict=False`, bare `except`, unfinished work."""
    faults = []
    for node in ast.walk(source.tree):
        if _is_guess(node) and source.path != READS_OPTIONAL_FIELDS:
            faults.append(f"{source.path}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            faults.append(f"{source.path}:{node.lineno} bare except")
        elif _has_strict_false(node):
            faults.append(f"{source.path}:{node.lineno} strict=False")
    for number, line in enumerate(source.text.splitlines(), 1):
        if _UNFINISHED.search(line):
            faults.append(f"{source.path}:{number} unfinished: {line.strip()}")
    return faults


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def long_files(sources: Iterable[Source], limit: int) -> list[str]:
    counted = [(len(s.text.splitlines()), s.path) for s in sources]
    return [f"{path}: {n} lines" for n, path in sorted(counted, reverse=True) if n > limit]


def long_functions(sources: Iterable[Source], limit: int) -> list[str]:
    """Functions longer than `limit` lines, signature included, docstring not."""
    counted = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1 - _docstring_lines(node)
                counted.append((lines, f"{source.path}:{node.lineno} {node.name}"))
    return [f"{where}: {n} lines" for n, where in sorted(counted, reverse=True) if n > limit]


def docstring_fault(source: Source) -> str | None:
    """A module opens with two lines: what is here, and the one thing to know."""
    lines = [line for line in (ast.get_docstring(source.tree) or "").splitlines() if line.strip()]
    if len(lines) < 2:
        return (
            f"{source.path}: the docstring has {len(lines)} lines; wanted two: what is here, and the one thing to know"
        )
    return None
