"""Help: rendered from generated files that equal the dataclasses, fast, and readable on a narrow terminal.

Cost is CPU time of a fresh interpreter; the limits are those of the project's issue.
"""

from __future__ import annotations

import importlib.metadata
import resource
import statistics
import subprocess
import sys

import pytest

from preftune.cli import generate
from preftune.cli.commands import COMMANDS
from preftune.cli.help import describe, overview, render
from preftune.cli.options import Option, from_json, load_class, load_options, options_of, read_file, to_json
from preftune.errors import ConfigError

TRAINING = [name for name, command in COMMANDS.items() if command.config is not None]
same_transformers = pytest.mark.skipif(
    read_file("BaseConfig")["transformers"] != importlib.metadata.version("transformers"),
    reason="the files describe another version of transformers; the command line then reads the dataclasses",
)


@same_transformers
def test_generated_files_equal_the_dataclasses():
    """Run `python -m preftune.cli.generate` after a change of a config."""
    for name, cls in generate.described_classes().items():
        assert load_class(name) == options_of(cls), name


@same_transformers
def test_generated_files_are_what_the_generator_writes(capsys):
    assert generate.main(["--check"]) == 0 and capsys.readouterr().out == "up to date\n"


def test_the_generator_notices_a_change(monkeypatch, tmp_path, capsys):
    for path in generate.FOLDER.glob("*.json"):
        (tmp_path / path.name).write_text(
            path.read_text(encoding="utf-8").replace("LoRA rank.", "Rank."), encoding="utf-8"
        )
    (tmp_path / "Gone.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "ModelConfig.json" in capsys.readouterr().out
    assert generate.main([]) == 0 and generate.main(["--check"]) == 0
    assert not (tmp_path / "Gone.json").exists()


@pytest.mark.parametrize("command", TRAINING)
def test_every_option_has_a_text_and_a_default_of_its_kind(command):
    for option in load_options(COMMANDS[command].option_classes).values():
        assert option.help.strip(), option.name
        assert "%%" not in option.help, option.name
        assert option == from_json(to_json(option), option.owner)


def test_percent_signs_are_just_text():
    text = render("x", "", {"a": Option("a", "C", "C", ("int",), 1, "about 20% slower, %s %(x)d {y} %")})
    assert "about 20% slower, %s %(x)d {y} %" in text


@pytest.mark.parametrize("command", TRAINING)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_fit_the_terminal(command, width):
    options = load_options(COMMANDS[command].option_classes)
    text = render(f"preftune {command}", COMMANDS[command].summary, options, width=width)
    too_long = [line for line in text.splitlines() if len(line) > width and " " in line.strip()]
    assert too_long == []
    for name in options:
        assert f"--{name}" in text
    assert max(map(len, overview([("dpo", "words " * 20)], width=width).splitlines())) <= width


def test_what_an_entry_says():
    option = Option("size", "C", "C", ("list[str]", "str"), ["a"], "Sizes.", ("a", "b"), {"paths": True})
    assert describe(option) == "Sizes. One of: a, b, or package.module:function. (default: a)"
    assert (
        describe(Option("on", "C", "C", ("bool",), True, "On.", flag=True))
        == "On. (default: true; --no_on turns it off)"
    )
    assert describe(Option("off", "C", "C", ("int", "none"), None, "Off.")) == "Off."


def test_a_word_narrows_the_list():
    options = load_options(COMMANDS["dpo"].option_classes)
    text = render("preftune dpo", "", options, "bema")
    assert "--bema_lag" in text and "--learning_rate" not in text
    assert "--max_length" in render("preftune dpo", "", options, "--max-length")
    with pytest.raises(ConfigError, match="no option"):
        render("preftune dpo", "", options, "zebra")


def test_own_options_come_before_those_of_the_training_loop():
    text = render("preftune dpo", "", load_options(COMMANDS["dpo"].option_classes))
    order = [
        text.index(f"--{name}")
        for name in ("dataset_name", "model_name_or_path", "loss_type", "sync_ref_model", "optim ")
    ]
    assert order == sorted(order)


_MEASURE = """
import sys
from preftune.cli.main import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "transformers", "datasets", "accelerate", "rich", "yaml"} & set(sys.modules))
sys.exit(f"loaded {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(("words", "limit"), [(["--help"], 0.3), (["dpo", "--help"], 1.5), (["sft", "--help"], 1.5)])
def test_help_is_fast_and_imports_nothing_heavy(words, limit):
    costs = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", _MEASURE, *words], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert statistics.median(costs) < limit
