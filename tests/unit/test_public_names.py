"""`import preftune` is cheap, and every name it promises is there.

Cost is CPU time of a fresh interpreter, so that a busy machine does not decide.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import statistics
import subprocess
import sys

import pytest

import preftune

_MEASURE = """
import sys, time
start = time.process_time()
import preftune
cost = time.process_time() - start
print(cost, *sorted({"torch", "transformers", "datasets", "pandas", "rich"} & set(sys.modules)))
"""


def test_import_is_cheap_and_loads_nothing_heavy():
    costs = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True).stdout
        cost, *loaded = out.split()
        assert loaded == []
        costs.append(float(cost))
    assert statistics.median(costs) < 0.1


@pytest.mark.parametrize("name", [n for n in preftune.__all__ if n != "__version__"])
def test_name_resolves(name):
    value = getattr(preftune, name)
    assert value.__name__ == name or preftune._MODULE_OF[name].split(".")[0] in value.__module__


def test_three_lists_agree():
    """Table, imports for type checkers and `__all__` name the same things in the same modules."""
    tree = ast.parse(inspect.getsource(preftune))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module.removeprefix("preftune.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert typed == preftune._MODULE_OF
    assert sorted(preftune.__all__) == sorted([*preftune._MODULE_OF, "__version__"])
    assert set(preftune.__all__) <= set(dir(preftune))


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'DPOTrainr'"):
        _ = preftune.DPOTrainr


def test_version_is_that_of_the_distribution():
    assert importlib.metadata.version("preftune") == preftune.__version__
