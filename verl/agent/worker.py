"""AgentLoopWorker: a process that runs agent loops. AgentHost: its LoopHost, which runs them concurrently in one event
loop. An error fails only its trajectory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from verl.agent.loop import AgentLoopBase, LoopSpec, find_loop
from verl.agent.outputs import RowLimits, build_trajectory, derive_messages, failed_trajectory
from verl.agent.toolbox import Toolbox, ToolFiles
from verl.config import PPOConfig, as_config
from verl.config.layout import serves_reward_model
from verl.models.loading import read_config
from verl.protocol import DataProto
from verl.sandbox.code_runner import CodeSettings, configure
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    BatchShard,
    Dispatch,
    DispatchGroup,
    PerRank,
    join_results,
    register,
)
from verl.single_controller.base.worker_group import RankHandle
from verl.types.request import Output, output_since
from verl.types.trajectory import Trajectory
from verl.utils.end_tokens import find_end_tokens
from verl.utils.fs import resolve_model_path
from verl.utils.import_utils import describe_error
from verl.utils.progress import pulse
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.rollout.call_trace import CallTrace, tracing
from verl.workers.rollout.engine_client import EngineClient
from verl.workers.rollout.loop_host import LoopHost
from verl.workers.rollout.prompts import RolloutJob, RolloutTask, sampling_params
from verl.workers.rollout.training_rows import experts_template

__all__ = ["AgentHost", "AgentLoopWorker"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Interval of progress reports.
_PULSE_S = 1.0
# While trajectories run tools, the host reports progress until there was no change for this long. Only then can the
# trainer detect a hang.
_TOOL_WAIT_S = 3600.0


def _split_rows(group: DispatchGroup, data: DataProto, *others: Any) -> PerRank:
    """Consecutive rows for each rank, as evenly as possible, without filler rows: agents may have side effects. Other
    arguments go to all ranks."""
    if not len(data):
        raise ValueError("the batch is empty: it has no rows to split over the ranks.")
    edges = np.linspace(0, len(data), group.world_size + 1).round().astype(int)
    shards = [BatchShard(data[int(start) : int(end)]) for start, end in pairwise(edges)]
    return [shards, *([other] * group.world_size for other in others)], {}


_SPLIT_ROWS: Mapping[str, Callable[..., Any]] = {"dispatch_fn": _split_rows, "collect_fn": join_results}


class AgentLoopWorker(Worker):
    """One of `rollout.agent.num_workers` processes. It has one event loop for its lifetime, so that tools can keep
    connections open between batches."""

    def __init__(self, config: Any, loops: Mapping[str, LoopSpec], tools: ToolFiles | None = None) -> None:
        """`loops`: entries of `agent_loop_config_path`. `tools`: files that define tools and simulated users."""
        self.config = as_config(PPOConfig, config)
        self.rollout_config = self.config.actor_rollout_ref.rollout
        model = self.config.actor_rollout_ref.model
        folder = resolve_model_path(model.path, "actor_rollout_ref.model.path")
        self.tokenizer = hf_tokenizer(folder, trust_remote_code=model.trust_remote_code)
        self.processor = hf_processor(folder, trust_remote_code=model.trust_remote_code)
        model_config = read_config(folder, model.trust_remote_code, model.override_config)
        self.vocabulary: int = model_config.get_text_config().vocab_size
        template, stops = self.config.data.apply_chat_template_kwargs, self.rollout_config.stop_token_ids
        self.end_tokens = find_end_tokens(folder, model_config, self.tokenizer, template, stops)
        self._get_experts_template = partial(experts_template, model, self.rollout_config)
        self._loops = dict(loops)
        self._initialized: set[type[AgentLoopBase]] = set()
        self.host: AgentHost | None = None
        """Executes rollout jobs of the trainer's RolloutManager."""
        self._batch_host: AgentHost | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agent-loops", daemon=True).start()
        configure(CodeSettings.from_config(self.config.sandbox, self.config.sandbox_fusion))
        self.toolbox = Toolbox.load(self.rollout_config.multi_turn, tools)
        # Report invalid tools or loops at start.
        asyncio.run_coroutine_threadsafe(self.toolbox.check(), self._loop).result()
        self.loop_class(self.rollout_config.agent.default_agent_loop)

    @register(dispatch_mode=_SPLIT_ROWS)
    def generate_sequences(self, prompts: DataProto, replicas: Sequence[RankHandle]) -> DataProto:
        """Generate one batch: a trajectory per row, in order; the rows of a trajectory are adjacent.

        `replicas`: engines with open generation (see `begin_generation`). Reads the same columns as
        `BaseRollout.generate_sequences`. The trainer calls it only if a subclass (`agent.agent_loop_manager_class`)
        overrides it, in `trainer.mode=sync`; otherwise rows go to `host`.
        """
        if not len(prompts):
            return DataProto()
        host = self._batch_host = AgentHost(self, replicas, self._loop, self._get_experts_template)
        try:
            self.check_cancelled()  # `cancel` may have been called before the host existed
            return host.generate_batch(prompts)
        finally:
            self._batch_host = None
            host.close()
            self.check_cancelled()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def cancel(self) -> bool:
        """Cancel the running call, as in every worker; its trajectories are cancelled."""
        cancelled = super().cancel()
        if cancelled and (host := self._batch_host) is not None:
            host.interrupt()
        return cancelled

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def open_host(self, replicas: Sequence[RankHandle]) -> str:
        """Open `host` for rollout jobs, or reconnect an open host to restarted replicas; return its id."""
        if self.host is None or self.host.closed:
            self.host = AgentHost(self, replicas, self._loop, self._get_experts_template)
        else:
            self.host.renew_replicas(replicas)
        return self.host.id

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def close_host(self) -> None:
        """End the jobs of `host`."""
        if self.host is not None:
            self.host.close()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def close(self) -> None:
        """Call this at the end of a run: it releases the tools and stops MCP servers that the worker started."""
        asyncio.run_coroutine_threadsafe(self.toolbox.close(), self._loop).result()

    def loop_class(self, name: str) -> tuple[type[AgentLoopBase], Mapping[str, Any]]:
        """The class of a loop and the keywords of its configuration entry. Calls `init_class` on first use."""
        cls, keywords = find_loop(name, self._loops)
        if cls not in self._initialized:
            shared = {"toolbox": self.toolbox, "end_token_ids": self.end_tokens.turn_ids}
            cls.init_class(self.config, self.tokenizer, self.processor, **shared, **keywords)
            self._initialized.add(cls)
        return cls, keywords


