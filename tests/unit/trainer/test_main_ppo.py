"""run_ppo: the configuration is checked first; then a TaskRunner, plain or remote, gets the resolved one by Ray."""

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from verl.config import ConfigError, load_config
from verl.trainer import main_ppo
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.main_ppo import run_ppo
from verl.trainer.recovery.ray_monitor import RayProcesses
from verl.trainer.recovery.signals import RUN_ENDED

GIVEN = {"data": {"train_files": "openai/gsm8k"}, "actor_rollout_ref": {"model": {"path": "a/b"}}}


def clean_environment(**extra):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return inherited | {"RAY_ADDRESS": "local"} | extra


def test_a_wrong_configuration_raises_before_ray_is_imported():
    code = """
        import sys
        from verl.config import ConfigError
        from verl.trainer.main_ppo import run_ppo
        try:
            run_ppo({"trainer": {"nnodes": 0}})
        except ConfigError as error:
            sys.exit(0 if len(error.problems) == 3 and not {"ray", "torch"} & set(sys.modules) else 1)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == 0
    with pytest.raises(ConfigError):
        run_ppo({"trainer": {"nnodes": 0}})


def test_run_ppo_prints_the_plan_of_a_script_without_logging_and_leaves_logging_that_is_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    row = {"prompt": "1 + 1", "data_source": "openai/gsm8k", "ground_truth": "2"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 512)
    given = {
        "data": {"train_files": str(tmp_path / "rows.jsonl")},
        "actor_rollout_ref": {"model": {"path": str(tmp_path)}},
    }
    code = f"""
        import logging, sys
        from verl.trainer.recovery.ray_monitor import RayUnavailableError
        from verl.trainer.main_ppo import run_ppo

        def run():
            try:
                run_ppo({given!r})
            except RayUnavailableError:
                sys.stderr.write("---\\n")

        run()
        assert logging.getLogger("verl").handlers == []
        logging.basicConfig(level=logging.WARNING, format="mine: %(message)s")
        run()
        logging.getLogger().setLevel(logging.INFO)
        run()
    """
    environment = clean_environment() | {"RAY_ADDRESS": "127.0.0.1:1"}  # nothing answers there: far enough
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    bare, quiet, own, _ = done.stderr.split("---\n")
    assert "data.val_files is not set" in bare
    assert "\nBatch plan\n  step" in bare
    assert "Batch plan" not in quiet
    assert "mine: data.val_files is not set" in quiet
    assert "mine: Batch plan" in own


@pytest.mark.processes
@pytest.mark.slow
def test_plain_and_remote_runners_get_the_resolved_configuration(tmp_path):
    (tmp_path / "mine.py").write_text("LOADED = True\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, ray
            from verl.trainer.main_ppo import TaskRunner, run_ppo

            config = {GIVEN!r} | {{"external_libs": ["mine"], "ray_init": {{"num_cpus": 2}}}}

            class Mine(TaskRunner):
                def add_actor_rollout_worker(self, config):
                    raise NotImplementedError("far enough for this test")

                def run(self, config):
                    try:
                        super().run(config)
                    except NotImplementedError:
                        pass
                    import sys
                    assert sys.modules["mine"].LOADED
                    assert config.actor_rollout_ref.rollout.max_new_tokens == 512
                    assert os.environ["NCCL_DEBUG"] == "WARN" and os.environ["HF_TOKEN"] == "secret"
                    open(os.path.join({str(tmp_path)!r}, self.name), "w").close()
                name = "plain"

            class Remote(Mine):
                name = "remote"

            run_ppo(config, task_runner_class=Mine)
            assert ray.cluster_resources()["CPU"] == 2
            run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(Remote))
            """
        )
    )
    environment = clean_environment(HF_TOKEN="secret", PYTHONPATH=str(tmp_path))
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plain").exists()
    assert (tmp_path / "remote").exists()


@pytest.mark.parametrize("is_program", [True, False])
def test_after_a_complete_run_of_a_program_a_signal_ends_it_in_words(monkeypatch, is_program):
    """No signal has arrived; only `ray.shutdown` and the last log line are left."""
    messages = []
    monkeypatch.setattr(main_ppo, "start_ray", lambda *arguments: RayProcesses())
    monkeypatch.setattr(main_ppo, "create_runner", lambda runner_class: SimpleNamespace(run=run))
    run = SimpleNamespace(remote=lambda config: None)
    monkeypatch.setattr(main_ppo, "await_controller", lambda *arguments: None)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr(main_ppo, "exit_on_signals", messages.append)
    values = {"data": {"train_files": "openai/gsm8k"}, "actor_rollout_ref": {"model": {"path": "a/b"}}}
    assert main_ppo.run_on_ray(load_config(values, check_files=False), main_ppo.TaskRunner, None, is_program) is None
    assert messages == ([RUN_ENDED] if is_program else [])


def test_runtime_env_keeps_what_the_user_set(monkeypatch):
    for name in ("NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "TOKENIZERS_PARALLELISM", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    variables = get_ppo_ray_runtime_env()["env_vars"]
    assert variables["NCCL_DEBUG"] == variables["VLLM_LOGGING_LEVEL"] == "WARN"
    assert variables["TOKENIZERS_PARALLELISM"] == "true"
    assert "HF_TOKEN" not in variables
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    variables = get_ppo_ray_runtime_env()["env_vars"]
    assert (variables["NCCL_DEBUG"], variables["HF_ENDPOINT"]) == ("INFO", "http://mirror")
