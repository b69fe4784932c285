"""The report without a browser: what is read of a folder, which curves it gives, and that text stays text."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preftune.callbacks.trackers.jsonl import JsonlTracker
from preftune.cli.main import main
from preftune.cli.report.curves import (
    GROUPS,
    MAX_POINTS,
    Event,
    events_of,
    grouped,
    moves_of,
    series_of,
    thinned,
)
from preftune.cli.report.page import ROWS_OF_STEP, ROWS_OF_TABLE, as_text, describe, duration, html_of, table_of
from preftune.cli.report.runs import Run, distinct_names, read_run, without_repeats
from preftune.errors import ConfigError


def write(folder: Path, entries: list[dict], tables: dict[str, list[dict]] | None = None, manifest=None) -> Path:
    tracker = JsonlTracker(folder / "logs")
    for entry in entries:
        tracker.log_scalars(entry, entry["step"])
    for name, rows in (tables or {}).items():
        for row in rows:
            tracker.log_table(name, [row], row["step"])
    if manifest is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(manifest))
    return folder


def logs(steps: list[int], **values: float) -> list[dict]:
    return [{"step": step, "loss": 1.0 / step, **values} for step in steps]


def data_of(page: str) -> dict:
    """What the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.S)
    return json.loads(text)


class TestReading:
    def test_a_run(self, tmp_path):
        entries = [
            *logs([10, 20]),
            {"step": 20, "eval_loss": 0.4},
            {"step": 20, "train_loss": 0.3, "train_runtime": 9.0},
        ]
        tables = {"completions": [{"step": 10, "prompt": "p", "completion": "c"}]}
        run = read_run(write(tmp_path, entries, tables, {"trainer": "DPOTrainer"}))
        assert [entry["step"] for entry in run.entries] == [10, 20, 20, 20] and run.last_step == 20
        assert run.tables == tables and run.manifest == {"trainer": "DPOTrainer"}
        assert run.problems == () and run.resumed_at == ()
        assert read_run(tmp_path / "logs").path == tmp_path

    def test_empty_logs(self, tmp_path):
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "metrics.jsonl").touch()
        run = read_run(tmp_path)
        assert run.entries == [] and len(run.problems) == 2
        assert data_of(html_of([run]))["groups"] == []

    def test_damage_is_said_and_read_around(self, tmp_path):
        write(tmp_path, logs([1, 2]), manifest={})
        with (tmp_path / "logs" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "lo\nnot json\n[1]\n')
        (tmp_path / "run.json").write_text("{")
        (tmp_path / "completions").mkdir()
        (tmp_path / "completions" / "completions_00001.parquet").write_bytes(b"no parquet")
        run = read_run(tmp_path)
        assert [entry["step"] for entry in run.entries] == [1, 2] and run.manifest is None
        assert [problem.split()[0] for problem in run.problems] == ["3", "run.json", "completions_00001.parquet"]
        html_of([run])

    def test_only_a_manifest(self, tmp_path):
        run = read_run(write(tmp_path, [], manifest={"trainer": "X"}))
        assert run.entries == [] and "Nothing has been logged." in run.problems

    def test_nothing_there(self, tmp_path, capsys):
        with pytest.raises(ConfigError, match="is no folder"):
            read_run(tmp_path / "absent")
        with pytest.raises(ConfigError, match="no logs/metrics.jsonl"):
            read_run(tmp_path)
        write(tmp_path / "inner", logs([1]))
        assert main(["report", str(tmp_path)]) == 2
        assert str(tmp_path / "inner") in capsys.readouterr().err

    def test_steps_that_were_taken_again(self):
        """Logged 10..50, killed, resumed from 20: the first 30, 40, 50 are gone, with their evaluations."""
        first = [*logs([10, 20, 30, 40]), {"step": 40, "eval_loss": 9.0}, *logs([50])]
        again = [{"step": step, "loss": -1.0} for step in (30, 40, 50, 60)]
        entries, resumed = without_repeats([*first, *again])
        assert [entry["step"] for entry in entries] == [10, 20, 30, 40, 50, 60]
        assert [entry["loss"] for entry in entries[2:]] == [-1.0] * 4 and resumed == {20}

    def test_logs_of_one_step_stay_together(self):
        entries = [{"step": 1, "loss": 1.0}, {"step": 1, "eval_loss": 1.0}, {"step": 2, "loss": 1.0}]
        assert without_repeats(entries) == (entries, set())

    def test_parquet_where_there_is_no_table(self, tmp_path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        write(tmp_path, logs([1]), {"other": [{"step": 1, "completion": "from the log"}]})
        (tmp_path / "completions").mkdir()
        columns = {"prompt": [[{"role": "user", "content": "hi"}]], "completion": ["yes"], "reward": [1.0]}
        for name in ("completions_00020", "completions_00010", "other_00001"):
            pq.write_table(pa.table(columns), tmp_path / "completions" / f"{name}.parquet")
        tables = read_run(tmp_path).tables
        assert [row["step"] for row in tables["completions"]] == [10, 20]
        assert tables["other"] == [{"step": 1, "completion": "from the log"}]
        (first, _) = table_of(tables["completions"])["rows"]
        assert first == {"step": 10, "prompt": "user: hi", "completion": "yes", "extra": {"reward": "1"}}

    def test_names_tell_runs_apart(self):
        runs = [Run(Path(p)) for p in ("/a/x/dpo", "/a/y/dpo", "/a/y/sft")]
        assert distinct_names(runs) == ["x/dpo", "y/dpo", "y/sft"]
        assert distinct_names([Run(Path("/a/b")), Run(Path("/a/b"))]) == ["b", "b (2)"]


class TestCurves:
    def test_series(self):
        entries = [
            {"step": 1, "wall_time": 9.0, "loss": 1.0, "epoch": 0.1, "note": "text", "flag": True, "num_tokens": 5.0},
            {"step": 2, "loss": math.nan, "grad_norm": math.inf, "reference/moves": 1.0},
            {"step": 2, "eval_loss": 0.5, "eval_runtime": 1.0},
            {"step": 2, "loss": 2.0, "train_loss": 1.0},
        ]
        assert series_of(entries) == {
            "loss": ([1, 2], [1.0, 2.0]),
            "grad_norm": ([2], [None]),
            "eval_loss": ([2], [0.5]),
        }

    def test_huge_logs_keep_their_extremes(self):
        values = [(i, math.sin(i)) for i in range(200_000)]
        values[77_777], values[150_001], values[150_002] = (77_777, 50.0), (150_001, -50.0), (150_002, math.nan)
        steps, kept = thinned(values)
        assert len(steps) <= 1.1 * MAX_POINTS and steps == sorted(set(steps))
        assert (steps[0], steps[-1]) == (0, 199_999)
        found = dict(zip(steps, kept))
        assert (found[77_777], found[150_001], found[150_002]) == (50.0, -50.0, None)

    @given(st.lists(st.one_of(st.floats(), st.just(math.nan)), max_size=60), st.integers(4, 20))
    def test_thinning_invents_nothing(self, values, most):
        points = list(enumerate(values))
        steps, kept = thinned(points, most)
        for step, value in zip(steps, kept):
            original = values[step]
            assert value == float(f"{original:.6g}") if math.isfinite(original) else value is None
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            shown = [value for value in kept if value is not None]
            assert max(shown) == float(f"{max(finite):.6g}") and min(shown) == float(f"{min(finite):.6g}")

    def test_every_metric_is_shown_once(self):
        names = [
            "loss", "eval_loss", "eval_maths_loss", "aux_loss", "eval_aux_loss", "rewards/chosen", "kl",
            "rewards/length/mean", "rewards/length/std", "reward", "my_own/thing", "eval_my_own/thing",
            "cispo_clip_ratio",
        ]  # fmt: skip
        groups = grouped(names)
        shown = [metric for group in groups for plot in group["plots"] for metric in plot["metrics"]]
        assert sorted(shown) == sorted(names)
        plots = {plot["title"]: plot["metrics"] for group in groups for plot in group["plots"]}
        assert plots["Loss"] == ["loss", "eval_loss", "eval_maths_loss"]
        assert plots["Auxiliary loss"] == ["aux_loss", "eval_aux_loss"]
        assert plots["Rewards by function"] == ["rewards/length/mean"]
        assert plots["my_own/thing"] == ["my_own/thing", "eval_my_own/thing"]

    def test_no_plot_is_promised_twice(self):
        wanted = [name for plots in GROUPS.values() for plot in plots for name in plot.metrics]
        assert len(wanted) == len(set(wanted))


class TestEvents:
    def test_moves_from_the_logs(self):
        entries = [
            {"step": 10, "reference/moves": 0.0},
            {"step": 20, "reference/moves": 1.0, "reference/last_move_step": 16.0},
            {"step": 30, "reference/moves": 1.0, "reference/last_move_step": 16.0},
            {"step": 40, "reference/moves": 2.0, "reference/last_move_step": 32.0},
        ]
        assert moves_of(entries, {}) == [(16, "reference moved"), (32, "reference moved")]
        assert moves_of(entries, {"sync_ref_model": True, "ref_model_sync_steps": 16}) == [(16, "sync"), (32, "sync")]

    def test_moves_between_two_logs_from_the_options(self):
        entries = [{"step": 10, "reference/moves": 5.0, "reference/last_move_step": 10.0}]
        sync = {"sync_ref_model": True, "ref_model_sync_steps": 2}
        assert moves_of(entries, sync) == [(step, "sync") for step in (2, 4, 6, 8, 10)]
        bema = {"bema_ref_model": True, "ref_model_update_freq": 3, "ref_model_update_after": 1}
        entries = [{"step": 10, "reference/moves": 4.0, "reference/last_move_step": 10.0}]
        assert moves_of(entries, bema) == [(step, "BEMA") for step in (1, 4, 7, 10)]

    def test_all_kinds(self):
        entries = [{"step": 5, "loss": math.nan}, {"step": 6, "loss": 1.0}]
        assert events_of(entries, None, [3]) == [Event(3, "resumed"), Event(5, "not finite")]


def test_a_run_that_is_not_finished_says_how_long_it_has_been_silent(tmp_path, monkeypatch):
    entries = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4}]
    run = read_run(write(tmp_path, entries, manifest={"trainer": "DPOTrainer", "max_steps": 9}))
    last = run.entries[-1]["wall_time"]
    monkeypatch.setattr("time.time", lambda: last + 90)
    facts = describe(run, "a")["facts"]
    assert facts["state"] == "not finished" and facts["steps"] == "2 of 9"
    assert facts["last log"] == "1 min 30 s before this page"


