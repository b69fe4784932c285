"""Launching: the line given to accelerate, the set-ups that come with preftune, and the check of the world size.

The set-ups are read by accelerate's own parser; that cpu_ddp really starts two processes is in tests/distributed.
"""

from __future__ import annotations

import os
import sys

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from preftune.cli import launch
from preftune.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch):
    monkeypatch.setattr(launch, "_num_devices", lambda: 0)


def option_of(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


def test_names():
    assert launch.config_names() == ["cpu_ddp", "deepspeed_zero2", "deepspeed_zero3", "fsdp2", "multi_gpu"]


@pytest.mark.parametrize(
    ("name", "kind", "cpu"),
    [
        ("cpu_ddp", "MULTI_GPU", True),
        ("multi_gpu", "MULTI_GPU", False),
        ("deepspeed_zero2", "DEEPSPEED", False),
        ("deepspeed_zero3", "DEEPSPEED", False),
        ("fsdp2", "FSDP", False),
    ],
)
def test_accelerate_reads_each_set_up(name, kind, cpu):
    config = load_config_from_file(str(launch.config_path(name)))
    assert (config.distributed_type.value, config.use_cpu, config.mixed_precision) == (kind, cpu, "no")
    assert config.num_processes == (2 if name == "cpu_ddp" else -1)
    stage = {"deepspeed_zero2": 2, "deepspeed_zero3": 3}.get(name)
    assert config.deepspeed_config.get("zero_stage") == stage
    assert (config.fsdp_config.get("fsdp_version") == 2) == (name == "fsdp2")


def test_the_line():
    line, processes = launch.launch_command("dpo", {"accelerate_config": "cpu_ddp"}, ["--beta", "1"])
    assert line[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert line[-5:] == ["-m", "preftune.cli", "dpo", "--beta", "1"]
    assert processes == 2 and option_of(line, "--num_processes") == "2"
    assert option_of(line, "--main_process_port") == "0"  # a free one


def test_options_are_passed_on():
    settings = {
        "num_processes": 6,
        "num_machines": 3,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 5,
        "gpu_ids": "0,1",
    }
    line, processes = launch.launch_command("sft", {"accelerate_config": "fsdp2", **settings}, [])
    assert processes == 6
    for name, value in settings.items():
        assert line.count(f"--{name}") == 1 and option_of(line, f"--{name}") == str(value)


def test_several_machines_keep_the_port_of_the_launcher():
    line, _ = launch.launch_command(
        "sft", {"accelerate_config": "multi_gpu", "num_machines": 2, "num_processes": 4}, []
    )
    assert "--main_process_port" not in line


@pytest.mark.parametrize(("devices", "name", "processes"), [(0, "cpu_ddp", 3), (8, "multi_gpu", 3)])
def test_set_up_where_none_is_named(monkeypatch, devices, name, processes):
    """Without a set-up accelerate would run one CPU process, whatever --num_processes says."""
    monkeypatch.setattr(launch, "_num_devices", lambda: devices)
    line, count = launch.launch_command("dpo", {"num_processes": 3}, [])
    assert option_of(line, "--config_file").endswith(f"{name}.yaml") and count == processes


def test_one_process_for_each_device(monkeypatch):
    monkeypatch.setattr(launch, "_num_devices", lambda: 8)
    assert launch.launch_command("dpo", {"accelerate_config": "fsdp2"}, [])[1] == 8


def test_own_file(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 5\nmain_process_port: 29511\n")
    line, processes = launch.launch_command("dpo", {"accelerate_config": str(tmp_path / "mine.yaml")}, [])
    assert processes == 5 and option_of(line, "--config_file") == str(tmp_path / "mine.yaml")
    assert "--main_process_port" not in line  # the file says which
    monkeypatch.chdir(tmp_path)
    assert launch.config_path("mine.yaml") == tmp_path / "mine.yaml"
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="not YAML"):
        launch.launch_command("dpo", {"accelerate_config": "broken.yaml"}, [])


def test_unknown_set_up():
    with pytest.raises(
        ConfigError, match=r"'cpu_dpp' is neither a file nor a known set-up; did you mean 'cpu_ddp'\? Known"
    ):
        launch.config_path("cpu_dpp")


@pytest.mark.parametrize(
    ("environment", "world", "fits"),
    [
        ({}, 1, True),
        ({launch.LAUNCHED: "2"}, 2, True),
        ({launch.LAUNCHED: "2"}, 1, False),
        ({launch.LAUNCHED: "2", "WORLD_SIZE": "1"}, 1, False),
        ({"WORLD_SIZE": "2"}, 1, False),
        ({"WORLD_SIZE": "2"}, 2, True),
    ],
)
def test_nobody_trains_alone(environment, world, fits):
    if fits:
        launch.check_world_size(environment, world)
    else:
        with pytest.raises(ConfigError, match=f"2 processes were asked for.*group of {world}"):
            launch.check_world_size(environment, world)


def test_launch_replaces_this_process(monkeypatch):
    calls = []
    monkeypatch.setattr(launch.os, "execve", lambda *args: calls.append(args))
    monkeypatch.setattr(launch.subprocess, "run", lambda *args, **kwargs: launch.subprocess.CompletedProcess([], 3))
    launch.launch(["python", "-m", "x"], 4)
    path, line, environment = calls[0]
    assert (path, line) == ("python", ["python", "-m", "x"]) and environment[launch.LAUNCHED] == "4"
    assert launch.LAUNCHED not in os.environ
    monkeypatch.setattr(launch.os, "name", "nt")
    assert launch.launch(["python"], 1) == 3
