"""WeaveCallback: what it records, where the project comes from, and that nothing of it stops a run.

Recorded by weave itself into a trace server within the process; by a stand-in for the library where it is absent.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from types import SimpleNamespace

import pytest
from datasets import Dataset

from preftune.callbacks.scoring import ScorerRunner
from preftune.callbacks.trackers.weave import as_name, averages
from preftune.callbacks.weave import WeaveCallback
from tests.unit.callbacks.tiny_trainer import PROMPTS, eval_rows, tiny_trainer


class FakePrediction:
    def __init__(self, record):
        self.record = record

    def log_score(self, name, value):
        self.record["scores"][name] = value

    def finish(self):
        self.record["finished"] = True


class FakeWeave:
    """The part of the library that is used, as a module: `client`, `evaluations` and `calls` keep what came."""

    def __init__(self):
        self.client, self.inits, self.evaluations, self.calls = None, [], [], []

    def get_client(self):
        return self.client

    def init(self, project):
        self.inits.append(project)
        self.client = self
        return self

    def flush(self):
        pass

    def create_call(self, op, inputs, attributes, use_stack):
        call = {"op": op, "inputs": inputs, "attributes": attributes}
        self.calls.append(call)
        return call

    def finish_call(self, call, output):
        call["output"] = output

    def EvaluationLogger(self, **options):
        record = {**options, "predictions": []}
        self.evaluations.append(record)

        def log_prediction(inputs, output):
            if output == "refused":
                raise OSError("too long")
            prediction = {"inputs": inputs, "output": output, "scores": {}}
            record["predictions"].append(prediction)
            return FakePrediction(prediction)

        return SimpleNamespace(log_prediction=log_prediction, log_summary=lambda s: record.update(summary=s))


@pytest.fixture
def weave(monkeypatch):
    module = FakeWeave()
    monkeypatch.setitem(sys.modules, "weave", module)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    return module


def spoken(*texts):
    """A `generate` whose completions decode to these texts."""

    def generate(model, tokenizer, prompts, config):
        return [tokenizer(text)["input_ids"] for text in texts[: len(prompts)]]

    return generate


def evaluated(trainer, callback, metrics=None):
    trainer.state.global_step = 7
    callback.on_evaluate(trainer.args, trainer.state, trainer.control, metrics=metrics or {"eval_runtime": 1.0})
    assert callback.tracker.flush(10)


class TestWhatIsRecorded:
    def test_traces_without_scorers(self, tmp_path, weave):
        trainer = tiny_trainer(tmp_path)
        callback = WeaveCallback(trainer, "p", generate=spoken("one", "two", "three"), max_new_tokens=5)
        evaluated(trainer, callback)
        assert [(c["inputs"]["prompt"], c["output"]) for c in weave.calls] == list(
            zip(PROMPTS, ["one", "two", "three"])
        )
        attributes = weave.calls[0]["attributes"]
        assert (attributes["training_step"], attributes["dataset_name"]) == (7, "eval_dataset")
        assert attributes["generation_config"]["max_new_tokens"] == 5
        assert weave.inits == ["p"] and not weave.evaluations

    def test_an_evaluation_with_scorers(self, tmp_path, weave):
        """Lengths 3, 3 and 5: avg 11 / 3; the async scorer does not take the second; 2 of 3 predictions arrive."""

        async def judge(prompt, completion):
            await asyncio.sleep(0)
            if completion == "two":
                raise RuntimeError("no opinion")
            return 1.0

        scorers = {"length": lambda prompt, completion: len(completion), "judge": judge}
        trainer = tiny_trainer(tmp_path)
        callback = WeaveCallback(
            trainer, "p", scorers, dataset_name="held out", model_name="a/model",
            generate=spoken("one", "two", "refused"),
        )  # fmt: skip
        evaluated(trainer, callback)
        (evaluation,) = weave.evaluations
        assert evaluation["summary"] == {
            "total_predictions": 3,
            "successful_predictions": 2,
            "avg_length": pytest.approx(13 / 3),
            "avg_judge": 1.0,
        }
        assert [p["scores"] for p in evaluation["predictions"]] == [{"length": 3.0, "judge": 1.0}, {"length": 3.0}]
        assert evaluation["model"]["name"] == "a-model"
        assert evaluation["eval_attributes"]["model_name"] == "a/model"
        assert not weave.calls

    def test_of_several_sets_the_one_that_was_evaluated(self, tmp_path, weave):
        trainer = tiny_trainer(tmp_path)
        trainer.eval_dataset = {"a": eval_rows(), "b": Dataset.from_dict({"prompt": ["Why?"]})}
        callback = WeaveCallback(trainer, "p", generate=spoken("because", "x", "y"))
        evaluated(trainer, callback, {"eval_b_runtime": 1.0})
        assert [(c["inputs"]["prompt"], c["output"]) for c in weave.calls] == [("Why?", "because")]
        assert weave.calls[0]["attributes"]["dataset_name"] == "eval_dataset_b"

    def test_in_a_run(self, tmp_path, weave):
        trainer = tiny_trainer(tmp_path)
        trainer.add_callback(WeaveCallback(trainer, "p", {"one": lambda p, c: 1}, num_prompts=2, max_new_tokens=2))
        trainer.train()
        assert [e["name"] for e in weave.evaluations] == ["eval_dataset_step_2", "eval_dataset_step_4"]
        assert all(e["summary"]["successful_predictions"] == 2 for e in weave.evaluations)


class TestTheProject:
    def test_an_open_client_is_used(self, tmp_path, weave):
        weave.client = weave
        trainer = tiny_trainer(tmp_path)
        evaluated(trainer, WeaveCallback(trainer, "another", generate=spoken("a", "b", "c")))
        assert weave.inits == [] and len(weave.calls) == 3

    @pytest.mark.parametrize(("entity", "project"), [("me", "me/runs"), ("", "runs")])
    def test_then_that_of_the_open_run(self, tmp_path, weave, monkeypatch, entity, project):
        run = SimpleNamespace(entity=entity, project="runs")
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
        trainer = tiny_trainer(tmp_path)
        evaluated(trainer, WeaveCallback(trainer, "another", generate=spoken("a", "b", "c")))
        assert weave.inits == [project]

    def test_none_at_all_is_one_warning(self, tmp_path, weave, caplog):
        trainer = tiny_trainer(tmp_path)
        callback = WeaveCallback(trainer, generate=spoken("a", "b", "c"))
        evaluated(trainer, callback)
        evaluated(trainer, callback)
        warnings = [r.getMessage() for r in caplog.records if "no project to write to" in r.getMessage()]
        assert len(warnings) == 1 and callback.tracker.failed == 2


class TestConstruction:
    def test_without_weave(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "weave", None)
        with pytest.raises(ImportError, match=r"pip install 'preftune\[weave\]'"):
            WeaveCallback(tiny_trainer(tmp_path))

    @pytest.mark.parametrize(
        ("rows", "message"), [(None, "no eval_dataset"), (Dataset.from_dict({"text": ["a"]}), "'prompt' column")]
    )
    def test_without_prompts(self, tmp_path, weave, rows, message):
        trainer = tiny_trainer(tmp_path)
        trainer.eval_dataset = rows
        with pytest.raises(ValueError, match=message):
            WeaveCallback(trainer)

    @pytest.mark.parametrize(
        ("scorers", "message"), [({"a": 3}, "scorer 'a' is a int"), ({"prompt": len}, "called 'prompt'")]
    )
    def test_wrong_scorers(self, tmp_path, weave, scorers, message):
        with pytest.raises(ValueError, match=message):
            WeaveCallback(tiny_trainer(tmp_path), scorers=scorers)


class TestScorers:
    def test_plain_async_and_a_lambda_around_async(self):
        async def slowly(prompt, completion):
            await asyncio.sleep(0.001)
            return len(prompt)

        runner = ScorerRunner({"a": slowly, "b": lambda p, c: slowly(c, p), "c": lambda p, c: True}, 10)
        assert runner.run(["xx"], ["yyy"]) == [{"a": 2.0, "b": 3.0, "c": 1.0}]
        assert runner.run([], []) == []
        runner.close()

    def test_one_that_hangs_has_no_scores(self, caplog):
        async def hangs(prompt, completion):
            await asyncio.sleep(60)

        started = time.monotonic()
        runner = ScorerRunner({"hangs": hangs, "fine": lambda p, c: 2}, 0.05)
        assert runner.run(["p"], ["c"]) == [{"hangs": None, "fine": 2.0}]
        assert time.monotonic() - started < 10
        assert "hangs" in caplog.text
        runner.close()

    def test_each_failure_costs_its_own_score_and_one_warning(self, caplog):
        def moody(prompt, completion):
            if completion != "good":
                raise KeyError(completion)
            return 1

        found = ScorerRunner({"moody": moody}, None).run(["p"] * 3, ["bad", "good", "bad"])
        assert [row["moody"] for row in found] == [None, 1.0, None]
        assert len([r for r in caplog.records if "scorer 'moody' failed" in r.getMessage()]) == 1


def test_averages_leave_out_what_has_no_score():
    rows = [{"a": 1.0, "b": None}, {"a": 4.0, "b": None}]
    assert averages(rows, ["a", "b"]) == {"avg_a": 2.5}


def test_names():
    assert [as_name(n) for n in ("org/model-1.5", "/models/x", "///")] == ["org-model-1.5", "models-x", "model"]


@pytest.mark.skipif(importlib.util.find_spec("weave") is None, reason="weave is not installed")
def test_weave_itself(tmp_path, monkeypatch):
    import weave

    from tests.support import weave_server

    server = weave_server.install(monkeypatch)
    client = weave.init("entity/project")
    try:
        trainer = tiny_trainer(tmp_path)
        completions = spoken("one", "two", "three")
        length = {"length": lambda prompt, completion: len(completion)}
        evaluated(trainer, WeaveCallback(trainer, scorers=length, generate=completions, max_new_tokens=9))
        evaluated(trainer, WeaveCallback(trainer, generate=completions))
        client.flush()
        assert weave.get_client() is client
    finally:
        weave.finish()
    predictions = server.ended("Model.predict")
    assert [c["output"] for c in predictions] == ["one", "two", "three"]
    (evaluation,) = server.ended("Evaluation.evaluate")
    assert evaluation["output"]["output"] == {
        "total_predictions": 3,
        "successful_predictions": 3,
        "avg_length": pytest.approx(11 / 3),
    }
    traces = server.ended("completion")
    assert [(c["inputs"]["prompt"], c["output"]) for c in traces] == list(zip(PROMPTS, ["one", "two", "three"]))
    models = [value for (name, _), value in server.objects.items() if value.get("training_step") == 7]
    assert any(m["generation_config"]["max_new_tokens"] == 9 for m in models)
