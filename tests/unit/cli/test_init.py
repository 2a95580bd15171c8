"""`verl init`: a project whose reward test passes and whose run script has a valid configuration."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.commands import ROOT, compose_config
from verl.cli.init import main


@pytest.fixture
def project(tmp_path):
    assert main([str(tmp_path / "mine")]) == 0
    return tmp_path / "mine"


def test_the_command_creates_a_project_whose_reward_test_passes(tmp_path):
    created = subprocess.run(
        [sys.executable, "-m", "verl", "init", "mine"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cd mine" in created.stdout
    tested = subprocess.run(
        [sys.executable, "test_reward.py"],
        cwd=tmp_path / "mine",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "4 tests passed" in tested.stdout, tested.stderr


def test_a_folder_with_files_is_not_overwritten(project, capsys):
    (project / "reward.py").write_text("mine")
    assert main([str(project)]) == 2
    assert str(project) in capsys.readouterr().err
    assert (project / "reward.py").read_text() == "mine"


def test_an_empty_folder_is_used(tmp_path):
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "run.sh").is_file()


def test_the_run_script_needs_a_python_with_verl(project):
    environment = {**os.environ, "PYTHON": "false"}
    done = subprocess.run(
        ["bash", str(project / "run.sh")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "activate the environment that has verl" in done.stderr


def test_every_command_of_the_run_script_composes(project, tmp_path):
    """With a `python` that records its arguments."""
    recorder = tmp_path / "python"
    record = tmp_path / "calls"
    recorder.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {record}\n")
    recorder.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(recorder)}
    subprocess.run(["bash", str(project / "run.sh"), "data.seed=7"], env=environment, check=True)
    subprocess.run(["bash", str(project / "run.sh"), "check"], env=environment, check=True)
    calls = [line for line in record.read_text().splitlines() if line != "-c import verl"]
    prepare, sft, train, _, _, check = calls
    assert prepare == "prepare.py"
    assert compose_config(["-m", "verl.trainer.main_sft", *sft.split()[3:]]).trainer.total_training_steps == 300
    config = compose_config(["-m", "verl.trainer.main_ppo", *train.split()[3:]])
    assert config.data.seed == 7
    assert config.trainer.project_name == "mine"
    assert check.startswith("-m verl check algorithm=grpo")
    for key, value in re.findall(
        r"^\| `([a-z_]+\.[a-z_.]+)` \| `([^`]+)` \|", (project / "README.md").read_text(), re.M
    ):
        assert f"{key}={value}" in train, "the README names the values of the script"
