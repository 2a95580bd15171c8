"""AgentLoopWorker: a process that runs agents' loops, many at a time in one event loop, each trajectory on its own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np

from verl.agent.dispatch import SPLIT_ROWS
from verl.agent.loop import AgentLoopBase, LoopSpec, find_loop
from verl.agent.outputs import Limits, failed_trajectory, trajectory_of
from verl.agent.record import Record, recording
from verl.agent.replicas import EngineLost, Replica
from verl.agent.server_manager import ServerManager
from verl.agent.tool_files import ToolFiles
from verl.agent.toolbox import Toolbox
from verl.config import PPOConfig, as_config
from verl.models.loading import read_config
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.handle import RankHandle
from verl.types.request import SamplingParams
from verl.types.trajectory import Trajectory
from verl.utils.code_runner import CodeSettings, configure
from verl.utils.fs import resolve_model_path
from verl.utils.progress import Progress, expect, pulse
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.rollout.output import rows_from_trajectories
from verl.workers.rollout.prompts import answer_limits, sampling_params, trajectories_from_prompts

__all__ = ["AgentLoopWorker"]

logger = logging.getLogger(__name__)

_PULSE_S = 1.0
# Whoever waits for something else than an answer, a tool, may do so for this long; then the watch for hangs decides.
_PATIENCE_S = 3600.0


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
        self._loops = dict(loops)
        self._ready: set[type[AgentLoopBase]] = set()
        self._running: asyncio.Task[Any] | None = None
        self._finished: deque[tuple[int, np.ndarray]] = deque()
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
        batch = _Batch(self, prompts, replicas)
        try:
            asyncio.run_coroutine_threadsafe(self._run(batch), self._loop).result()
        except CancelledError:
            self.check_cancelled()
            raise
        finally:
            self._finished = deque()  # what nobody has asked for is of this generation alone
        return batch.rows()

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
    def finished_samples(self) -> list[tuple[int, np.ndarray]]:
        """Trajectories of the generation that runs, each told once: (its `row`, token ids of its last row)."""
        finished = self._finished
        return [finished.popleft() for _ in range(len(finished))]

    async def _run(self, batch: _Batch) -> None:
        self._running = asyncio.current_task()
        try:
            self.check_cancelled()  # a cancel that came before there was a task to end
            await batch.run(self._loop)
        finally:
            self._running = None

    def loop_class(self, name: str) -> tuple[type[AgentLoopBase], Mapping[str, Any]]:
        """The class of a loop and its own keywords; the class is made ready when it is first asked for."""
        found, keywords = find_loop(name, self._loops)
        if found not in self._ready:
            found.init_class(self.config, self.tokenizer, self.processor, toolbox=self.toolbox, **keywords)
            self._ready.add(found)
        return found, keywords

    def tell_finished(self, row: int, trajectory: Trajectory) -> None:
        """For whoever scores while others are still under way."""
        turns = trajectory.rows[-1].turns
        tokens = np.concatenate([np.empty(0, np.int32), *(np.asarray(turn.token_ids, np.int32) for turn in turns)])
        self._finished.append((row, tokens))


class _Batch:
    """Rows that are being answered. All but the constructor and `rows` is for the event loop's thread."""

    def __init__(self, worker: AgentLoopWorker, prompts: DataProto, replicas: Sequence[RankHandle]) -> None:
        self._worker, self._prompts, self._handles = worker, prompts, replicas
        rollout, meta = worker.rollout_config, prompts.meta_info
        self._params = sampling_params(rollout, meta, [worker.tokenizer.eos_token_id])
        self._seed = rollout.seed if meta.get("seed") is None else int(meta["seed"])
        self._started = trajectories_from_prompts(prompts)
        self._limits = answer_limits(prompts, self._started, self._params.max_new_tokens)
        # Names that are wrong fail the call, not their trajectories.
        self._names = [str(name) for name in prompts.non_tensor_batch.get("agent_name", [])]
        self._names = self._names or [rollout.agent.default_agent_loop] * len(prompts)
        self._classes = {name: worker.loop_class(name) for name in dict.fromkeys(self._names)}
        self._trajectories: list[Trajectory | None] = [None] * len(prompts)
        self._failures: Counter[str] = Counter()
        self._progress: Progress = worker._progress
        self._moved = time.monotonic()
        self._active = 0
        self._ending = False
        self.lost: str | None = None

    async def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Returns when every trajectory has ended; raises EngineLost when none can go on."""
        client = f"{self._worker.rank}-{uuid.uuid4().hex[:8]}"
        replicas = [Replica(handle, client, loop, self._lose) for handle in self._handles]
        rollout = self._worker.rollout_config
        first, vocabulary = self._worker.rank, self._worker.vocabulary
        manager = ServerManager(replicas, self._params, rollout.max_model_len, client, first, vocabulary)
        slots = asyncio.Semaphore(rollout.agent.max_concurrent_requests)
        pulsing = asyncio.create_task(self._keep_pulsing(manager))
        self._tasks = [
            asyncio.create_task(self._trajectory(row, manager, slots, loop)) for row in range(len(self._prompts))
        ]
        try:
            await asyncio.wait(self._tasks)
        finally:
            self._ending = True
            for task in [*self._tasks, pulsing]:
                task.cancel()
            await asyncio.gather(*self._tasks, pulsing, return_exceptions=True)
            for replica in replicas:
                replica.close()
        if self.lost is not None:
            raise EngineLost(self.lost)
        for task in self._tasks:
            task.result()

    def rows(self) -> DataProto:
        """What training reads."""
        meta, tensors = self._prompts.meta_info, self._prompts.batch
        done = [trajectory for trajectory in self._trajectories if trajectory is not None]
        longest = max(len(row.prompt_ids) for trajectory in done for row in trajectory.rows)
        pad = self._worker.tokenizer.pad_token_id
        batch = rows_from_trajectories(
            done,
            pad_token_id=pad if meta.get("pad_token_id") is None else int(meta["pad_token_id"]),
            prompt_length=max(longest, tensors["input_ids"].shape[1]),
            response_length=self._params.max_new_tokens if meta.get("pad_to_max") else None,
            with_drawn=self._params.reshaped and not meta.get("validate"),
        )
        batch.pop(non_tensor_batch_keys=["uid", "sample_index"])
        return batch

    async def _trajectory(
        self, row: int, manager: ServerManager, slots: asyncio.Semaphore, loop: asyncio.AbstractEventLoop
    ) -> None:
        worker, begun = self._worker, self._started[row]
        record = Record.of(self._seed, int(self._prompts.meta_info.get("step", 0)), begun.uid, begun.sample_index)
        record.most = self._limits[row]
        columns = self._columns(row)
        async with slots:
            self._active += 1
            try:
                with recording(record):
                    cls, keywords = self._classes[self._names[row]]
                    agent = cls(
                        config=worker.config,
                        rollout_config=worker.rollout_config,
                        server_manager=manager,
                        tokenizer=worker.tokenizer,
                        processor=worker.processor,
                        toolbox=worker.toolbox,
                        loop=loop,
                        **keywords,
                    )
                    outputs = await agent.run(self._sampling(row), **columns)
                most = Limits(self._limits[row], worker.rollout_config.max_model_len)
                made = trajectory_of(outputs, record, begun.uid, begun.sample_index, most)
            except (Exception, asyncio.CancelledError) as error:  # it costs its own trajectory, is counted and told
                if self._ending:
                    raise
                made = self._failed(error, record, begun)
            finally:
                self._active -= 1
        self._trajectories[row] = made
        self._moved = time.monotonic()
        self._progress.tick()
        told = made.status == "finished" and made.score is None and self._prompts.meta_info.get("tell_finished")
        if told:
            worker.tell_finished(int(columns["row"]), made)

    def _failed(self, error: BaseException, record: Record, begun: Trajectory) -> Trajectory:
        kind = f"{type(error).__name__}: {error}"
        if not self._failures[kind] and self.lost is None:
            logger.warning("agent loop of trajectory %s failed: %s", begun.name, kind, exc_info=error)
        self._failures[kind] += 1
        prompt = np.asarray(begun.rows[0].prompt_ids).tolist()
        return failed_trajectory(error, record, begun.uid, begun.sample_index, prompt, self._params.max_new_tokens)

    def _columns(self, row: int) -> dict[str, Any]:
        """The row as its loop gets it."""
        begun, objects = self._started[row], self._prompts.non_tensor_batch
        columns = {name: values[row] for name, values in objects.items() if name != "sampling_params"}
        if "raw_prompt" in columns:
            columns["raw_prompt"] = list(columns["raw_prompt"])
        return columns | {
            "prompt_ids": np.asarray(begun.rows[0].prompt_ids).tolist(),
            "uid": begun.uid,
            "sample_index": begun.sample_index,
            "step": int(self._prompts.meta_info.get("step", 0)),
            "validate": bool(self._prompts.meta_info.get("validate")),
        }

    def _sampling(self, row: int) -> dict[str, Any]:
        """The run's parameters as a loop sees them, to be passed on as they are or changed."""
        sampled = self._prompts.non_tensor_batch.get("do_sample")
        chosen: SamplingParams = self._params
        return {
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            "top_k": chosen.top_k,
            "min_p": chosen.min_p,
            "do_sample": chosen.do_sample if sampled is None else bool(sampled[row]),
            "max_new_tokens": self._limits[row],
            "stop": list(chosen.stop),
            "stop_token_ids": sorted(chosen.stop_token_ids),
            "ignore_eos": chosen.ignore_eos,
            "logprobs": True,
        }

    def _lose(self, why: str) -> None:
        """A replica is gone, or its engine: nobody can go on."""
        self._ending = True
        self.lost = self.lost or why
        for task in self._tasks:
            task.cancel()

    async def _keep_pulsing(self, manager: ServerManager) -> None:
        """While a trajectory waits for something else than the model, this process does not hang."""
        generating = -1
        while True:
            await asyncio.sleep(_PULSE_S)
            if manager.generating != generating:
                generating, self._moved = manager.generating, time.monotonic()
            if self._active > manager.generating and time.monotonic() - self._moved < _PATIENCE_S:
                pulse()
