"""AgentLoopWorker: a process that runs agents' loops, many at a time in one event loop, each trajectory on its own."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np

from verl.agent.answering import Answering, AskedRow, empty_experts, trained_rows
from verl.agent.dispatch import SPLIT_ROWS
from verl.agent.loop import AgentLoopBase, LoopSpec, find_loop
from verl.agent.stream import Finished, TrajectoryStream
from verl.agent.tool_files import ToolFiles
from verl.agent.toolbox import Toolbox
from verl.config import PPOConfig, as_config
from verl.models.loading import read_config
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.handle import RankHandle
from verl.types.request import Output
from verl.types.trajectory import Trajectory
from verl.utils.code_runner import CodeSettings, configure
from verl.utils.end_tokens import find_end_tokens
from verl.utils.fs import resolve_model_path
from verl.utils.progress import expect
from verl.utils.tokenizer import hf_processor, hf_tokenizer

__all__ = ["AgentLoopWorker"]


class AgentLoopWorker(Worker):
    """One of `rollout.agent.num_workers` processes. Its event loop lives as long as it does: tools keep connections."""

    def __init__(self, config: Any, loops: Mapping[str, LoopSpec], tools: ToolFiles | None = None) -> None:
        """`loops` are the entries of `agent_loop_config_path`; `tools` what tools and simulated users are made of."""
        self.config = as_config(PPOConfig, config)
        self.rollout_config = self.config.actor_rollout_ref.rollout
        model = self.config.actor_rollout_ref.model
        folder = resolve_model_path(model.path, "actor_rollout_ref.model.path")
        self.tokenizer = hf_tokenizer(folder, trust_remote_code=model.trust_remote_code)
        self.processor = hf_processor(folder, trust_remote_code=model.trust_remote_code)
        config_of_model = read_config(folder, model.trust_remote_code, model.override_config)
        self.vocabulary: int = config_of_model.get_text_config().vocab_size
        template, stops = self.config.data.apply_chat_template_kwargs, self.rollout_config.stop_token_ids
        self.end_tokens = find_end_tokens(folder, config_of_model, self.tokenizer, template, stops)
        self._no_experts = empty_experts(self.config)
        self._loops = dict(loops)
        self._ready: set[type[AgentLoopBase]] = set()
        self._running: asyncio.Task[Any] | None = None
        self._finished: deque[tuple[int, np.ndarray]] = deque()
        self._stream: TrajectoryStream | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agent-loops", daemon=True).start()
        configure(CodeSettings.of(self.config.sandbox, self.config.sandbox_fusion))
        self.toolbox = Toolbox.load(self.rollout_config.multi_turn, tools)
        # What is wrong with the tools or the loop is said now.
        asyncio.run_coroutine_threadsafe(self.toolbox.check(), self._loop).result()
        self.loop_class(self.rollout_config.agent.default_agent_loop)

    @register(dispatch_mode=SPLIT_ROWS)
    def generate_sequences(self, prompts: DataProto, replicas: Sequence[RankHandle]) -> DataProto:
        """A trajectory for every row, all of a trajectory's rows together, in order.

        `replicas` are the engine's copies, between `begin_generation` and `end_generation`. Reads what
        `BaseRollout.generate_sequences` reads; with `tell_finished` in meta_info, `finished_samples` says who is done.
        """
        if not len(prompts):
            return DataProto()
        expect(len(prompts))
        self._finished = deque()
        meta, progress = prompts.meta_info, self._progress

        def done(row: AskedRow, trajectory: Trajectory) -> None:
            progress.tick()
            if trajectory.status == "finished" and trajectory.score is None and meta.get("tell_finished"):
                self._finished.append((int(row.columns["row"]), trajectory.last_tokens))

        answering = Answering(self, meta, replicas, done)
        rows = answering.asked(prompts)
        try:
            asyncio.run_coroutine_threadsafe(self._run(answering, rows), self._loop).result()
        except CancelledError:
            self.check_cancelled()
            raise
        finally:
            self._finished = deque()  # what nobody has asked for is of this generation alone
        trajectories = [row.made for row in rows if row.made is not None]
        width, pad = prompts.batch["input_ids"].shape[1], self.tokenizer.pad_token_id
        return trained_rows(trajectories, width, answering.params, meta, pad, self._no_experts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def cancel(self) -> bool:
        """As of every worker; trajectories end where they wait."""
        cancelled = super().cancel()
        if cancelled and (running := self._running) is not None:
            self._loop.call_soon_threadsafe(running.cancel)
        return cancelled

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def close(self) -> None:
        """At the end of a run: tools release what they still hold, and MCP servers of its own end."""
        asyncio.run_coroutine_threadsafe(self.toolbox.close(), self._loop).result()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def begin_stream(self, replicas: Sequence[RankHandle], meta: Mapping[str, Any]) -> None:
        """From here to `end_stream` rows are answered as they come; `meta` as `meta_info` of `generate_sequences`."""
        self.end_stream()
        self._stream = TrajectoryStream(self, meta, replicas, self._loop)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def add_rows(self, rows: DataProto, partials: Mapping[str, Output]) -> None:
        """Begin with these rows, some of them from what there is of their answers; `step` is in their meta_info."""
        if self._stream is not None:
            self._stream.add(rows, partials)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def collect_trajectories(self, within: float) -> Finished:
        """What has ended since this was last asked; waits so many seconds for something."""
        stream = self._stream
        return Finished([], 0, ended=True) if stream is None else stream.collect(within)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def renew_replicas(self, replicas: Sequence[RankHandle]) -> None:
        """Those of the stream's that were lost are there again, at these handles (one for each)."""
        if self._stream is not None:
            self._stream.renew(replicas)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def drop_trajectories(self, names: Sequence[str]) -> None:
        """End these; they are not told of."""
        if self._stream is not None:
            self._stream.drop(names)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def partial_answers(self) -> dict[str, Output]:
        """By trajectory, what there is of answers under way, which go on: enough for another process to do so."""
        return {} if self._stream is None else self._stream.partials()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def end_stream(self) -> None:
        """End what is left of it."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def finished_samples(self) -> list[tuple[int, np.ndarray]]:
        """Trajectories of the generation that runs, each told once: (its `row`, token ids of its last row)."""
        finished = self._finished
        return [finished.popleft() for _ in range(len(finished))]

    async def _run(self, answering: Answering, rows: Sequence[AskedRow]) -> None:
        self._running = asyncio.current_task()
        try:
            self.check_cancelled()  # a cancel that came before there was a task to end
            answering.open(self._loop)
            answering.add(rows)
            await answering.all_done()
        finally:
            self._running = None

    def loop_class(self, name: str) -> tuple[type[AgentLoopBase], Mapping[str, Any]]:
        """The class of a loop and its own keywords; the class is made ready when it is first asked for."""
        found, keywords = find_loop(name, self._loops)
        if found not in self._ready:
            shared = {"toolbox": self.toolbox, "end_token_ids": self.end_tokens.turn_ids}
            found.init_class(self.config, self.tokenizer, self.processor, **shared, **keywords)
            self._ready.add(found)
        return found, keywords
