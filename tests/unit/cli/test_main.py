"""The entry point: dispatch, exit codes, one line an error, launching, and what reaches the run function.

The run function and the launcher are replaced, so that no model is loaded and no process started.
"""

from __future__ import annotations

import json
import os
import sys
import types
import warnings
from importlib.metadata import version

import pytest

import preftune
from preftune.cli import commands, launch, main, preflight
from preftune.cli.commands import COMMANDS
from preftune.cli.main import main as run_main
from preftune.errors import ConfigError

ROW = {"prompt": "a", "chosen": "b", "rejected": "c", "text": "d", "privileged_context": "e"}
TRAINING = [name for name, command in COMMANDS.items() if command.config is not None]


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("PREFTUNE_TRACEBACK", launch.LAUNCHED, "LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a model folder and two datasets, as current folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "pairs.json").write_text(json.dumps([ROW]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ran(monkeypatch):
    """What the run functions of the training commands were called with."""
    calls = []

    def run(command, parsed):
        calls.append((command.name, parsed))
        return 0

    monkeypatch.setattr(main, "load_object", lambda path: run)
    return calls


@pytest.fixture
def launched(monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "launch", lambda line, processes: calls.append((line, processes)) or 0)
    monkeypatch.setattr(launch, "_num_devices", lambda: 0)
    return calls


REQUIRED = ["--model_name_or_path", "model", "--dataset_name", "pairs.json"]


def test_overview_and_version(capsys):
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert run_main(words) == 0
        out = capsys.readouterr().out
        assert all(f"  {name}" in out for name in COMMANDS)
    assert run_main(["--version"]) == 0 and capsys.readouterr().out.strip() == preftune.__version__


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dpoo"], "no command 'dpoo'; did you mean 'dpo'?"),
        (["dpo", "--betta", "1"], "did you mean --beta?"),
        (["dpo"], "no model is given"),
        (["env", "--json"], "takes no options"),
        (["dpo", "--help", "zebra"], "no option"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, words, message):
    assert run_main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("preftune: error: ") and message in captured.err
    assert captured.err.count("\n") == 1


def test_a_traceback_where_asked_for(monkeypatch):
    with pytest.raises(ConfigError):
        run_main(["dpo", "--traceback"])
    monkeypatch.setenv("PREFTUNE_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        run_main(["dpo"])


@pytest.mark.parametrize("name", TRAINING)
def test_help_of_each_command(capsys, name):
    for flag in ("--help", "-h"):
        assert run_main([name, flag]) == 0
        assert f"usage: preftune {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", TRAINING)
def test_typed_values_reach_the_run_function(files, ran, name):
    limits = {"sdft": "max_prompt_length"}  # an option that can be none
    limit = limits.get(name, "max_length" if not COMMANDS[name].rewards else "reward_timeout")
    assert run_main([name, *REQUIRED, "--learning_rate", "1e-4", f"--{limit}", "none"]) == 0
    ((command, parsed),) = ran
    assert command == name
    assert parsed.of(COMMANDS[name].option_classes[0]) == {"learning_rate": 1e-4, limit: None}
    assert parsed.of("ModelConfig") == {"model_name_or_path": "model"}


def test_yaml_alone_suffices(files, ran):
    (files / "run.yaml").write_text(
        "model_name_or_path: model\ndataset_name: pairs.json\noutput_dir: out\nenv: {MY_SETTING: 3}\n"
    )
    try:
        assert run_main(["sft", "--config", "run.yaml"]) == 0
        assert os.environ["MY_SETTING"] == "3"
    finally:
        os.environ.pop("MY_SETTING", None)
    assert ran[0][1].values["output_dir"] == "out"


def test_the_current_folder_is_importable_but_shadows_nothing(files, ran):
    run_main(["dpo", *REQUIRED])
    assert sys.path[-1] == str(files)


def test_error_raised_while_running(files, monkeypatch, capsys):
    def fail(command, parsed):
        raise ConfigError("no such thing")

    monkeypatch.setattr(main, "load_object", lambda path: fail)
    monkeypatch.setenv("RANK", "3")
    assert run_main(["dpo", *REQUIRED]) == 2
    assert capsys.readouterr().err == "preftune (process 3): error: no such thing\n"


def test_an_error_of_ours_is_not_hidden(files, monkeypatch):
    def fail(command, parsed):
        raise RuntimeError("a bug")

    monkeypatch.setattr(main, "load_object", lambda path: fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run_main(["dpo", *REQUIRED])


def test_interrupt(files, monkeypatch, capsys):
    def interrupt(command, parsed):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "load_object", lambda path: interrupt)
    assert run_main(["dpo", *REQUIRED]) == 130


def test_a_warning_is_one_line_of_the_first_process(files, monkeypatch, capsys):
    def warn(command, parsed):
        warnings.warn("mind this", stacklevel=1)
        warnings.warn_explicit("old", FutureWarning, "/somewhere/peft/model.py", 1)
        warnings.warn_explicit("ours", FutureWarning, "/somewhere/preftune/configs/sft.py", 1)
        return 0

    monkeypatch.setattr(main, "load_object", lambda path: warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        run_main(["dpo", *REQUIRED])
        assert capsys.readouterr().err == "preftune: UserWarning: mind this\npreftune: FutureWarning: ours\n"
        monkeypatch.setenv("RANK", "1")
        run_main(["dpo", *REQUIRED])
        assert capsys.readouterr().err == ""


def test_checks_come_before_the_run_function(files, ran, capsys):
    assert run_main(["dpo", "--model_name_or_path", "model", "--dataset_name", "pair.json"]) == 2
    assert "did you mean 'pairs.json'" in capsys.readouterr().err and ran == []


@pytest.mark.parametrize("name", TRAINING)
def test_every_command_launches_processes(files, ran, launched, name):
    """All commands forward: launch options reach accelerate, the rest reaches the command, nothing both."""
    assert run_main([name, *REQUIRED, "--num_processes", "2", "--max_steps=3", "--accelerate_config", "cpu_ddp"]) == 0
    ((line, processes),) = launched
    at = line.index("preftune.cli")
    assert processes == 2 and ran == []
    assert line[line.index("--num_processes") + 1] == "2" and line.index("--num_processes") < at
    assert line[line.index("--config_file") + 1].endswith("accelerate_configs/cpu_ddp.yaml")
    assert line[at - 1 :] == ["-m", "preftune.cli", name, *REQUIRED, "--max_steps=3"]


@pytest.mark.parametrize("spelling", [["--accelerate_config", "fsdp2"], ["--accelerate_config=fsdp2"]])
def test_command_line_beats_yaml_for_launch_options_too(files, launched, spelling):
    (files / "run.yaml").write_text("accelerate_config: cpu_ddp\nnum_processes: 4\n")
    assert run_main(["dpo", "--config", "run.yaml", *REQUIRED, *spelling]) == 0
    line, processes = launched[0]
    assert line[line.index("--config_file") + 1].endswith("fsdp2.yaml") and processes == 4
    assert not any("accelerate_config" in token for token in line[line.index("preftune.cli") :])
    assert "run.yaml" in line


@pytest.mark.parametrize("name", [launch.LAUNCHED, "LOCAL_RANK"])
def test_a_launched_process_does_not_launch_again(files, ran, launched, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    (files / "run.yaml").write_text("accelerate_config: cpu_ddp\n")
    assert run_main(["dpo", "--config", "run.yaml", *REQUIRED]) == 0
    assert launched == [] and len(ran) == 1


def test_a_wrong_set_up_is_refused_before_launching(files, launched, capsys):
    assert run_main(["dpo", *REQUIRED, "--accelerate_config", "cpu_dpp"]) == 2
    assert "did you mean 'cpu_ddp'" in capsys.readouterr().err and launched == []


def test_another_transformers_is_read_from_the_dataclasses(monkeypatch):
    """The files are of one version; with another the options come from the classes and know its new fields."""
    from preftune.cli.options import load_options

    command, asked = COMMANDS["dpo"], []
    preflight.load_object(str(command.config))  # imports libraries that read versions as they load
    monkeypatch.setattr(preflight.importlib.metadata, "version", lambda name: asked.append(name) or "99.0")
    assert preflight.current_options(command) == load_options(command.option_classes)
    assert asked == ["transformers"]


def test_module_and_script_are_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["preftune", "--version"])
    assert run_main() == 0
    assert isinstance(commands.load_object("preftune.cli.main:main"), types.FunctionType)


def test_env(capsys):
    assert run_main(["env"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"] == version("torch") and lines["preftune"] == preftune.__version__
    assert "cores usable" in lines["cpu"] and {"python", "platform", "transformers", "peft"} <= set(lines)
    assert "accelerator" in lines or "gpu 0" in lines
    assert run_main(["env", "--help"]) == 0 and "usage" in capsys.readouterr().out
