"""Answering: rows become trajectories, each at its own pace. Rows are added at any time; a batch adds all at once."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from verl.agent.conversation import conversation_of
from verl.agent.loop import AgentLoopBase
from verl.agent.outputs import Limits, failed_trajectory, trajectory_of
from verl.agent.record import Record, recording
from verl.agent.replicas import EngineLost, Replica
from verl.agent.server_manager import ServerManager
from verl.config import PPOConfig, RolloutConfig
from verl.config.layout import serves_reward_model
from verl.models.loading import read_config
from verl.models.routing import unknown_routes
from verl.protocol import DataProto
from verl.single_controller.base.handle import RankHandle
from verl.types.request import Output, SamplingParams
from verl.types.trajectory import Trajectory
from verl.utils.end_tokens import EndTokens
from verl.utils.fs import resolve_model_path
from verl.utils.progress import pulse
from verl.workers.rollout.output import rows_from_trajectories
from verl.workers.rollout.prompts import answer_limits, sampling_params, trajectories_from_prompts

__all__ = ["Answering", "AskedRow", "Host", "asked_params", "empty_experts", "trained_rows"]

logger = logging.getLogger(__name__)

_PULSE_S = 1.0
# Whoever waits for something else than an answer, a tool, may do so for this long; then the watch for hangs decides.
_PATIENCE_S = 3600.0


class Host(Protocol):
    """What all trajectories of a process share."""

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
        """The class of a loop and its own keywords."""


@dataclass(slots=True, eq=False)
class AskedRow:
    """A row to be answered, and what became of it."""

    begun: Trajectory
    step: int
    """Whose noise it gets, beside its own name."""
    limit: int
    agent: str
    columns: dict[str, Any]
    """As its loop gets them."""
    sampling: dict[str, Any]
    """The run's parameters as a loop sees them, to be passed on as they are or changed."""
    partial: Output | None = None
    """What there is of its first answer, from before."""
    record: Record | None = None
    made: Trajectory | None = None
    dropped: bool = False


OnDone = Callable[[AskedRow, Trajectory], None]
"""Told of each trajectory that has ended, in the event loop's thread."""


