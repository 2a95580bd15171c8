"""Rollout hosts without a model: real EngineHosts over a scripted engine, in this process. Ranks can die and be
restarted, replies can be delayed, and the test decides how far each request gets."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.config import PPOConfig, RolloutConfig, load_config
from verl.protocol import DataProto, object_array
from verl.single_controller.base.worker_group import RankHandle, WorkerDiedError
from verl.single_controller.ray.column_store import StoredRows, attach_bundle, bundle_rows
from verl.types.request import Output, Request
from verl.workers.rollout.engine_host import EngineHost

__all__ = ["ScriptedEngine", "ScriptedGroups", "ScriptedRank", "expected_tokens", "prompt_rows", "scripted_config"]

LIMIT = 12
"""Maximum number of response tokens."""


def expected_tokens(key: int, limit: int) -> list[int]:
    """The response of a request, from its noise key: 1 to `limit` tokens."""
    length = 1 + key % limit
    return [1 + (key + 7919 * position) % 97 for position in range(length)]


@dataclass(eq=False)
class _Sequence:
    request: Request
    future: Future[Output]
    output: Output

    def sample(self, count: int, version: int) -> bool:
        """Sample up to `count` tokens; return whether the response is complete."""
        response = expected_tokens(self.request.params.key, self.request.params.max_new_tokens)
        sampled = len(self.output.token_ids)
        new = response[sampled : sampled + count]
        self.output.token_ids += new
        self.output.log_probs += [-token / 100 for token in new]
        self.output.versions += [version] * len(new)
        return len(self.output.token_ids) == len(response)


class ScriptedEngine:
    """The methods of a rollout that EngineHost calls. Tokens depend on the request only."""

    eos_token_ids: frozenset[int] = frozenset()
    pad_token_id = 0

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.version = 0
        self.resumed_tokens = 0
        """Number of tokens that were already generated when requests were submitted."""
        self.requests: list[str] = []
        """Names of the trajectories of all requests, in order."""
        self._lock = threading.RLock()
        self._running: dict[str, _Sequence] = {}

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        futures = []
        with self._lock:
            for request in requests:
                partial = request.resume_from or Output()
                expected = expected_tokens(request.params.key, request.params.max_new_tokens)
                assert partial.token_ids == expected[: len(partial.token_ids)], (
                    "resumed from tokens of another response"
                )
                assert len(partial.token_ids) < len(expected), "resumed from a complete response"
                output = Output(list(partial.token_ids), list(partial.log_probs), list(partial.versions))
                self.resumed_tokens += len(partial.token_ids)
                self.requests.append(request.id.partition("#")[0])
                sequence = self._running[request.id] = _Sequence(request, Future(), output)
                futures.append(sequence.future)
        return futures

    @property
    def running(self) -> list[str]:
        """Names of the trajectories that are being generated."""
        with self._lock:
            return [request_id.partition("#")[0] for request_id in self._running]

    def advance(self, tokens: int = 10**6, names: Iterable[str] | None = None) -> None:
        """Sample up to `tokens` tokens of each of these trajectories (None: all); complete responses finish."""
        with self._lock:
            chosen = None if names is None else set(names)
            for request_id, sequence in list(self._running.items()):
                is_chosen = chosen is None or request_id.partition("#")[0] in chosen
                if is_chosen and sequence.sample(tokens, self.version):
                    self._end(request_id, "stop")

    def abort(self, ids: Iterable[str] | None = None) -> None:
        with self._lock:
            for request_id in list(self._running if ids is None else ids):
                if request_id in self._running:
                    self._end(request_id, "abort")

    def tokens_since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        with self._lock:
            outputs = {name: self._running[name].output for name in positions if name in self._running}
            return {
                name: Output(
                    output.token_ids[positions[name] :],
                    output.log_probs[positions[name] :],
                    output.versions[positions[name] :],
                )
                for name, output in outputs.items()
                if len(output.token_ids) > positions[name]
            }

    def fail(self, error: Exception) -> None:
        """Fail all running requests."""
        with self._lock:
            for sequence in [self._running.pop(request_id) for request_id in list(self._running)]:
                sequence.future.set_exception(error)

    def _end(self, request_id: str, reason: str) -> None:
        sequence = self._running.pop(request_id)
        sequence.output.finish_reason = reason
        sequence.future.set_result(sequence.output)


class ScriptedRank(RankHandle):
    """A rank in this process. After `die` all its calls raise WorkerDiedError."""

    def __init__(self, config: PPOConfig, role: str, rank: int) -> None:
        self.role, self.rank = role, rank
        self.engine = ScriptedEngine(config.actor_rollout_ref.rollout)
        self.host: EngineHost | None = None
        self.dead = False
        self.released = threading.Event()
        """While it is not set, replies with finished trajectories are delayed."""
        self.released.set()
        self.calls: list[str] = []

    def open_host(self, replicas: Any = None) -> str:
        if self.host is None or self.host.closed:
            rollout: Any = self.engine
            self.host = EngineHost(rollout)
        return self.host.id

    def close_host(self) -> None:
        if self.host is not None:
            self.host.close()

    def die(self) -> None:
        self.dead = True
        self.released.set()
        if self.host is not None:
            self.host.close()  # ends a `collect` that waits

    def notify(self, method: str, *args: Any) -> None:
        self.call(method, *args)

    def call(self, method: str, *args: Any) -> Any:
        self._require_alive(method)
        self.calls.append(method)
        target: Any = self
        for name in method.split("."):
            target = getattr(target, name)
        result = target(*args)
        self._require_alive(method)
        return result

    def call_rows(self, method: str, *args: Any) -> tuple[Any, StoredRows | None]:
        value, rows = self.call(method, *args)
        if rows is not None:
            self.released.wait(20)
            self._require_alive(method)
        return value, None if rows is None else attach_bundle(*bundle_rows(rows))

    def _require_alive(self, method: str) -> None:
        if self.dead:
            raise WorkerDiedError("the process died", self.role, self.rank, "here", method)


@dataclass
class ScriptedGroups:
    """Worker groups with `engines` rollout ranks and `loops` loop workers, which run all but single-turn agents."""

    config: PPOConfig
    engines: int = 2
    loops: int = 0
    restarts: int = 0
    generation_groups: tuple[Any, ...] = ()
    generation_open: bool = False
    uses_ray: bool = False
    may_lose_hosts: bool = True
    overrides_generate_sequences: bool = False
    rollout_ranks: list[ScriptedRank] = field(default_factory=list)
    loop_ranks: list[ScriptedRank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rollout_ranks = [ScriptedRank(self.config, "rollout", rank) for rank in range(self.engines)]
        self.loop_ranks = [ScriptedRank(self.config, "agents", rank) for rank in range(self.loops)]

    @property
    def ranks(self) -> list[ScriptedRank]:
        return [*self.rollout_ranks, *self.loop_ranks]

    @property
    def agents(self) -> ScriptedGroups | None:
        return self if self.loops else None

    @property
    def world_size(self) -> int:
        return self.loops

    def handle(self, rank: int) -> ScriptedRank:
        return self.loop_ranks[rank]

    def is_single_turn(self, name: str) -> bool:
        return not self.loops or name == "single_turn_agent"

    def open_generation(self) -> list[tuple[RankHandle, str]]:
        self.generation_open = True
        return [(rank, rank.call("open_host")) for rank in self.rollout_ranks]

    def close_generation(self) -> None:
        self.generation_open = False
        for rank in self.rollout_ranks:
            rank.call("close_host")

    def require_engines(self) -> None:
        for rank in self.rollout_ranks:
            rank._require_alive("raise_engine_error")
            if rank.host is not None and not rank.host.closed:
                rank.host.raise_if_failed()

    def restart(self, role: str) -> None:
        """Replace the dead ranks of a role; like the real ones, loop workers are restarted together."""
        self.restarts += 1
        if role == "agents":
            for rank in self.loop_ranks:
                rank.die()
        for ranks in (self.rollout_ranks, self.loop_ranks):
            for number, rank in enumerate(ranks):
                if rank.role == role and rank.dead:
                    ranks[number] = ScriptedRank(self.config, role, number)

    def retry(self, call: Any) -> Any:
        """Like WorkerRecovery.retry_on_worker_loss."""
        while True:
            try:
                return call()
            except WorkerDiedError as error:
                assert self.restarts < 100
                self.restart(error.role)


def scripted_config(*overrides: str) -> PPOConfig:
    defaults = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "data.train_batch_size=4"]
    defaults += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", f"data.max_response_length={LIMIT}"]
    defaults += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=3"]
    return load_config(None, [*defaults, *overrides], check_files=False)


def prompt_rows(uids: Sequence[str], samples: int = 1, agents: Sequence[str] | None = None) -> DataProto:
    """`samples` rows of each prompt; prompts have 1 to 3 tokens."""
    lengths = [1 + len(uid) % 3 for uid in uids for _ in range(samples)]
    mask = torch.tensor([[0] * (3 - length) + [1] * length for length in lengths])
    columns: dict[str, Any] = {
        "uid": object_array([uid for uid in uids for _ in range(samples)]),
        "sample_index": object_array([number for _ in uids for number in range(samples)]),
    }
    if agents is not None:
        columns["agent_name"] = object_array([name for name in agents for _ in range(samples)])
    return DataProto.from_dict({"input_ids": mask * 5, "attention_mask": mask}, columns)
