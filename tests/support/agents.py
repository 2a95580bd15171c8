"""Agent loops that cover the agent-loop API, and loop workers with replicas of a real tiny engine in one process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.training_harness import overrides
from verl.agent.loop import AgentLoopBase, AgentLoopOutput, TrajectoryFailed
from verl.agent.toolbox import ToolFiles
from verl.agent.worker import AgentHost, AgentLoopWorker
from verl.config import PPOConfig, load_config
from verl.inference.model_runner import ModelRunner
from verl.protocol import DataProto, object_array
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.base.worker_group import RankHandle, WorkerDiedError
from verl.single_controller.local import LocalWorkerGroup
from verl.types.trajectory import HostReply, Trajectory
from verl.utils import hf_tokenizer
from verl.workers.roles.policy import ActorRolloutRefWorker
from verl.workers.rollout.training_rows import trajectories_from_rows

ROLLOUT = "actor_rollout_ref.rollout"
TOOL = [70, 71, 72]


class TwoTurns(AgentLoopBase):
    """Generates `depth` model turns with the tool output `TOOL` between them."""

    def __init__(self, depth: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.depth = depth

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt, response, mask = list(row["prompt_ids"]), list[int](), list[int]()
        for turn in range(self.depth):
            if turn:
                response, mask = response + TOOL, mask + [0] * len(TOOL)
            output = await self.server_manager.generate(
                request_id=row["uid"], prompt_ids=prompt + response, sampling_params=sampling_params | {"max_tokens": 5}
            )
            response, mask = response + output.token_ids, mask + [1] * len(output.token_ids)
        return AgentLoopOutput(prompt, response, mask, num_turns=2 * self.depth)


class ContextRewriter(AgentLoopBase):
    """Starts a new context after its first output: two rows."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        outputs = []
        for prompt in (row["prompt_ids"], [*row["prompt_ids"], 80, 81]):
            output = await self.server_manager.generate("one", prompt_ids=prompt, sampling_params=sampling_params)
            outputs.append(AgentLoopOutput(list(prompt), output.token_ids, [1] * len(output.token_ids)))
        return outputs


class Summarising(AgentLoopBase):
    """Continues with new messages after its first output: two rows."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        summary = self.apply_chat_template([{"role": "user", "content": "In short:"}])
        outputs = []
        for prompt in (row["prompt_ids"], summary):
            output = await self.server_manager.generate("one", prompt_ids=prompt, sampling_params=sampling_params)
            outputs.append(AgentLoopOutput(list(prompt), output.token_ids, [1] * len(output.token_ids)))
        return outputs


class FailingLoop(TwoTurns):
    """Raises after its first output, except for sample 0."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        if row["sample_index"] == 0:
            return await super().run(sampling_params, **row)
        await self.server_manager.generate("x", prompt_ids=row["prompt_ids"], sampling_params=sampling_params)
        raise LookupError("the tool is unavailable")


class UnprintableError(Exception):
    """An exception of a client library whose text cannot be read."""

    def __str__(self) -> str:
        raise AttributeError("'NoneType' object has no attribute 'text'")


class UnprintableFailureLoop(TwoTurns):
    """Raises an exception whose text cannot be read."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise UnprintableError


class UnhashableKindLoop(TwoTurns):
    """Raises an error whose kind cannot be counted."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise TrajectoryFailed("a failure", kind=["no", "text"])  # type: ignore[arg-type]


class ExitingLoop(TwoTurns):
    """Ends like a program."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise SystemExit(3)


class InterruptedLoop(TwoTurns):
    """Raises KeyboardInterrupt, as code that it executes may."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        raise KeyboardInterrupt


class UnsupportedParamsLoop(TwoTurns):
    """Sample 1 sets a sampling parameter that no engine supports."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        unsupported = {"repetition_penalty": 1.5} if row["sample_index"] == 1 else {}
        return await super().run(sampling_params | unsupported, **row)


class RowParamsLoop(AgentLoopBase):
    """Generates with the sampling parameters, or the prompt, of the row's column `sampling`."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        params = dict(row["sampling"])
        prompt = params.pop("prompt_ids", row["prompt_ids"])
        output = await self.server_manager.generate("x", prompt_ids=prompt, sampling_params=sampling_params | params)
        return AgentLoopOutput(prompt, output.token_ids, [1] * len(output.token_ids))