class Answering:
    """From `open` to `close`. All but the constructor and `asked` is for the event loop's thread."""

    def __init__(self, host: Host, meta: Mapping[str, Any], replicas: Sequence[RankHandle], on_done: OnDone) -> None:
        """`meta` is of all rows, `meta_info` of a generation; `replicas` are the engine's copies."""
        self._host, self._handles, self._on_done = host, replicas, on_done
        self.params = asked_params(host.rollout_config, host.end_tokens.ids, meta)
        self._seed = host.rollout_config.seed if meta.get("seed") is None else int(meta["seed"])
        self._validates = bool(meta.get("validate"))
        self._scored_by_model = host.config.reward_model.enable and not serves_reward_model(host.config)
        self._rows: dict[AskedRow, asyncio.Task[None]] = {}
        self._failures: Counter[str] = Counter()
        self._moved = time.monotonic()
        self._active = 0
        self._ending = False
        self.lost: str | None = None
        """Why none can go on."""

    def asked(self, prompts: DataProto, partials: Mapping[str, Output] | None = None) -> list[AskedRow]:
        """The rows of a batch, for `add`; what is wrong with them is raised here. `partials`: by trajectory."""
        rollout, objects = self._host.rollout_config, prompts.non_tensor_batch
        started = trajectories_from_prompts(prompts)
        limits = answer_limits(prompts, started, self.params.max_new_tokens)
        agents = [str(name) for name in objects.get("agent_name", [rollout.agent.default_agent_loop] * len(prompts))]
        for name in dict.fromkeys(agents):
            self._host.loop_class(name)
        step = int(prompts.meta_info.get("step", 0))
        sampled = objects.get("do_sample", [self.params.do_sample] * len(prompts))
        return [
            AskedRow(
                begun,
                step,
                limits[row],
                agents[row],
                {name: values[row] for name, values in objects.items() if name != "sampling_params"}
                | self._own_columns(begun, objects, row, step),
                self._sampling(bool(sampled[row]), limits[row]),
                (partials or {}).get(begun.name),
            )
            for row, begun in enumerate(started)
        ]

    def open(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[str], None] | None = None) -> None:
        """Reach the replicas. `on_lost` is told of one that is gone: what it was asked goes on elsewhere, or waits for
        `renew`; without it nobody can go on."""
        client, outlives = f"{self._host.rank}-{uuid.uuid4().hex[:8]}", on_lost is not None
        self._loop = loop
        replicas = [Replica(handle, client, loop, on_lost or self._lose, outlives) for handle in self._handles]
        rollout, first = self._host.rollout_config, self._host.rank
        self._manager = ServerManager(
            replicas, self.params, rollout.max_model_len, client, first, self._host.vocabulary, outlives
        )
        self._slots = asyncio.Semaphore(rollout.agent.max_concurrent_requests)
        self._pulsing = asyncio.create_task(self._keep_pulsing())

    def add(self, rows: Iterable[AskedRow]) -> None:
        """Begin with them."""
        for row in rows:
            task = self._rows[row] = asyncio.create_task(self._trajectory(row))
            task.add_done_callback(partial(self._ended, row))

    def _ended(self, row: AskedRow, task: asyncio.Task[None]) -> None:
        self._rows.pop(row)
        if row.dropped and not task.cancelled():
            task.exception()  # nobody wants to hear of that either

    async def all_done(self) -> None:
        """Returns when every trajectory has ended; raises EngineLost when none can go on."""
        tasks = list(self._rows.values())
        try:
            await asyncio.wait(tasks)
        finally:
            await self.close()
        if self.lost is not None:
            raise EngineLost(self.lost)
        for task in tasks:
            task.result()

    def renew(self, handles: Sequence[RankHandle]) -> None:
        """Replicas that were lost are there again, at these handles (one for each)."""
        self._manager.renew(handles)

    def drop(self, names: Iterable[str]) -> None:
        """End these, of which nobody wants to hear any more. Nobody waits either for what their tools let go of."""
        dropped = set(names)
        for row, task in self._rows.items():
            if row.begun.name in dropped:
                row.dropped = task.cancel()

    async def partials(self) -> dict[str, Output]:
        """What there is of the answers under way, by trajectory. They go on.

        Only of first answers: what comes later hangs on what a loop and its tools hold, and they cannot be taken along.
        """
        await self._manager.note_partials()
        first = {row: row.record.partial for row in self._rows if row.record and not row.record.calls}
        # Who goes on with them knows the row's own prompt, and no other that a loop may have asked with.
        return {
            row.begun.name: partial.output
            for row, partial in first.items()
            if partial is not None and partial.prompt_ids == _prompt_of(row)
        }

    async def close(self) -> None:
        """End what is left."""
        self._ending = True
        left = [*self._rows.values(), self._pulsing]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._manager.close()

    async def _trajectory(self, row: AskedRow) -> None:
        host, begun = self._host, row.begun
        record = row.record = Record.of(self._seed, row.step, begun.uid, begun.sample_index)
        record.most = row.limit
        if row.partial is not None:
            record.note(_prompt_of(row), row.partial)
        async with self._slots:
            self._active += 1
            try:
                with recording(record):
                    cls, keywords = host.loop_class(row.agent)
                    agent = cls(
                        config=host.config,
                        rollout_config=host.rollout_config,
                        server_manager=self._manager,
                        tokenizer=host.tokenizer,
                        processor=host.processor,
                        toolbox=host.toolbox,
                        loop=self._loop,
                        **keywords,
                    )
                    outputs = await agent.run(row.sampling, **row.columns)
                most = Limits(row.limit, host.rollout_config.max_model_len)
                made = trajectory_of(outputs, record, begun.uid, begun.sample_index, most)
                self._set_messages(made, row, record)
            except (Exception, asyncio.CancelledError) as error:  # it costs its own trajectory, is counted and told
                if self._ending or row.dropped:
                    raise
                made = self._failed(error, record, begun)
            finally:
                self._active -= 1
        row.made, self._moved = made, time.monotonic()
        if not row.dropped:  # a loop may end well in spite of it
            self._on_done(row, made)

    def _set_messages(self, trajectory: Trajectory, row: AskedRow, record: Record) -> None:
        """Complete the rows' conversations if a reward model scores the run; otherwise drop them."""
        chat = row.columns.get("raw_prompt")
        prompts = {} if chat is None else {tuple(_prompt_of(row)): chat}
        for output_row in trajectory.rows:
            if not self._scored_by_model:
                output_row.messages = None
            elif output_row.messages is None and chat is not None:
                output_row.messages = conversation_of(output_row, prompts, record.templated, self._host.tokenizer)

    def _failed(self, error: BaseException, record: Record, begun: Trajectory) -> Trajectory:
        kind = f"{type(error).__name__}: {error}"
        if not self._failures[kind] and self.lost is None:
            logger.warning("agent loop of trajectory %s failed: %s", begun.name, kind, exc_info=error)
        self._failures[kind] += 1
        prompt = np.asarray(begun.rows[0].prompt_ids).tolist()
        return failed_trajectory(error, record, begun.uid, begun.sample_index, prompt, self.params.max_new_tokens)

    def _own_columns(self, begun: Trajectory, objects: Mapping[str, Any], row: int, step: int) -> dict[str, Any]:
        """Beside the data's."""
        chat = objects["raw_prompt"][row] if "raw_prompt" in objects else None
        return ({} if chat is None else {"raw_prompt": list(chat)}) | {
            "prompt_ids": np.asarray(begun.rows[0].prompt_ids).tolist(),
            "uid": begun.uid,
            "sample_index": begun.sample_index,
            "step": step,
            "validate": self._validates,
        }

    def _sampling(self, sampled: bool, limit: int) -> dict[str, Any]:
        chosen = self.params
        return {
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            "top_k": chosen.top_k,
            "min_p": chosen.min_p,
            "do_sample": sampled,
            "max_new_tokens": limit,
            "stop": list(chosen.stop),
            "stop_token_ids": sorted(chosen.stop_token_ids),
            "ignore_eos": chosen.ignore_eos,
            "logprobs": True,
        }

    def _lose(self, why: str) -> None:
        """A replica is gone, or its engine: nobody can go on."""
        self._ending = True
        self.lost = self.lost or why
        for task in self._rows.values():
            task.cancel()

    async def _keep_pulsing(self) -> None:
        """While a trajectory waits for something else than the model, this process does not hang."""
        generating = -1
        while True:
            await asyncio.sleep(_PULSE_S)
            if self._manager.generating != generating:
                generating, self._moved = self._manager.generating, time.monotonic()
            if self._active > self._manager.generating and time.monotonic() - self._moved < _PATIENCE_S:
                pulse()


