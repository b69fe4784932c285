"""Adapters of trackers: a table logged from another thread is read back from the library's own files, offline.

A test skips where the library is absent. What is hard: messages, None beside numbers, new columns, breaks.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import zipfile

import pytest

from preftune.callbacks.trackers.base import TrackerQueue
from preftune.callbacks.trackers.cells import as_cell, markdown_table
from preftune.callbacks.trackers.choose import default_trackers
from preftune.callbacks.trackers.parquet import ParquetTracker
from tests.unit.callbacks.tiny_trainer import tiny_trainer

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a|b\nc"}]
FIRST = [
    {"step": 1, "prompt": CHAT[:1], "completion": "x", "score": None},
    {"step": 1, "prompt": "plain", "completion": "y", "score": 0.5},
]
SECOND = [{"step": 2, "prompt": "plain", "completion": "z", "score": 1, "extra": ["set"]}]


def needs(*modules):
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} is not installed")


def logged(trainer, name):
    """Logs both tables to the tracker of that name, which the open run alone has brought in."""
    tracker = next(t for t in default_trackers(trainer) if t.name == name)
    tracker.log_table("completions", FIRST, 1)
    tracker.log_table("completions", SECOND, 2)
    assert tracker.flush(30)
    assert (tracker.failed, tracker.dropped) == (0, 0)
    assert tracker in default_trackers(trainer)  # one for the whole run


class TestCells:
    def test_messages_are_a_conversation_and_the_rest_is_json(self):
        assert as_cell(CHAT) == "user: Hi\nassistant: a|b\nc"
        call = [{"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}]
        assert as_cell(call) == 'assistant: {"name": "add"}'
        assert [as_cell(v) for v in (None, 1, 0.5, True, "x", [], {"a": [1]})] == [
            None, 1, 0.5, True, "x", "[]", '{"a": [1]}',
        ]  # fmt: skip

    def test_a_markdown_row_is_one_line(self):
        text = markdown_table([{"a": "x|y\nz<b>", "b": None, "c": 0.123456}])
        assert text.splitlines() == ["| a | b | c |", "| --- | --- | --- |", "| x&#124;y<br>z&lt;b&gt; |  | 0.1235 |"]


class TestParquet:
    def read(self, path):
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()

    def test_types_stay_and_unlike_values_become_json(self, tmp_path):
        tracker = ParquetTracker(tmp_path / "completions")
        tracker.log_table("completions", FIRST, 1)
        tracker.log_table("completions", [{"step": 2, "prompt": CHAT[:1]}, {"step": 2, "prompt": CHAT}], 2)
        first, second = self.read(tmp_path / "completions" / "completions_00001.parquet")
        assert json.loads(first["prompt"]) == CHAT[:1] and json.loads(second["prompt"]) == "plain"
        assert (first["score"], second["score"]) == (None, 0.5)
        assert [row["prompt"] for row in self.read(tmp_path / "completions" / "completions_00002.parquet")] == [
            CHAT[:1],
            CHAT,
        ]
        assert sorted(p.name for p in (tmp_path / "completions").iterdir()) == [
            "completions_00001.parquet",
            "completions_00002.parquet",
        ]

    def test_a_resumed_run_sets_aside_what_comes_later_and_a_fresh_one_all(self, tmp_path):
        tracker = ParquetTracker(tmp_path)
        for step in (1, 2, 3):
            tracker.log_table("eval_completions", SECOND, step)
        ParquetTracker(tmp_path).begin(2)
        assert [p.name for p in sorted(tmp_path.glob("*.parquet"))] == [
            "eval_completions_00001.parquet",
            "eval_completions_00002.parquet",
        ]
        ParquetTracker(tmp_path).begin(0)
        assert not list(tmp_path.glob("*.parquet"))
        assert len(list((tmp_path / "superseded").glob("*.parquet"))) == 3

    def test_to_the_hub(self, tmp_path, monkeypatch):
        import huggingface_hub

        made = []

        class Scheduler:
            def __init__(self, **options):
                made.append(options)

            def trigger(self):
                made.append("uploaded")
                return self

            def result(self):
                return None

            def stop(self):
                made.append("stopped")

        monkeypatch.setattr(huggingface_hub, "CommitScheduler", Scheduler)
        tracker = TrackerQueue(ParquetTracker(tmp_path, "me/rows"))
        tracker.log_table("completions", SECOND, 1)
        tracker.log_table("completions", SECOND, 2)
        tracker.close()
        assert [made[0][k] for k in ("repo_id", "repo_type", "allow_patterns")] == ["me/rows", "dataset", ["*.parquet"]]
        assert made[1:] == ["uploaded", "stopped"]


@needs("wandb")
def test_wandb(tmp_path, monkeypatch):
    """New columns cannot join an incremental table: they go on in a second one."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_WEAVE", "true")  # else it opens a client where another test has imported weave
    with wandb.init(project="p", dir=tmp_path):
        logged(tiny_trainer(tmp_path), "wandb")
    wandb.teardown()
    tables = {}
    for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json"):
        tables[path.name.split("_0")[0].split("_1")[0]] = json.loads(path.read_text())
    (first,) = [t for t in tables.values() if "extra" not in t["columns"]]
    (second,) = [t for t in tables.values() if "extra" in t["columns"]]
    assert first["data"] == [[1, "user: Hi", "x", None], [1, "plain", "y", 0.5]]
    assert second["data"] == [[2, "plain", "z", 1, '["set"]']]
    assert any(name.startswith("completions_2") for name in tables)