class HangingLoop(AgentLoopBase):
    """Never returns: sample 0 waits in a tool, the others generate without end-of-sequence tokens."""

    entered = threading.Event()

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        self.entered.set()
        if row["sample_index"] == 0:
            await asyncio.Event().wait()
        endless = sampling_params | {"ignore_eos": True}
        await self.server_manager.generate("x", prompt_ids=row["prompt_ids"], sampling_params=endless)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class SlowCancelLoop(AgentLoopBase):
    """Sample 0 waits in a tool; if it is cancelled, it continues when `may_exit` is set."""

    entered, may_exit = threading.Event(), threading.Event()

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        if row["sample_index"] == 0:
            self.entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.to_thread(self.may_exit.wait)
        output = await self.server_manager.generate(
            "x", prompt_ids=row["prompt_ids"], sampling_params=sampling_params | {"max_tokens": 5}
        )
        return AgentLoopOutput(row["prompt_ids"], output.token_ids, [1] * len(output.token_ids))


@dataclass
class RecordingHandle(RankHandle):
    """A handle that records the prompts of all requests submitted through it."""

    inner: RankHandle
    role: str = "rollout"
    rank: int = 0
    prompts: list[list[int]] = field(default_factory=list)

    def notify(self, method: str, *args: Any) -> None:
        if method == "host.submit_requests":
            self.prompts += [list(request.prompt_ids) for request in args[1]]
        self.inner.notify(method, *args)

    def call(self, method: str, *args: Any) -> Any:
        return self.inner.call(method, *args)

    def call_rows(self, method: str, *args: Any) -> Any:
        return self.inner.call_rows(method, *args)


class DyingHandle(RecordingHandle):
    """A replica that dies when it has reported more than `dies_after` tokens of unfinished outputs (None: never).

    `resumed`: number of tokens that were already generated when requests were submitted to it.
    """

    dies_after: int | None = 10
    dead, resumed, reported = False, 0, 0

    def notify(self, method: str, *args: Any) -> None:
        if not self.dead:
            if method == "host.submit_requests":
                self.resumed += sum(len(request.resume_from.token_ids) for request in args[1] if request.resume_from)
            super().notify(method, *args)

    def call(self, method: str, *args: Any) -> Any:
        if self.dead:
            raise WorkerDiedError("worker process died", self.role, self.rank, "here", method)
        reply = super().call(method, *args)
        if method == "host.collect_outputs":
            self.reported += sum(len(piece.token_ids) for piece in reply.partials.values())
            self.dead |= self.dies_after is not None and self.reported > self.dies_after
        return reply