class TestTables:
    def test_large_ones_keep_whole_steps_and_both_ends(self):
        rows = [{"step": step, "prompt": str(i), "completion": "c"} for step in range(100) for i in range(100)]
        table = table_of(rows)
        steps = sorted({row["step"] for row in table["rows"]})
        assert len(table["rows"]) <= ROWS_OF_TABLE and table["left_out"] == len(rows) - len(table["rows"])
        assert (steps[0], steps[-1]) == (0, 99) and len(table["rows"]) == 100 * len(steps)
        one = table_of([{"step": 1, "completion": "c"}] * 5000)
        assert len(one["rows"]) == ROWS_OF_STEP and one["left_out"] == 5000 - ROWS_OF_STEP

    def test_long_texts_are_cut_and_say_so(self):
        (row,) = table_of([{"step": 1, "prompt": None, "completion": "x" * 9000, "reward": 0.123456}])["rows"]
        assert row["completion"].endswith("[3,000 more characters]") and row["prompt"] == ""
        assert row["extra"] == {"reward": "0.1235"}


NASTY = [
    "</script><script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "<!--<script>",
    "\u2028\u2029 \x00 \ud800",
    "{script}{data}{style}{uplot}{policy}",
    "'\"><svg onload=window.hacked=1>",
]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("text", NASTY)
def test_text_of_a_run_is_never_markup(tmp_path, text):
    """Wherever it stands: prompt, completion, a column, a metric, the config, the path."""
    rows = [{"step": 1, "prompt": text, "completion": text, text: text}]
    plain = write(tmp_path / "plain", [{"step": 1, "loss": 1.0}], {"completions": [{"step": 1, "completion": "c"}]})
    nasty = write(tmp_path / "nasty", [{"step": 1, "loss": 1.0, text: 1.0}], {"completions": rows}, {
        "config": {text: text, "beta": 0.1}, "trainer": text, "environment": {text: text},
        "data": {"reports": {text: {"rows_in": 10, "rows_out": 1, "dropped": {text: {"count": 9}}}}},
    })  # fmt: skip
    pages = [html_of([read_run(folder)], docs=folder.name) for folder in (plain, nasty)]
    parsed = []
    for page in pages:
        tags = Tags()
        tags.feed(page)
        parsed.append(tags.tags)
    assert parsed[0] == parsed[1], "it has added or lost an element"
    data = data_of(pages[1])
    (row,) = data["tables"][0]["rows"]
    assert row["prompt"] == row["completion"] == text and row["extra"] == {text: text}


