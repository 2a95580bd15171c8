"""The main entry: `python -m verl.trainer.main_ppo key=value …` -> configuration -> Ray -> TaskRunner.

Neither torch nor ray is imported until the configuration is known to be right.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from verl.config import ConfigError, PPOConfig, batch_plan, load_config
from verl.config.command_line import hydra_arguments
from verl.config.load import Config
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

logger = logging.getLogger(__name__)


def main() -> None:
    """Compose the command line with Hydra and run; a wrong configuration lists every problem and exits with 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    typed = sys.argv[1:]
    sys.argv[1:] = hydra_arguments(typed)
    try:
        _main()
    finally:
        sys.argv[1:] = typed


@hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)
def _main(config: DictConfig) -> None:
    try:
        run_ppo(config)
    except (ConfigError, RayUnavailableError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def run_ppo(config: Config, task_runner_class: Any = None) -> None:
    """Check the configuration, start or join Ray, and wait for a TaskRunner (plain or Ray remote class) to finish."""
    config = load_config(config)
    for notice in config.notices:
        logger.warning(notice)
    logger.info(batch_plan(config).render())

    import ray

    if not ray.is_initialized():
        _start_ray(config)
    runner_class = TaskRunner if task_runner_class is None else task_runner_class
    if not hasattr(runner_class, "remote"):
        runner_class = ray.remote(num_cpus=1)(runner_class)
    runner = runner_class.remote()
    ray.get(runner.run.remote(config))


class TaskRunner:
    """Runs everything, as a Ray actor beside the driver; subclass it to change a part."""

    def run(self, config: PPOConfig) -> None:
        for module in config.external_libs:
            importlib.import_module(module)
        raise NotImplementedError("TaskRunner.run: training lands with the next issue; the configuration is valid.")


class RayUnavailableError(RuntimeError):
    """Ray could not be started or joined; the message says what to run."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Ray cannot start or join its cluster ({reason}). "
            "A stale cluster is the usual cause: run `ray stop`, then `ray start --head`, and try again."
        )


def _start_ray(config: PPOConfig) -> None:
    """Join the cluster that runs here, or start one."""
    import ray

    logger.info("Initializing Ray...")
    _check_cluster_answers(_known_cluster())
    num_cpus, runtime_env = config.ray_init.num_cpus, get_ppo_ray_runtime_env()
    try:
        try:
            ray.init(num_cpus=num_cpus, runtime_env=runtime_env)
        except ValueError:
            if num_cpus is None:
                raise
            # Ray refuses a number of CPUs for a cluster that is already running.
            ray.init(runtime_env=runtime_env)
            logger.warning("ray_init.num_cpus has no effect: a running Ray cluster was joined.")
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise RayUnavailableError((str(error).strip().splitlines() or [type(error).__name__])[0]) from error


def _known_cluster() -> str | None:
    """Address of the cluster that `ray.init` would join: the environment's, or the one noted by `ray start`."""
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    return note.read_text().strip() if note.is_file() else None


def _check_cluster_answers(address: str | None) -> None:
    """Ray itself would wait for minutes for a cluster that is gone."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise RayUnavailableError(f"nothing answers at {address}: {error}") from error


if __name__ == "__main__":
    main()
