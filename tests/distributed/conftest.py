"""One process's results, for all tests that compare several processes with it.

Each scenario is run once.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """`alone(name)`: the result of a scenario in this process, and the folder that holds what it wrote."""
    from tests.distributed.worker import run

    folder, known = tmp_path_factory.mktemp("one"), {}

    def result(name: str):
        if name not in known:
            known.update(run(folder, [name]))
        return known[name], folder

    return result
