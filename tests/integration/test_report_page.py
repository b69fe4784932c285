"""The report in a real browser: it loads without a word on the console, draws, filters, and runs no text of a run.

Two runs made by hand, whose completions try to be scripts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preftune.callbacks.trackers.jsonl import JsonlTracker
from preftune.cli.main import main
from tests.support import browser
from tests.support.browser import Browser

pytestmark = [
    pytest.mark.skipif(browser.missing() is not None, reason=browser.missing() or ""),
    pytest.mark.xdist_group("browser"),
]
ATTACK = "<img src=x onerror=\"document.title='hacked'\"></script><script>document.title='hacked'</script>"
STEPS = range(10, 210, 10)


def write_run(folder: Path, scale: float, *, fails: bool) -> Path:
    tracker = JsonlTracker(folder / "logs")
    for step in STEPS:
        logs = {
            "loss": 0.69 - scale * step / 1000,
            "rewards/margins": scale * step / 100,
            "logps/chosen": -50.0 - (0.3 * step if fails else 0),
            "logps/rejected": -60.0 - 0.2 * step,
            "reference/moves": step // 50,
            "reference/last_move_step": step // 50 * 50,
        }
        tracker.log_scalars(logs, step)
        if step % 100 == 0:
            prompts = [f"Question {i}" for i in range(5)] + [ATTACK]
            rows = [
                {"step": step, "prompt": p, "completion": f"Answer to {p} at {step}", "reward": 0.5} for p in prompts
            ]
            tracker.log_table("completions", rows, step)
    config = {"beta": scale, "sync_ref_model": True, "ref_model_sync_steps": 50, "run_name": ATTACK}
    report = {"rows_in": 10, "rows_out": 9, "lengths": {"chosen_ids": {"p50": 5}}}
    manifest = {"config": config, "config_changed": ["beta"], "data": {"reports": {"train": report}}, "trainer": ATTACK}
    (folder / "run.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder / "good", 0.1, fails=False), write_run(folder / "bad", 0.3, fails=True)]
    assert main(["report", *map(str, runs), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(chromium, page) -> Browser:
    chromium.open(page)
    return chromium


def count(opened: Browser, selector: str) -> int:
    return opened.run("return document.querySelectorAll(arguments[0]).length", selector)


def texts(opened: Browser, selector: str) -> list[str]:
    return opened.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)


def test_it_loads_and_says_nothing(opened):
    assert opened.run("return document.documentElement.dataset.ready") == "true"
    assert opened.console() == []
    assert opened.run("return document.title") == "2 runs · preftune report"
    assert {"Summary", "Health", "Learning", "Preferences", "Completions", "Config", "Data"} <= set(
        texts(opened, "header nav a")
    )


def test_text_of_a_run_stays_text(opened):
    assert count(opened, "script") == 3 and count(opened, "main img") == 0 and count(opened, "main script") == 0
    assert any(ATTACK in text for text in texts(opened, ".text.prompt"))
    assert any(ATTACK in text for text in texts(opened, "#config td"))
    assert "hacked" not in opened.run("return document.title")


def test_curves_of_both_runs_are_drawn(opened):
    """Something has colour on each canvas, and the legend names both runs."""
    drawn = """return [...document.querySelectorAll('.plot canvas')].map((c) => {
        const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        let coloured = 0;
        for (let i = 0; i < pixels.length; i += 4) {
            const [red, green, blue] = pixels.slice(i, i + 3);
            if (pixels[i + 3] && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) coloured++;
        }
        return coloured; })"""
    coloured = opened.run(drawn)
    assert len(coloured) == count(opened, ".plot") >= 3 and min(coloured) > 100
    (loss,) = texts(opened, '[data-plot="Loss"] .u-legend')
    assert "good" in loss and "bad" in loss
    assert "sync" in "".join(texts(opened, '[data-plot="Loss"] .note'))


def test_a_failing_run_is_found(opened):
    found = opened.run("return [...document.querySelectorAll('.finding')].map((e) => [e.dataset.code, e.textContent])")
    assert [code for code, _ in found] == ["chosen_collapse", "margins_while_both_fall"]
    assert all("bad" in text for _, text in found)
    links = opened.run("return [...document.querySelectorAll('.finding a')].map((e) => e.getAttribute('href'))")
    assert links[0] == "docs/health.md#chosen_collapse"


def test_filter_and_steps(opened):
    assert opened.run("return document.querySelector('#completions-count').textContent") == "6 of 6 rows"
    opened.type("#completions-filter", "question 3")
    assert opened.run("return document.querySelector('#completions-count').textContent") == "1 of 6 rows"
    assert texts(opened, "#completions-grid .text.prompt") == ["Question 3"]
    assert texts(opened, "#completions-grid mark")[0] == "Question 3"
    answers = "#completions-grid .cell .text"
    assert texts(opened, answers) == ["Answer to Question 3 at 200"] * 2
    choose = (
        "const s = document.querySelectorAll('select.step')[0]; s.value = '100'; s.dispatchEvent(new Event('change'))"
    )
    opened.run(choose)
    assert texts(opened, answers) == ["Answer to Question 3 at 100", "Answer to Question 3 at 200"]
    opened.type("#completions-filter", "<img")
    assert opened.run("return document.querySelector('#completions-count').textContent") == "1 of 6 rows"
    assert opened.console() == []


def test_colours_can_be_switched(opened):
    background = "return getComputedStyle(document.body).backgroundColor"
    seen = {opened.run(background)}
    opened.click("#theme")
    light = opened.run(background)
    opened.click("#theme")
    dark = opened.run(background)
    assert light in seen and dark not in seen
    opened.click("#theme")
    assert opened.run("return document.documentElement.dataset.theme ?? 'auto'") == "auto"


def test_dark_by_the_system(page, tmp_path):
    with Browser(tmp_path, dark=True) as dark:
        dark.open(page)
        red, green, blue = dark.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert max(red, green, blue) < 60 and dark.console() == []


PICTURES = "return [...document.querySelectorAll('.plot canvas')].map((c) => c.toDataURL())"
DRAWN = "return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def test_zoom_is_of_all_plots(opened):
    """A drag over the first plot leaves less of the steps in every plot; the button brings them back."""
    before = opened.run(PICTURES)
    opened.drag(".plot .u-over", -40, 40)
    opened.run(DRAWN)
    assert all(a != b for a, b in zip(before, opened.run(PICTURES), strict=True))
    opened.click("#reset")
    opened.run(DRAWN)
    assert opened.run(PICTURES) == before


def test_smoothing_and_legend(opened):
    before = opened.run(PICTURES)
    slide = """const slider = document.querySelector('input[type=range]');
        slider.value = arguments[0]; slider.dispatchEvent(new Event('input'))"""
    opened.run(slide, 0.9)
    opened.run(DRAWN)
    assert all(a != b for a, b in zip(before, opened.run(PICTURES), strict=True))
    opened.run(slide, 0)
    opened.run(DRAWN)
    assert opened.run(PICTURES) == before
    opened.run("document.querySelector('[data-plot=Loss] .u-series:nth-child(2) .u-label').click()")
    opened.run(DRAWN)
    changed = [a != b for a, b in zip(before, opened.run(PICTURES), strict=True)]
    assert changed[0] and not any(changed[1:])
    assert opened.console() == []
