"""The command line and its YAML file: precedence, spellings, typos, lines, and `TrlParser`.

Parsed with the options of `preftune dpo` as generated, without importing transformers.
"""

from __future__ import annotations

import pytest

from preftune.cli.commands import COMMANDS
from preftune.cli.options import by_name, load_options, options_of
from preftune.cli.parse import TrlParser, parse, read_yaml, split
from preftune.configs.model import ModelConfig
from preftune.configs.script import ScriptArguments
from preftune.errors import ConfigError

DPO = load_options(COMMANDS["dpo"].option_classes)


def values(*tokens: str) -> dict:
    return parse(tokens, DPO, "preftune dpo").values


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--beta 0.2", {"beta": 0.2}),
        ("--beta=0.2", {"beta": 0.2}),
        ("--max-length 512", {"max_length": 512}),
        ("--max_length none", {"max_length": None}),
        ("--report_to none", {"report_to": "none"}),
        ("--max_steps -1", {"max_steps": -1}),
        ("--sync_ref_model --beta 1", {"sync_ref_model": True, "beta": 1}),
        ("--no_disable_dropout", {"disable_dropout": False}),
        ("--no-disable-dropout", {"disable_dropout": False}),
        ("--disable_dropout false", {"disable_dropout": False}),
        ("--loss_type sigmoid sft --loss_weights 1 0.5", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        ("--columns prompt=question chosen=good", {"columns": {"prompt": "question", "chosen": "good"}}),
        ("--run_name=a=b", {"run_name": "a=b"}),
        ("--run_name=--odd", {"run_name": "--odd"}),
        ("--beta 0.1 --beta 0.3", {"beta": 0.3}),
        ("--gradient_checkpointing", {"gradient_checkpointing": True}),
        ("--fsdp", {"fsdp": True}),
        ("--resume_from_checkpoint true", {"resume_from_checkpoint": True}),
        ("--traceback", {}),
    ],
)
def test_spellings(line, expected):
    assert values(*line.split()) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--betta 1", r"unknown option --betta; did you mean --beta\? See preftune dpo --help"),
        ("--confg a.yaml", "did you mean --config"),
        ("--no_betta", "unknown option --no_betta"),
        ("--no_beta", "unknown option"),
        ("--no_packing", "unknown option"),
        ("stray --beta 1", "unexpected 'stray'"),
        ("--beta=1 2", "unexpected '2'"),
        ("-b 1", "unexpected '-b'"),
        ("--", "unexpected '--'"),
        ("--no_disable_dropout true", "takes no value"),
        ("--beta", "beta needs a value"),
        ("--beta 1 2", "takes one value"),
        ("--attention_layout tre", "did you mean 'tree'"),
        ("--ld_alpha 2", "at most 1"),
        ("--config", "takes one file"),
        ("--config a b", "takes one file"),
        ("--config nowhere.yaml", "no such file"),
    ],
)
def test_mistakes(line, message):
    with pytest.raises(ConfigError, match=message):
        values(*line.split())


def test_yaml_alone_suffices_and_the_command_line_beats_it(write):
    path = write("model_name_or_path: m\nbeta: 0.2\nlearning_rate: 1e-5\naccelerate_config: a\nsync_ref_model: true\n")
    assert values("--config", path) == {
        "model_name_or_path": "m",
        "beta": 0.2,
        "learning_rate": 1e-5,
        "accelerate_config": "a",
        "sync_ref_model": True,
    }
    for spelling in (["--accelerate_config", "b"], ["--accelerate_config=b"]):
        got = values("--config", path, *spelling, "--beta", "0.5", "--no_sync_ref_model")
        assert (got["accelerate_config"], got["beta"], got["sync_ref_model"]) == ("b", 0.5, False)
        assert got == values(*spelling, "--beta", "0.5", "--no_sync_ref_model", f"--config={path}")