def test_the_page_needs_nothing_else(tmp_path):
    page = html_of([read_run(write(tmp_path, logs([1, 2])))])
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert not re.search(r"@import|url\(", page)
    assert "default-src 'none'" in page
    for asset in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE.uPlot", "report.js", "report.css", "report.html"):
        assert (Path(__file__).parents[3] / "preftune" / "cli" / "report" / "assets" / asset).exists()


def test_the_command(tmp_path, capsys):
    a = write(tmp_path / "a", logs([1, 2], kl=0.1), manifest={"config": {"beta": 0.1}, "config_changed": ["beta"]})
    b = write(tmp_path / "b", logs([1, 2, 3]))
    out = tmp_path / "deep" / "page.html"
    assert main(["report", str(a), str(b), str(a), "-o", str(out)]) == 0
    assert f"{out} (" in capsys.readouterr().out
    data = data_of(out.read_text())
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["runs"][0]["config"] == {"beta": "0.1"} and data["runs"][0]["changed"] == ["beta"]
    assert main(["report", str(a), "-o", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        ([], "-"),
        (True, "true"),
        (0.1, "0.1"),
        (5e-7, "5e-07"),
        (["a", "b"], "a, b"),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_values_for_reading(value, text):
    assert as_text(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(14.23, "14.2 s"), (200, "3 min 20 s"), (18_720, "5 h 12 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_reading_runs_loads_neither_torch_nor_transformers(tmp_path):
    """Of a run with a log, a table and a manifest."""
    write(tmp_path, logs([1, 2]), {"completions": [{"step": 1, "prompt": "p", "completion": "c"}]}, {"trainer": "X"})
    code = (
        "import sys; from preftune.cli.main import main; folder = sys.argv[1]\n"
        "assert main(['report', folder, '-o', folder + '/report.html']) == main(['compare', folder, folder]) == 0\n"
        "print({'torch', 'transformers', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
