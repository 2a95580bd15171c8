"""AgentHost: a LoopHost that runs agent loops concurrently in one event loop. An error fails only its trajectory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from verl.agent.loop import AgentLoopBase
from verl.agent.outputs import RowLimits, build_trajectory, failed_trajectory
from verl.config import PPOConfig, RolloutConfig
from verl.config.layout import serves_reward_model
from verl.single_controller.base.worker_group import RankHandle
from verl.types.request import Output, output_since
from verl.types.trajectory import Row, Trajectory
from verl.utils.end_tokens import EndTokens
from verl.utils.progress import pulse
from verl.workers.rollout.call_trace import CallTrace, tracing
from verl.workers.rollout.engine_client import EngineClient
from verl.workers.rollout.loop_host import LoopHost
from verl.workers.rollout.prompts import RolloutJob, RolloutTask, sampling_params

__all__ = ["AgentHost", "LoopContext", "derive_messages"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]

# Interval of progress reports.
_PULSE_S = 1.0
# While trajectories run tools, the host reports progress for this long after the last change: a hang is reported later.
_TOOL_WAIT_S = 3600.0


class LoopContext(Protocol):
    """Objects shared by all trajectories of a loop worker."""

    config: PPOConfig
    rollout_config: RolloutConfig
    tokenizer: Any
    processor: Any
    toolbox: Any
    vocabulary: int
    end_tokens: EndTokens

    @property
    def rank(self) -> int: ...

    def loop_class(self, name: str) -> tuple[type[AgentLoopBase], Mapping[str, Any]]:
        """The class of a loop and the keywords of its configuration entry."""


class AgentHost(LoopHost):
    """Runs one coroutine per row, which generates with a shared EngineClient."""

    thread_name, passes_columns = "agent-loops", True

    def __init__(
        self,
        context: LoopContext,
        replicas: Sequence[RankHandle],
        loop: asyncio.AbstractEventLoop,
        no_experts: Callable[[], np.ndarray | None] = lambda: None,
    ) -> None:
        """`replicas`: the leading rank of each engine replica. `loop`: an event loop that runs in another thread."""
        rollout, ends = context.rollout_config, context.end_tokens
        super().__init__(rollout, ends.ids, context.tokenizer.pad_token_id, no_experts)
        self._context, self._loop = context, loop
        self._scored_by_model = context.config.reward_model.enable and not serves_reward_model(context.config)
        self._running: dict[RolloutTask, asyncio.Task[None]] = {}
        self._traces: dict[RolloutTask, CallTrace] = {}
        self._failures: Counter[str] = Counter()
        self._last_change = time.monotonic()
        self._active = 0
        self._run(self._open(replicas))

    async def _open(self, replicas: Sequence[RankHandle]) -> None:
        context, rollout = self._context, self._context.rollout_config
        params = sampling_params(rollout, {}, context.end_tokens.ids)
        client = f"{context.rank}-{self.id[:8]}"
        self._client = EngineClient(
            replicas,
            params,
            rollout.max_model_len,
            client,
            self._loop,
            self._on_replica_lost,
            context.rank,
            context.vocabulary,
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
            self._context.loop_class(name)  # raises for an unknown loop
        self._run(self._create(job, tasks))

    async def _create(self, job: RolloutJob, tasks: Sequence[RolloutTask]) -> None:
        for task in tasks:
            if not (self._closed or task.cancelled):
                running = self._running[task] = asyncio.create_task(self._trajectory(job, task))
                running.add_done_callback(partial(self._on_done, task))

    def _on_done(self, task: RolloutTask, running: asyncio.Task[None]) -> None:
        self._running.pop(task)
        self._traces.pop(task, None)
        if not running.cancelled():
            running.exception()  # marks the exception as retrieved: asyncio would log it otherwise

    def _abort(self, tasks: Sequence[RolloutTask]) -> None:
        if tasks:
            self._run(self._cancel(tasks))

    async def _cancel(self, tasks: Sequence[RolloutTask]) -> None:
        for task in tasks:
            if (running := self._running.get(task)) is not None:
                running.cancel()

    async def _trajectory(self, job: RolloutJob, task: RolloutTask) -> None:
        """Run the agent loop of a task and report its trajectory; if the loop fails, a failed trajectory."""
        context, row = self._context, task.trajectory
        trace = self._traces[task] = CallTrace.for_sample(job.seed, task.step, row.uid, row.sample_index)
        trace.max_response, trace.params, trace.prompt_ids = task.limit, job.params, task.prompt_ids
        if task.partial is not None:
            trace.set_partial(task.prompt_ids, task.partial)
        async with self._slots:
            self._active += 1
            try:
                with tracing(trace):
                    cls, keywords = context.loop_class(self._agent_name(task))
                    agent = cls(
                        config=context.config,
                        rollout_config=context.rollout_config,
                        server_manager=self._client,
                        tokenizer=context.tokenizer,
                        processor=context.processor,
                        toolbox=context.toolbox,
                        loop=self._loop,
                        **keywords,
                    )
                    outputs = await agent.run(_loop_params(job, task), **_loop_columns(job, task))
                limits = RowLimits(task.limit, context.rollout_config.max_model_len)
                trajectory = build_trajectory(outputs, trace, row.uid, row.sample_index, limits)
                self._set_messages(trajectory, task, trace)
            except (Exception, asyncio.CancelledError) as error:  # fails only this trajectory; counted in metrics
                if self._closed or task.cancelled:
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
        return str(task.columns.get("agent_name", self._context.rollout_config.agent.default_agent_loop))

    def _set_messages(self, trajectory: Trajectory, task: RolloutTask, trace: CallTrace) -> None:
        """Complete the rows' conversations if a reward model scores the run; otherwise drop them."""
        chat = task.columns.get("raw_prompt")
        prompts = {} if chat is None else {tuple(task.prompt_ids): chat}
        for row in trajectory.rows:
            if not self._scored_by_model:
                row.messages = None
            elif row.messages is None and chat is not None:
                row.messages = derive_messages(row, prompts, trace.rendered_messages, self._context.tokenizer)

    def _failed(self, job: RolloutJob, task: RolloutTask, trace: CallTrace, error: BaseException) -> Trajectory:
        kind = f"{type(error).__name__}: {error}"
        if not self._failures[kind]:
            logger.warning("agent loop of trajectory %s failed: %s", task.name, kind, exc_info=error)
        self._failures[kind] += 1
        row = task.trajectory
        return failed_trajectory(error, trace, row.uid, row.sample_index, task.prompt_ids, job.params.max_new_tokens)

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


