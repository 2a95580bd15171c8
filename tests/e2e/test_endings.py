"""Errors after the configuration check: a few last lines with a remedy; tracebacks go to a file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.training_harness import make_task, overrides

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def command(*arguments: str, program: str = "verl.trainer.main_ppo") -> list[str]:
    return [sys.executable, "-m", program, *arguments]


def ended(done: subprocess.CompletedProcess) -> list[str]:
    """The last lines: at most a handful after the last line of the log, none of a traceback."""
    lines = done.stderr.rstrip().splitlines()
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return lines[-6:]


def named_log(line: str) -> Path:
    match = re.search(r"Full traceback in (\S+\.log)\.", line)
    assert match, line
    return Path(match[1])


def run_to_the_end(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True)


@pytest.mark.slow
def test_what_the_task_runner_refuses_is_last_and_its_traceback_in_the_file_it_names(task, tmp_path):
    """The rows of a dataset of the user's own are only known to the task runner."""
    source = "from verl.utils.dataset.rl_dataset import RLHFDataset\n\n\nclass Mine(RLHFDataset):\n    pass\n"
    (tmp_path / "mine.py").write_text(source)
    custom = [f"data.custom_cls.path={tmp_path / 'mine.py'}", "data.custom_cls.name=Mine"]
    arguments = overrides(task, tmp_path, "data.train_batch_size=64", "algorithm.adv_estimator=grpo", *custom)
    done = run_to_the_end(arguments, tmp_path)
    assert done.returncode == 1
    *_, file, cause = ended(done)
    assert "data.train_batch_size" in cause
    assert "32" in cause
    log = named_log(file).read_text()
    assert "Traceback (most recent call last)" in log
    assert "in make_dataloader" in log, "the traceback of the other process"


@pytest.mark.parametrize(
    "program",
    [
        "main_ppo",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("main_sft", "main_generation", "main_eval")),
    ],
)
def test_a_yaml_that_does_not_parse_is_shown_where_it_breaks(program, tmp_path):
    (tmp_path / "mine.yaml").write_text("data:\n  train_files: x.parquet\n  max_length: 5: 6\n")
    arguments = ["--config-path", str(tmp_path), "--config-name", "mine"]
    done = subprocess.run(
        command(*arguments, program=f"verl.trainer.{program}"), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    head, problem, source, _ = ended(done)[-4:]
    assert head == "1 problem in the configuration:"
    assert problem.startswith(f"1. {tmp_path / 'mine.yaml'}, line 3, column 16: mapping values are not allowed here")
    assert source.strip() == "max_length: 5: 6"


def test_a_yaml_that_hydra_includes_is_shown_too(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [other, _self_]\n")
    (tmp_path / "other.yaml").write_text("data: [1, 2\n")
    done = run_to_the_end(["--config-path", str(tmp_path), "--config-name", "mine"], tmp_path)
    assert done.returncode == 2
    assert f"1. {tmp_path / 'other.yaml'}, line 2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_run_ppo_in_a_script_raises_what_was_raised(task, tmp_path):
    """No exit, no wrapping of Ray's: the script goes on with the exception and its cause."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys\n"
        "from verl.trainer.main_ppo import TaskRunner, run_ppo\n"
        "from verl.config import load_config\n"
        "class Mine(TaskRunner):\n"
        "    def add_actor_rollout_worker(self, config):\n"
        "        raise LookupError('no such role') from KeyError('actor')\n"
        "try:\n"
        "    run_ppo(load_config(None, sys.argv[1:]), Mine)\n"
        "except LookupError as error:\n"
        "    assert type(error) is LookupError and str(error) == 'no such role'\n"
        "    assert 'add_actor_rollout_worker' in str(error.__cause__) and 'KeyError' in str(error.__cause__)\n"
        "    print('caught')\n"
    )
    run = overrides(task, tmp_path, "algorithm.adv_estimator=grpo")
    done = subprocess.run([sys.executable, str(script), *run], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "caught" in done.stdout.splitlines()


@pytest.mark.slow
def test_a_runner_of_the_users_with_data_workers_ends_without_a_traceback(task, tmp_path):
    """A remote class without concurrency runs in its process's main thread, where torch watches its data workers."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys, ray\n"
        "from verl.trainer.main_ppo import TaskRunner, run_ppo\n"
        "from verl.config import load_config\n"
        "class Mine(TaskRunner):\n"
        "    pass\n"
        "run_ppo(load_config(None, sys.argv[1:]), ray.remote(num_cpus=1)(Mine))\n"
    )
    more = ("algorithm.adv_estimator=grpo", "data.dataloader_num_workers=2", "trainer.logger=[console,file]")
    run = overrides(task, tmp_path, *more)
    done = subprocess.run([sys.executable, str(script), *run], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert [line.partition("=")[0] for line in done.stdout.splitlines() if line.startswith("step 2: ")] == [
        "step 2: reward_mean"
    ]
    assert "Summary: 2 steps in" in done.stdout
    assert "start-up: Ray" in done.stderr
    assert "Mine pid=" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr, "no terminal"
    model = tmp_path / "checkpoints" / "global_step_2" / "actor" / "huggingface"
    assert f"Training finished at step 2. Model: {model}" in done.stderr.splitlines()
    assert (model / "config.json").is_file()