class AgentHost(LoopHost):
    """Runs one coroutine per row, which generates with a shared EngineClient."""

    thread_name, passes_columns = "agent-loops", True

    def __init__(
        self,
        worker: AgentLoopWorker,
        replicas: Sequence[RankHandle],
        loop: asyncio.AbstractEventLoop,
        get_experts_template: Callable[[], np.ndarray | None],
    ) -> None:
        """`replicas`: the leading rank of each engine replica. `loop`: an event loop that runs in another thread."""
        rollout, ends = worker.rollout_config, worker.end_tokens
        super().__init__(rollout, ends.ids, worker.tokenizer.pad_token_id, get_experts_template)
        self._worker, self._loop = worker, loop
        self._scored_by_model = worker.config.reward_model.enable and not serves_reward_model(worker.config)
        self._running: dict[RolloutTask, asyncio.Task[None]] = {}
        self._traces: dict[RolloutTask, CallTrace] = {}
        self._failures: Counter[str] = Counter()
        self._last_change = time.monotonic()
        self._active = 0
        self._run(self._open(replicas))

    async def _open(self, replicas: Sequence[RankHandle]) -> None:
        worker, rollout = self._worker, self._worker.rollout_config
        params = sampling_params(rollout, {}, worker.end_tokens.ids)
        client = f"{worker.rank}-{self.id[:8]}"
        self._client = EngineClient(
            replicas,
            params,
            rollout.max_model_len,
            client,
            self._loop,
            self._on_replica_lost,
            worker.rank,
            worker.vocabulary,
        )
        self._slots = asyncio.Semaphore(rollout.agent.max_concurrent_requests)
        self._pulsing = asyncio.create_task(self._keep_pulsing())

    def renew_replicas(self, replicas: Sequence[RankHandle]) -> None:
        """Reconnect to replicas that were restarted (one handle per replica)."""
        self._run(self._renew(replicas))

    async def _renew(self, replicas: Sequence[RankHandle]) -> None:
        self._client.reconnect(replicas)

    def interrupt(self) -> None:
        """End all jobs like `close`, but do not wait for the clean-up of tools."""
        super().close()

    def close(self) -> None:
        """End all jobs and wait until the tools of their trajectories are released."""
        self.interrupt()
        self._run(self._end())

    async def _end(self) -> None:
        for task, running in self._running.items():
            if not task.cancelled:  # a second cancellation would interrupt the clean-up of tools
                task.cancelled = running.cancel()
        self._pulsing.cancel()
        await asyncio.gather(*self._running.values(), self._pulsing, return_exceptions=True)
        self._client.close()

    # ---------------------------------------------------------------- trajectories

    def _begin(self, job: RolloutJob, tasks: Sequence[RolloutTask]) -> None:
        names = {self._agent_name(task) for task in tasks}
        for name in sorted(names):
            self._worker.loop_class(name)  # raises for an unknown loop
        self._run(self._create(job, tasks))

    async def _create(self, job: RolloutJob, tasks: Sequence[RolloutTask]) -> None:
        for task in tasks:
            if not (self._closed or task.cancelled):
                running = self._running[task] = asyncio.create_task(self._trajectory(job, task))
                running.add_done_callback(partial(self._on_done, job, task))

    def _on_done(self, job: RolloutJob, task: RolloutTask, running: asyncio.Task[None]) -> None:
        self._running.pop(task)
        self._traces.pop(task, None)
        error = None if running.cancelled() else running.exception()
        if error is not None and not (task.cancelled or self._closed):
            logger.error("the failure of trajectory %s could not be recorded", task.name, exc_info=error)
            self._on_finished(
                job, task, _failed_trajectory(job, task, _new_trace(job, task), RuntimeError(type(error).__name__))
            )

    def _abort(self, tasks: Sequence[RolloutTask]) -> None:
        if tasks:
            self._run(self._cancel(tasks))

    async def _cancel(self, tasks: Sequence[RolloutTask]) -> None:
        for task in tasks:
            if (running := self._running.get(task)) is not None:
                running.cancel()

    async def _trajectory(self, job: RolloutJob, task: RolloutTask) -> None:
        """Run the agent loop of a task and report its trajectory; if the loop fails, a failed trajectory."""
        worker, row = self._worker, task.trajectory
        trace = self._traces[task] = _new_trace(job, task)
        trace.max_response, trace.params, trace.prompt_ids = task.limit, job.params, task.prompt_ids
        if task.partial is not None:
            trace.set_partial(task.prompt_ids, task.partial)
        async with self._slots:
            self._active += 1
            try:
                with tracing(trace):
                    cls, keywords = worker.loop_class(self._agent_name(task))
                    agent = cls(
                        config=worker.config,
                        rollout_config=worker.rollout_config,
                        server_manager=self._client,
                        tokenizer=worker.tokenizer,
                        processor=worker.processor,
                        toolbox=worker.toolbox,
                        loop=self._loop,
                        **keywords,
                    )
                    outputs = await agent.run(_loop_params(job, task), **_loop_columns(job, task))
                limits = RowLimits(task.limit, worker.rollout_config.max_model_len)
                trajectory = build_trajectory(outputs, trace, row.uid, row.sample_index, limits)
                self._set_messages(trajectory, task, trace)
            except BaseException as error:  # also sys.exit(); fails only this trajectory; counted in metrics
                if self._closed or task.cancelled or isinstance(error, GeneratorExit):
                    raise
                trajectory = self._failed(job, task, trace, error)
            finally:
                self._active -= 1
        self._last_change = time.monotonic()
        if not task.cancelled:  # a loop may return in spite of a cancellation
            self._on_finished(job, task, trajectory)

    def _finished_trajectory(self, job: RolloutJob, task: RolloutTask) -> Trajectory:
        trajectory: Trajectory = task.result
        return trajectory

    def _agent_name(self, task: RolloutTask) -> str:
        return str(task.columns.get("agent_name", self._worker.rollout_config.agent.default_agent_loop))

    def _set_messages(self, trajectory: Trajectory, task: RolloutTask, trace: CallTrace) -> None:
        """Complete the rows' conversations if a reward model scores the run; otherwise drop them."""
        chat = task.columns.get("raw_prompt")
        prompts = {} if chat is None else {tuple(task.prompt_ids): chat}
        for row in trajectory.rows:
            if not self._scored_by_model:
                row.messages = None
            elif row.messages is None and chat is not None:
                row.messages = derive_messages(row, prompts, trace.rendered_messages, self._worker.tokenizer)

    def _failed(self, job: RolloutJob, task: RolloutTask, trace: CallTrace, error: BaseException) -> Trajectory:
        kind = describe_error(error)
        if not self._failures[kind]:
            logger.warning("agent loop of trajectory %s failed: %s", task.name, kind, exc_info=error)
        self._failures[kind] += 1
        return _failed_trajectory(job, task, trace, error)

    # ---------------------------------------------------------------- partial outputs

    def _new_partials(self, job: RolloutJob) -> dict[str, Output]:
        traces = self._first_calls(job)
        outputs = self._run(self._reported_outputs(list(traces)))
        new = {}
        for trace, output in outputs.items():
            task = traces[trace]
            if len(output.token_ids) > task.reported:
                new[task.name] = output_since(output, task.reported, len(task.prompt_ids))
                task.reported = len(output.token_ids)
        return new

    def _current_outputs(self, job: RolloutJob) -> dict[str, Output]:
        traces = self._first_calls(job)
        outputs = self._run(self._client.current_first_outputs(list(traces)))
        return {traces[trace].name: output for trace, output in outputs.items()}

    async def _reported_outputs(self, traces: Sequence[CallTrace]) -> dict[CallTrace, Output]:
        return self._client.first_outputs(traces)

    def _first_calls(self, job: RolloutJob) -> dict[CallTrace, RolloutTask]:
        """Traces and tasks of trajectories without a finished model call."""
        with self._changed:
            tasks = list(job.unfinished.values())
        return {trace: task for task in tasks if (trace := self._traces.get(task)) is not None and not trace.calls}

    # ---------------------------------------------------------------- event loop

    def _on_replica_lost(self, reason: str) -> None:
        with self._changed:
            self._lost_replica = self._lost_replica or reason
            self._changed.notify_all()

    async def _keep_pulsing(self) -> None:
        """Report progress while a trajectory waits for something other than the model, for example a tool."""
        generating = -1
        while True:
            await asyncio.sleep(_PULSE_S)
            if self._client.generating != generating:
                generating, self._last_change = self._client.generating, time.monotonic()
            if self._active > self._client.generating and time.monotonic() - self._last_change < _TOOL_WAIT_S:
                pulse()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _new_trace(job: RolloutJob, task: RolloutTask) -> CallTrace:
    return CallTrace.for_sample(job.seed, task.step, task.trajectory.uid, task.trajectory.sample_index)


def _failed_trajectory(job: RolloutJob, task: RolloutTask, trace: CallTrace, error: BaseException) -> Trajectory:
    row = task.trajectory
    return failed_trajectory(error, trace, row.uid, row.sample_index, task.prompt_ids, job.params.max_new_tokens)


def _loop_params(job: RolloutJob, task: RolloutTask) -> dict[str, Any]:
    """The job's sampling parameters as argument of `AgentLoopBase.run`, which may change them."""
    params = job.params
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "do_sample": task.sampled,
        "max_new_tokens": task.limit,
        "stop": list(params.stop),
        "stop_token_ids": sorted(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "logprobs": True,
    }


def _loop_columns(job: RolloutJob, task: RolloutTask) -> dict[str, Any]:
    """The row's columns as keyword arguments of `AgentLoopBase.run`."""
    columns = {name: value for name, value in task.columns.items() if name != "sampling_params"}
    if columns.get("raw_prompt") is not None:
        columns["raw_prompt"] = list(columns["raw_prompt"])
    return columns | {
        "prompt_ids": task.prompt_ids,
        "uid": task.trajectory.uid,
        "sample_index": task.trajectory.sample_index,
        "step": task.step,
        "validate": bool(job.meta.get("validate")),
    }
