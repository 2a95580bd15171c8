"""EngineClients of engines in this process: the real EngineHost, without worker groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from verl.inference.async_engine import AsyncEngine
from verl.single_controller.base.worker_group import RankHandle, WorkerDiedError
from verl.types.request import Output, Request, SamplingParams
from verl.workers.rollout.engine_client import EngineClient
from verl.workers.rollout.engine_host import EngineHost


class RequestEngine:
    """The request methods of a rollout. `answer` returns the output of a request, or None if it stays unfinished.

    `partials` are the current outputs of unfinished requests, `requests` are all submitted requests.
    """

    config, eos_token_ids, pad_token_id = SimpleNamespace(max_model_len=4096, seed=0), (), 0

    def __init__(self, answer: Callable[[Request], Output | None]) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.partials: dict[str, Output] = {}
        self.unfinished: dict[str, Future[Output]] = {}

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        futures: list[Future[Output]] = []
        for request in requests:
            self.requests.append(request)
            future = self.unfinished[request.id] = Future()
            futures.append(future)
            if (output := self.answer(request)) is not None:
                self.finish(request.id, output)
        return futures

    def finish(self, request_id: str, output: Output) -> None:
        self.unfinished.pop(request_id).set_result(output)

    def tokens_since(self, positions: Mapping[str, int]) -> dict[str, Output]:
        partials = {
            name: self.partials[name] for name in positions if name in self.partials and name in self.unfinished
        }
        return {name: tail for name, output in partials.items() if (tail := _tail(output, positions[name])).token_ids}

    def abort(self, ids: Iterable[str] | None = None) -> None:
        for name in list(self.unfinished if ids is None else ids):
            if name in self.unfinished:
                self.finish(name, Output(finish_reason="abort"))


class ScriptedRollout:
    """The request methods of a rollout, implemented by an AsyncEngine."""

    config, eos_token_ids, pad_token_id = RequestEngine.config, (), 0

    def __init__(self, engine: AsyncEngine) -> None:
        self.submit, self.tokens_since, self.abort = engine.submit, engine.tokens_since, engine.abort


class HostHandle(RankHandle):
    """A handle of a simulated rank with an EngineHost; after `die` its calls raise WorkerDiedError."""

    role = "rollout"

    def __init__(self, rollout: Any, rank: int = 0) -> None:
        self.host, self.rank, self.dead = EngineHost(rollout), rank, False

    def die(self) -> None:
        self.dead = True
        self.host.close()

    def notify(self, method: str, *args: Any) -> None:
        if not self.dead:
            attrgetter(method)(self)(*args)

    def call(self, method: str, *args: Any) -> Any:
        result = None if self.dead else attrgetter(method)(self)(*args)
        if self.dead:
            raise WorkerDiedError("worker process died", self.role, self.rank, "here", method)
        return result

    def call_rows(self, method: str, *args: Any) -> Any:
        raise NotImplementedError


@asynccontextmanager
async def engine_client(
    *rollouts: Any, params: SamplingParams | None = None, max_model_len: int = 4096, **keywords: Any
) -> AsyncIterator[EngineClient]:
    """A client of engines (AsyncEngine or rollouts) or handles in this process."""
    handles = [_handle(rollout, rank) for rank, rollout in enumerate(rollouts)]
    keywords = {"on_lost": lambda reason: None} | keywords
    loop = asyncio.get_running_loop()
    client = EngineClient(handles, params or SamplingParams(), max_model_len, "test", loop, **keywords)
    try:
        yield client
    finally:
        client.close()
        for handle in handles:
            if isinstance(handle, HostHandle) and not handle.dead:
                handle.host.close()


def _handle(rollout: Any, rank: int) -> RankHandle:
    if isinstance(rollout, RankHandle):
        return rollout
    return HostHandle(ScriptedRollout(rollout) if isinstance(rollout, AsyncEngine) else rollout, rank)


def _tail(output: Output, start: int) -> Output:
    return Output(output.token_ids[start:], output.log_probs[start:], output.versions[start:])