def _prompt_of(row: AskedRow) -> list[int]:
    return np.asarray(row.begun.rows[0].prompt_ids).tolist()


def asked_params(rollout: RolloutConfig, end_token_ids: Iterable[int], meta: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a generation; `end_token_ids` are used if `meta_info` (`meta`) has no `eos_token_id`."""
    return sampling_params(rollout, meta, end_token_ids)


def empty_experts(config: PPOConfig) -> np.ndarray | None:
    """[0, layers, k] in the type of the column `routed_experts`; None where the rollout does not return experts."""
    policy = config.actor_rollout_ref
    if not policy.rollout.return_routed_experts:
        return None
    model = policy.model
    folder = resolve_model_path(model.path, "actor_rollout_ref.model.path")
    return unknown_routes(read_config(folder, model.trust_remote_code, model.override_config)).numpy()


def trained_rows(
    trajectories: Sequence[Trajectory],
    prompt_width: int,
    params: SamplingParams,
    meta: Mapping[str, Any],
    pad: int,
    no_experts: np.ndarray | None,
) -> DataProto:
    """What training reads of trajectories that were asked for with this `meta_info`.

    `no_experts` is the result of `empty_experts`. If the rollout returns experts, the column `routed_experts` exists
    even if no trajectory has any, so that batches can be concatenated and replayed.
    """
    longest = max(len(row.prompt_ids) for trajectory in trajectories for row in trajectory.rows)
    batch = rows_from_trajectories(
        trajectories,
        pad_token_id=pad if meta.get("pad_token_id") is None else int(meta["pad_token_id"]),
        prompt_length=max(longest, prompt_width),
        response_length=params.max_new_tokens if meta.get("pad_to_max") else None,
        with_drawn=params.reshaped and not meta.get("validate"),
        with_experts=not meta.get("validate"),
        no_experts=no_experts,
    )
    batch.pop(non_tensor_batch_keys=["uid", "sample_index"])
    return batch
