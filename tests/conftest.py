"""Fixtures for all tests, and the rules they run under: offline, few threads, one cache folder per run.

The environment is set before torch, transformers or datasets can be imported; helper processes inherit it.
"""

from __future__ import annotations

import os
import shutil
import tempfile

_CACHE = tempfile.mkdtemp(prefix="preftune-tests-")
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": _CACHE,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "COMET_ERROR_TRACKING_ENABLE": "false",  # else these two report to their makers while offline
        "WANDB_ERROR_REPORTING": "false",
        "COMET_DISABLE_AUTO_LOGGING": "1",  # else it opens an experiment for every run of MLflow
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
)
_CACHES = ("HF_DATASETS_CACHE", "HF_HUB_CACHE")
_LAUNCHERS = ("ACCELERATE_USE_CPU", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PREFTUNE_LAUNCHED")
for _name in (*_CACHES, *_LAUNCHERS):
    os.environ.pop(_name, None)

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from tests.support import network  # noqa: E402

network.install()
hypothesis.settings.register_profile("preftune", deadline=None, derandomize=True, database=None, max_examples=40)
hypothesis.settings.load_profile("preftune")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist, tests that start processes share one worker, so that two never run at the same time."""
    for item in items:
        if item.get_closest_marker("dist"):
            item.add_marker(pytest.mark.xdist_group("dist"))


@pytest.fixture(autouse=True)
def _no_network():
    """Fails a test that tried to leave the machine, also where a library swallowed the error."""
    network.attempts.clear()
    yield
    tried = list(network.attempts)
    network.attempts.clear()
    assert not tried, f"tried to connect to {tried}"


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_tokenizer():
    """`make_tokenizer(variant)`: a fresh tokenizer; variants in `tests.support.tokenizers`."""
    from tests.support.tokenizers import make_tokenizer

    return make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    """The plain tokenizer, shared by all tests: do not change it, take one of `make_tokenizer` for that."""
    return make_tokenizer("plain")


@pytest.fixture(scope="session")
def tiny_model():
    """`tiny_model(family="llama", seed=0, head="causal", **config_fields)`; families in `tests.support.models`."""
    from tests.support.models import tiny_model

    return tiny_model


@pytest.fixture(scope="session")
def preference_rows():
    """Preference rows by form: see `tests.support.rows.preference_rows`."""
    from tests.support.rows import preference_rows

    return preference_rows()


@pytest.fixture(scope="session")
def sft_rows():
    """SFT rows by form: see `tests.support.rows.sft_rows`."""
    from tests.support.rows import sft_rows

    return sft_rows()