@needs("comet_ml")
def test_comet(tmp_path):
    import comet_ml

    config = comet_ml.ExperimentConfig(
        offline_directory=str(tmp_path), log_code=False, log_git_metadata=False, auto_output_logging=False,
        log_env_details=False,
    )  # fmt: skip
    experiment = comet_ml.start(online=False, api_key="x" * 25, experiment_config=config)
    logged(tiny_trainer(tmp_path), "comet")
    experiment.end()
    (archive,) = tmp_path.glob("*.zip")
    found = {}
    with zipfile.ZipFile(archive) as members:
        for line in members.read("messages.json").splitlines():
            payload = json.loads(line)["payload"]
            asset = payload.get("additional_params", {})
            if asset.get("fileName") == "completions.csv":
                rows = csv.DictReader(io.StringIO(members.read(payload["file_path"]).decode()))
                found[asset["step"]] = list(rows)
    assert [row["prompt"] for row in found[1]] == ["user: Hi", "plain"]
    assert found[2] == [{"step": "2", "prompt": "plain", "completion": "z", "score": "1", "extra": '["set"]'}]


@needs("trackio")
def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path, raising=False)
    trackio.init(project="p", name="r", embed=False)
    try:
        logged(tiny_trainer(tmp_path), "trackio")
    finally:
        trackio.finish()
    tables = [row["completions"]["_value"] for row in SQLiteStorage.get_logs("p", "r") if "completions" in row]
    assert [[row["prompt"] for row in table] for table in tables] == [["user: Hi", "plain"], ["plain"]]
    assert [row["step"] for row in SQLiteStorage.get_logs("p", "r") if "completions" in row] == [1, 2]


@needs("mlflow", "sqlalchemy", "alembic")
def test_mlflow(tmp_path):
    """The run is active in the thread of training alone; what is written goes there and no second run opens."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/ml.db")
    client = mlflow.MlflowClient()
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        logged(tiny_trainer(tmp_path), "mlflow")
    paths = [a.path for a in client.list_artifacts(run.info.run_id, "completions")]
    assert paths == ["completions/completions_00001.csv", "completions/completions_00002.csv"]
    texts = [mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{path}") for path in paths]
    rows = [list(csv.DictReader(io.StringIO(text))) for text in texts]
    assert [[row["prompt"] for row in part] for part in rows] == [["user: Hi", "plain"], ["plain"]]
    assert len(client.search_runs([experiment])) == 1


@needs("tensorboard")
def test_tensorboard(tmp_path, monkeypatch):
    """One file beside transformers' curves, also for a table that is written after training has closed it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer = tiny_trainer(tmp_path, report_to="tensorboard", max_steps=1)
    (callback,) = [c for c in trainer.callback_handler.callbacks if type(c).__name__ == "TensorBoardCallback"]
    trainer.train()
    callback.tb_writer = callback._SummaryWriter(log_dir=str(tmp_path / "tb"))
    logged(trainer, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    texts = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("completions/text_summary")]
    assert len(texts) == 2
    assert "| 1 | user: Hi | x |  |" in texts[0]
    assert "train/loss" in events.Tags()["scalars"]


@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_without_an_open_run_there_is_one_warning(tmp_path, caplog, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    trainer = tiny_trainer(tmp_path)
    trainer.args.report_to = [name]
    tracker = next(t for t in default_trackers(trainer) if t.name == name)
    for step in range(3):
        tracker.log_table("completions", SECOND, step)
    assert tracker.flush(10)
    assert tracker.failed == 3
    assert len([r for r in caplog.records if "Training goes on" in r.getMessage()]) == 1
