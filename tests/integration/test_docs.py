"""Every Python snippet of README and docs runs, in order, in a folder with a tiny model and a file of pairs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.vision import tiny_vlm

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M)


@pytest.fixture
def folder(request, tmp_path, monkeypatch, tiny_model, tokenizer, preference_rows):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("my-model")
    tokenizer.save_pretrained("my-model")
    if "vision.md" in request.node.name:
        for part in tiny_vlm("llava"):
            part.save_pretrained("my-vlm")
    Path("pairs.json").write_text(json.dumps(preference_rows["text"]))
    return tmp_path


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_page_runs(page, folder):
    scope: dict = {"__name__": "docs"}
    for code in snippets(page):
        exec(compile(code, str(page), "exec"), scope)


def test_there_are_snippets():
    assert sum(len(snippets(p)) for p in PAGES) >= 6