class SlowEngines:
    """Delays every engine step by 5 ms; after `steps` steps sets `reached` and waits until `resume` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int = 10**6) -> None:
        self.steps, self.reached, self.resume = steps, threading.Event(), threading.Event()
        launch = ModelRunner.launch

        def launch_slowly(runner: ModelRunner, plan: Any) -> Any:
            self.steps -= 1
            time.sleep(0.005)
            if self.steps <= 0 and not self.resume.is_set():
                self.reached.set()
                self.resume.wait(0.2)
            return launch(runner, plan)

        monkeypatch.setattr(ModelRunner, "launch", launch_slowly)


@dataclass
class AgentSetup:
    """Loop worker, engine replicas (worker groups of one rank) and their configuration."""

    config: PPOConfig
    replicas: list[Any]
    agents: Any

    @property
    def handles(self) -> list[RecordingHandle]:
        return [RecordingHandle(replica.handle(0)) for replica in self.replicas]

    @property
    def host(self) -> AgentHost:
        """The open host of the loop worker."""
        host = self.agents.worker.host
        assert isinstance(host, AgentHost)
        return host

    def start(self, prompts: DataProto, handles: Sequence[RankHandle] | None = None, job: str = "job", **partials: Any):
        """Open the host of the loop worker and submit these rows as a job."""
        self.agents.open_host(handles or self.handles)
        self.host.start(job, prompts.meta_info)
        self.host.submit(job, prompts, **partials)

    def collect(self, count: int, job: str = "job") -> list[Trajectory]:
        """The next `count` finished trajectories, all of this job."""
        finished: list[Trajectory] = []
        while len(finished) < count:
            reply, rows = self.host.collect(self.host.id, 30.0, False)
            assert (reply.lost_replica, reply.failure, reply.closed) == (None, None, False)
            finished += trajectories_of(reply, rows)
            assert reply.job in (job, None)
        return finished

    def generate(self, prompts: DataProto, handles: Sequence[RankHandle] | None = None) -> DataProto:
        with self.open_engines():
            return self.agents.generate_sequences(prompts, handles or self.handles)

    @contextmanager
    def open_engines(self) -> Iterator[None]:
        for replica in self.replicas:
            replica.begin_generation()
        try:
            yield
        finally:
            for replica in self.replicas:
                replica.end_generation()

    def engine(self, number: int = 0) -> Any:
        """The rollout of a replica."""
        replica = self.replicas[number]
        return replica.worker.rollout


def make_agent_setup(
    task: dict[str, str], folder: Path, *more: str, replicas: int = 1, loops: Any = None
) -> AgentSetup:
    config = load_config(None, overrides(task, folder, f"{ROLLOUT}.mode=async", *more))
    policy = ClassWithInitArgs(ActorRolloutRefWorker, config=config.actor_rollout_ref, role="rollout")
    groups = [LocalWorkerGroup(ray_cls_with_init=policy) for _ in range(replicas)]
    for group in groups:
        group.init_model()
    return AgentSetup(config, groups, loop_worker(config, loops))


def loop_worker(config: PPOConfig, loops: Any = None) -> Any:
    worker = ClassWithInitArgs(AgentLoopWorker, config, loops or {}, ToolFiles())
    return LocalWorkerGroup(ray_cls_with_init=worker)


def prompts_of(task: dict[str, str], count: int, name: str | None = None, samples: int = 2, **meta: Any) -> DataProto:
    """Rows of `count` prompts, `samples` rows each; `name`: the agent loop."""
    tokenizer = hf_tokenizer(task["model"])
    ids = [tokenizer(f"Say {number}", add_special_tokens=False)["input_ids"] for number in range(count)]
    width = max(map(len, ids))
    rows = [prompt for prompt in ids for _ in range(samples)]
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    names = {} if name is None else {"agent_name": object_array([name] * len(rows))}
    return DataProto.from_dict(
        {"input_ids": tokens, "attention_mask": mask},
        {
            "uid": object_array([f"p{number}" for number in range(count) for _ in range(samples)]),
            "sample_index": object_array(list(range(samples)) * count),
            "row": object_array(list(range(len(rows)))),
            "raw_prompt": object_array([[{"role": "user", "content": "Say"}]] * len(rows)),
            **names,
        },
        {"step": 3, "seed": 7, "eos_token_id": [1], **meta},
    )


def trajectories_of(reply: HostReply, rows: DataProto | None) -> list[Trajectory]:
    """The finished trajectories of a reply, with all their columns."""
    if rows is None:
        return []
    return trajectories_from_rows(DataProto.from_dict(dict(rows.batch.items()), reply.objects))


def tokens_by_name(trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
    return {trajectory.name: trajectory.last_tokens.tolist() for trajectory in trajectories}


def tokens_of(rows: DataProto) -> dict[str, list[Any]]:
    """Response tokens and log-probs by trajectory."""
    columns = zip(
        rows.non_tensor_batch["trajectory"],
        rows.batch["responses"].tolist(),
        np.round(rows.batch["rollout_log_probs"].double().numpy(), 4).tolist(),
        rows.batch["attention_mask"][:, -rows.batch["responses"].shape[1] :].sum(-1).tolist(),
        strict=True,
    )
    outputs: dict[str, list[Any]] = {}
    for name, tokens, log_probs, length in columns:
        outputs.setdefault(name, []).append((tokens[:length], log_probs[:length]))
    return outputs