def test_yaml_types(write):
    text = """
max_length: null
report_to: none
eval_strategy: no          # YAML's own reading of this word is false
run_name: 17
loss_type: [sigmoid, sft]
loss_weights:
  - 1
  - 5e-1
columns: {prompt: question}
datasets:
  - path: a.json
    columns: [prompt, chosen]
lr-scheduler-type: cosine
model_init_kwargs: &kwargs
  attn_implementation: sdpa
lr_scheduler_kwargs:
  <<: *kwargs
  num_cycles: 3
"""
    assert values("--config", write(text)) == {
        "max_length": None,
        "report_to": "none",
        "eval_strategy": "no",
        "run_name": "17",
        "loss_type": ["sigmoid", "sft"],
        "loss_weights": [1.0, 0.5],
        "columns": {"prompt": "question"},
        "datasets": [{"path": "a.json", "columns": ["prompt", "chosen"]}],
        "lr_scheduler_type": "cosine",
        "model_init_kwargs": {"attn_implementation": "sdpa"},
        "lr_scheduler_kwargs": {"attn_implementation": "sdpa", "num_cycles": 3},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("beta: 0.1\nbeta_: 1\n", r"line 2: unknown key 'beta_'; did you mean 'beta'\?"),
        ("\n\nlearning_rat: 1\n", "line 3: unknown key 'learning_rat'; did you mean 'learning_rate'"),
        ("beta: 0.1\nmax_steps: 5\nbeta: 0.2\n", "line 3: 'beta' is already set on line 1"),
        ("lr_scheduler_kwargs:\n  a: 1\n  a: 2\n", "line 3: 'a' is already set on line 2"),
        ("datasets:\n  - path: a\n    path: b\n", "line 3: 'path' is already set"),
        ("beta: high\n", "line 1: beta='high' is not a number"),
        ("max_length: 0\n", "line 1: max_length=0 is out of range"),
        ("loss_type: sigmod\n", "line 1: .*did you mean 'sigmoid'"),
        ("report_to: false\n", "in quotes"),
        ("- beta\n", "name: value"),
        ("just words\n", "name: value"),
        ("beta: [1\n", "not YAML"),
        ("beta: !!python/object:os.system 1\n", "not YAML"),
        ("config: other.yaml\n", "unknown key 'config'"),
        ("env: 3\n", "env takes a mapping"),
    ],
)
def test_yaml_mistakes(write, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        values("--config", write(text))
    assert "run.yaml" in str(error.value)


def test_yaml_empty_or_comments_only(write):
    assert values("--config", write("")) == {}
    assert values("--config", write("# nothing\n")) == {}


def test_yaml_not_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="UTF-8"):
        values("--config", str(path))


def test_yaml_of_a_nearly_right_name(write):
    path = write("beta: 0.1\n")
    with pytest.raises(ConfigError, match=r"no such file; did you mean 'run\.yaml'"):
        values("--config", path.replace("run.yaml", "run.yml"))


def test_yaml_environment(write):
    parsed = parse(["--config", write("env:\n  OMP_NUM_THREADS: 2\nbeta: 0.1\n")], DPO)
    assert parsed.environment == {"OMP_NUM_THREADS": "2"} and parsed.values == {"beta": 0.1}


def test_values_by_class_and_tokens_to_pass_on():
    tokens = ["--beta=0.3", "--num_processes", "2", "--lora_r", "8", "--loss_type", "sigmoid", "sft", "--traceback"]
    parsed = parse(tokens, DPO)
    assert parsed.of("DPOConfig") == {"beta": 0.3, "loss_type": ["sigmoid", "sft"]}
    assert parsed.of("ModelConfig") == {"lora_r": 8}
    assert parsed.of("LaunchArguments") == {"num_processes": 2}
    assert parsed.tokens_without("LaunchArguments") == [t for t in tokens if t not in ("--num_processes", "2")]


def test_split_keeps_tokens_as_typed():
    groups = split(["--max-length", "5", "--a=b", "--c"])
    assert [g.tokens for g in groups] == [["--max-length", "5"], ["--a=b"], ["--c"]]
    assert [g.name for g in groups] == ["max_length", "a", "c"]


def test_one_name_in_two_dataclasses_is_refused():
    with pytest.raises(ValueError, match="dataset_name"):
        by_name([*options_of(ScriptArguments), *options_of(ScriptArguments)])


def test_trl_parser_gives_instances(write):
    path = write("model_name_or_path: m\nlora_r: 4\n")
    parser = TrlParser((ScriptArguments, ModelConfig))
    script, model = parser.parse_args_and_config(["--config", path, "--dataset_name", "d", "--lora_r=8"])
    assert isinstance(script, ScriptArguments) and script.dataset_name == "d" and script.progress == "auto"
    assert isinstance(model, ModelConfig) and (model.model_name_or_path, model.lora_r) == ("m", 8)


def test_trl_parser_and_what_it_does_not_know():
    parser = TrlParser(ScriptArguments)
    with pytest.raises(ConfigError, match="unknown option --lora_r"):
        parser.parse_args_and_config(["--lora_r", "8"])
    script, rest = parser.parse_args_and_config(["--lora_r", "8", "--dataset_name=d"], return_remaining_strings=True)
    assert script.dataset_name == "d" and rest == ["--lora_r", "8"]
    assert parser.parse_args_and_config(["--lora_r", "8"], fail_with_unknown_args=False) == (ScriptArguments(),)


def test_trl_parser_help(capsys):
    with pytest.raises(SystemExit) as exit_:
        TrlParser(ScriptArguments).parse_args_and_config(["--help"])
    assert exit_.value.code == 0 and "--dataset_name" in capsys.readouterr().out


def test_reading_a_file_needs_no_command_line(write):
    assert read_yaml(write("beta: 1\n"), DPO) == ({"beta": 1}, {})
