"""The driver of RL training: `python -m verl.trainer.main_ppo key=value …` -> configuration -> Ray -> TaskRunner.

Neither torch nor ray is imported before the configuration has been validated.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from omegaconf import DictConfig

from verl.config import PPOConfig, batch_plan
from verl.config.layout import active_roles
from verl.config.load import Config
from verl.trainer.common.command_line import command, console_mode, validated_config
from verl.trainer.common.nodes import ensure_head, is_worker_node, serve_as_node, start_head, stop_head
from verl.trainer.common.preflight import basic_preflight, check_code_runner, ppo_preflight
from verl.trainer.common.ray_cluster import start_or_join_ray
from verl.trainer.common.run_status import StatusSnapshot
from verl.trainer.common.status_display import ControllerOutput, show_status
from verl.trainer.ppo.task_runner import TaskRunner, create_rl_dataset, create_rl_sampler
from verl.trainer.recovery.exit_messages import attach_resume_hint, describe_resume, log_finished
from verl.trainer.recovery.ray_monitor import ControllerMonitor, RayProcesses, await_controller
from verl.trainer.recovery.signals import (
    FINISH_STEP,
    PREEMPTION_SIGNALS,
    RUN_ENDED,
    StopRequest,
    exit_on_signals,
    stop_on_signals,
)
from verl.trainer.recovery.supervised_process import before_first_step
from verl.trainer.recovery.supervisor import supervise, wants_supervision
from verl.utils.console import LINE, log_startup_phases, show_startup, startup_phase
from verl.utils.exceptions import annotate_error
from verl.utils.logging_setup import CurrentStderrHandler, messages_on_stderr, survive_lost_terminal
from verl.utils.stacks import enable_stack_dumps

__all__ = ["TaskRunner", "create_rl_dataset", "create_rl_sampler", "main", "run_ppo"]

logger = logging.getLogger(__name__)

# Maximum time to wait for the last output lines of a controller that failed; a controller that died writes none.
_ERROR_OUTPUT_S = 1.0


def main() -> None:
    """Train a model by reinforcement learning; an invalid configuration lists every problem and exits with 2."""
    survive_lost_terminal()
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[CurrentStderrHandler()])
    _main()


@command("ppo_trainer", sets_up_logging=False)
def _main(config: DictConfig) -> None:
    run_ppo(config, supervised=True)


@messages_on_stderr()
def run_ppo(config: Config, task_runner_class: Any = None, supervised: bool = False) -> None:
    """Check the configuration, start or join Ray, and wait for a TaskRunner (plain or Ray remote class) to finish.

    `supervised`: the run is executed by a child of this process, which restarts it when it dies (`trainer.max_restarts`
    times) and exits when it has ended. Code that follows the call in a script is executed by the child only.
    """
    runner_class = TaskRunner if task_runner_class is None else task_runner_class
    log_startup_phases(console_mode(config) == LINE)
    has_own_run = getattr(runner_class, "run", None) is not TaskRunner.run
    config = validated_config(config, PPOConfig, preflight=basic_preflight if has_own_run else ppo_preflight)
    logger.info(batch_plan(config).render())
    check_code_runner(config)

    if is_worker_node(config):
        return serve_as_node(config)
    with attach_resume_hint(config.trainer):
        if wants_supervision(config, supervised):
            attempt = supervise(config, lambda head: ensure_head(config, head), stop_head)
            stopped_by = run_on_ray(attempt.config, runner_class, attempt.head, supervised)
        else:
            with before_first_step():
                head = start_head(config)  # sets environment variables that Ray reads when it is imported
            try:
                stopped_by = run_on_ray(config, runner_class, head, supervised)
            finally:
                stop_head(head)
        if stopped_by is not None:
            logger.warning("stopped by %s; %s", stopped_by, describe_resume(config.trainer))
        elif not config.trainer.val_only:
            log_finished(config.trainer, "actor", merge_backend=_merge_backend(config))


def run_on_ray(config: PPOConfig, runner_class: Any, head: Any, is_program: bool) -> str | None:
    """Run the TaskRunner as a Ray actor, show its progress and handle stop signals. Returns None if the run has
    finished; else the signal that stopped it, or a message if a step was given up because of it.

    `head`: the Ray head that this process started, or None. `is_program`: the process ends after the run. If it does,
    or if a signal stopped the run, a Ray connection that this call opened is shut down, so that no actor output follows
    the last log line.
    """
    with before_first_step():
        import ray

        starts_ray = not ray.is_initialized()
        with show_startup(config.trainer.console == LINE), startup_phase("Ray"):
            processes = start_ray(config, head)
        output = ControllerOutput(_class_name(runner_class)) if config.trainer.console == LINE else None
        try:
            runner = create_runner(runner_class)
        except (KeyboardInterrupt, SystemExit):
            processes.kill()
            raise
    enable_stack_dumps()
    monitor = ControllerMonitor(runner, processes, config.trainer.hang_timeout)
    stopping: AbstractContextManager[StopRequest] = nullcontext(StopRequest())
    if hasattr(runner, "request_stop"):
        request, seconds = StopRequest(), config.trainer.save_within
        message = FINISH_STEP if seconds is None else f"stopping: the state is saved first if {seconds:g} s suffice"
        is_starting = monitor.before_first_step if starts_ray else lambda: False
        stopping = stop_on_signals(
            lambda: _request_stop(runner, request.signal), processes.kill, message, request, is_starting
        )
    with stopping as request, show_status(partial(_status, monitor, output), config.trainer.console):
        try:
            given_up = await_controller(runner.run.remote(config), processes, request, monitor.poll)
            if output is not None:
                output.wait_for_end()
        except Exception as error:
            if output is not None:
                output.wait_for_end(_ERROR_OUTPUT_S)
            status = monitor.status
            if status is not None and status.phase:  # an error that already has a phase keeps it
                annotate_error(error, phase=status.phase, step=status.step + 1)
            raise
    if is_program:
        exit_on_signals(RUN_ENDED)
    if starts_ray and (is_program or request.signal is not None):
        ray.shutdown()  # output of the run arrives at any time until then
        sys.stdout.flush()
    # The caller logs this value, because the last output of the actor may be lost when Ray is shut down.
    return given_up if request.signal is not None and isinstance(given_up, str) else request.signal


def _status(monitor: ControllerMonitor, output: ControllerOutput | None) -> StatusSnapshot | None:
    """Return the last status of the controller. If it has reported none: an empty status once it has written output,
    else None."""
    has_started = output is not None and output.has_started
    return monitor.status or (StatusSnapshot(0, 0) if has_started else None)


def start_ray(config: PPOConfig, head: Any) -> RayProcesses:
    trainer = config.trainer
    used = {config.role_mapping[role] for role in active_roles(config)}
    pools = [pool for name, pool in config.resource_pool_spec.items() if name in used]
    has_own_head = trainer.node_rank is not None
    return start_or_join_ray(
        trainer,
        pools,
        nodes=trainer.nnodes if has_own_head else 1,
        num_cpus=None if has_own_head else config.ray_init.num_cpus,
        start_timeout=config.ray_init.start_timeout,
        head_pid=None if head is None else head.pid,
    )


def create_runner(runner_class: Any) -> Any:
    """Return an actor of this class, plain or remote."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not hasattr(runner_class, "remote"):
        # Three threads: `run`, `request_stop` and `run_status`. Preferably on this node, since other nodes may be lost.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        runner_class = ray.remote(num_cpus=1, max_concurrency=3, scheduling_strategy=here)(runner_class)
    return runner_class.remote()


def _merge_backend(config: PPOConfig) -> str | None:
    """Return the `--backend` of the model merger for the actor's checkpoints; None if no next commands are logged."""
    strategy = config.actor_rollout_ref.actor.strategy
    return ("megatron" if strategy == "megatron" else "fsdp") if config.trainer.console == LINE else None


def _class_name(runner_class: Any) -> str:
    """Return the name that Ray gives to actors of this class, plain or remote."""
    metadata = getattr(runner_class, "__ray_metadata__", None)
    return str(runner_class.__name__ if metadata is None else metadata.class_name)


def _request_stop(runner: Any, signal: str | None) -> None:
    if signal in PREEMPTION_SIGNALS and hasattr(runner, "preempt"):
        runner.preempt.remote(signal)
    else:
        runner.request_stop.remote()


def __getattr__(name: str) -> Any:
    """Load `RewardManager` and `_select_rm_score_fn`, which older scripts import from here, on access."""
    if name == "RewardManager":
        from verl.workers.reward_manager import NaiveRewardManager

        return NaiveRewardManager
    if name == "_select_rm_score_fn":
        from verl.utils.reward_score import _select_rm_score_fn

        return _select_rm_score_fn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    main()
