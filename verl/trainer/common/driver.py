"""The driver of RL training: run the TaskRunner as a Ray actor, show its progress and handle stop signals."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from verl.config import PPOConfig
from verl.config.layout import active_roles
from verl.trainer.common.ray_cluster import start_ray, wait_for_nodes
from verl.trainer.common.run_status import progress_bar
from verl.trainer.recovery.preemption import PREEMPTION_SIGNALS
from verl.trainer.recovery.ray_monitor import ControllerMonitor, RayProcesses, await_controller
from verl.trainer.recovery.signals import (
    FINISH_STEP,
    RUN_ENDED,
    StopRequest,
    before_first_step,
    exit_on_signals,
    stop_on_signals,
)
from verl.trainer.recovery.supervised_process import previous_attempts
from verl.utils.exceptions import annotate_error
from verl.utils.process_tree import with_descendants
from verl.utils.stacks import enable_stack_dumps


def run_on_ray(config: PPOConfig, runner_class: Any, head: Any, is_program: bool) -> str | None:
    """Run the TaskRunner. Returns the signal that stopped the run and what was given up for it; None: it finished.

    `is_program`: nothing follows the run in this process. A Ray cluster started here is then shut down, so that no
    actor output follows the last log line.
    """
    import ray

    starts_ray = not ray.is_initialized()
    with before_first_step():
        processes, runner = _start_runner(config, runner_class, head)
    enable_stack_dumps()
    monitor = ControllerMonitor(runner, processes, config.trainer.hang_timeout)
    stopping: AbstractContextManager[StopRequest] = nullcontext(StopRequest())
    if hasattr(runner, "request_stop"):
        request, within = StopRequest(), config.trainer.save_within
        message = FINISH_STEP if within is None else f"stopping: saved first, if it can be in {within:g} s"
        is_starting = monitor.before_first_step if starts_ray else lambda: False
        stopping = stop_on_signals(
            lambda: _request_stop(runner, request.signal), processes.kill, message, request, is_starting
        )
    with stopping as request, progress_bar(lambda: monitor.status):
        try:
            given_up = await_controller(runner.run.remote(config), processes, request, monitor.poll)
        except Exception as error:
            status = monitor.status
            if status is not None and status.phase:  # a phase that the error already has is kept
                annotate_error(error, phase=status.phase, step=status.step + 1)
            raise
    if is_program:
        exit_on_signals(RUN_ENDED)
    if starts_ray and (is_program or request.signal is not None):
        ray.shutdown()  # output of the run arrives at any time until then
        sys.stdout.flush()
    # Logged by the driver: the last output of an actor may be lost with Ray.
    return given_up if request.signal is not None and isinstance(given_up, str) else request.signal


def _start_runner(config: PPOConfig, runner_class: Any, head: Any) -> tuple[RayProcesses, Any]:
    """Start or join Ray, wait for the nodes and create the actor of `runner_class`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    processes = RayProcesses()
    if not ray.is_initialized():
        is_retry = previous_attempts() > 0
        num_cpus = config.ray_init.num_cpus if config.trainer.node_rank is None else None
        processes = start_ray(num_cpus, config.trainer.nodes_within if is_retry else 0, config.ray_init.start_timeout)
        if not processes:
            used = {config.role_mapping[role] for role in active_roles(config)}
            pools = [pool for name, pool in config.resource_pool_spec.items() if name in used]
            nodes = 1 if config.trainer.node_rank is None else config.trainer.nnodes
            wait_for_nodes(config.trainer, pools, is_retry, nodes)
    if not processes:
        pids = () if head is None else with_descendants(head.pid)
        processes = RayProcesses(pids, ray.get_runtime_context().gcs_address)
    if not hasattr(runner_class, "remote"):
        # Three threads: `run`, `request_stop` and `run_status`. On this node if it has room: others may come and go.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        runner_class = ray.remote(num_cpus=1, max_concurrency=3, scheduling_strategy=here)(runner_class)
    return processes, runner_class.remote()


def _request_stop(runner: Any, signal: str | None) -> None:
    if signal in PREEMPTION_SIGNALS and hasattr(runner, "preempt"):
        runner.preempt.remote(signal)
    else:
        runner.request_stop.remote()