def derive_messages(
    row: Row, prompts: Mapping[tuple[int, ...], Messages], rendered: Mapping[tuple[int, ...], Messages], tokenizer: Any
) -> list[dict[str, Any]]:
    """The messages of a row up to the model's last response, derived from its tokens. Reward models with their own chat
    template need them if the loop did not return `AgentLoopOutput.messages`.

    `prompts` and `rendered` map token ids to messages: of the data's prompts, and of calls of the loop's
    `apply_chat_template`. An unknown prompt becomes one user message; replies with unknown tokens become part of the
    surrounding response.
    """

    def text(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    start = tuple(int(token) for token in row.prompt_ids)
    prompt = {**rendered, **prompts}.get(start, [{"role": "user", "content": text(start)}])
    messages = [dict(message) for message in prompt]
    last = max((index for index, turn in enumerate(row.turns) if turn.source == "model"), default=-1)
    response: list[int] = []
    for turn in row.turns[: last + 1]:
        token_ids = tuple(int(token) for token in turn.token_ids)
        replies = None if turn.source == "model" else rendered.get(token_ids)
        if replies is None:
            response += token_ids
        else:
            messages += [{"role": "assistant", "content": text(response)}, *(dict(reply) for reply in replies)]
            response = []
    return [*messages, {"role": "assistant", "content": text(response)}]
