"""The actors of a group, seen from the controller: calls on their lanes, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from verl.single_controller.base.errors import Failure, WorkerDiedError
from verl.single_controller.base.handle import RankHandle, result_of
from verl.single_controller.ray.asking import Nodes, RankProcess
from verl.single_controller.ray.deaths import death
from verl.single_controller.ray.resource_pool import ResourceError, describe_cluster
from verl.single_controller.ray.stored import StoredRows, with_bundle

NAMESPACE = "verl"
_POLL_S = 0.5
_DEAD_S = 30.0
_GONE_S = 0.05
_GONE = ("gone",)
# What Ray raises of a process that is gone. Its memory monitor has a class of its own, which is no RayActorError.
_DIED = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError)


def on(actor: Any, method: str, lane: str) -> Any:
    return getattr(actor, method).options(concurrency_group=lane)


def named_actor(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise ValueError(f"no running worker named {name!r}. Was its group started with detached=True?") from error


def outcomes_of(refs: list[Any]) -> list[Any]:
    """The outputs; in place of one that Ray could not deliver, its exception (the process died) or a Failure."""
    try:
        return ray.get(refs)
    except _DIED as error:
        undelivered: Any = error
    except ray.exceptions.RayError as error:
        undelivered = Failure(f"{type(error).__name__} before the method ran", str(error), None)
    return [undelivered] if len(refs) == 1 else [outcomes_of([ref])[0] for ref in refs]


@dataclass(frozen=True)
class RayRankHandle(RankHandle):
    """The actor of a rank, wherever it runs."""

    actor: Any
    role: str
    rank: int
    host: str

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.host})"

    def tell(self, method: str, *args: Any) -> None:
        self._send(method, args)

    def ask(self, method: str, *args: Any) -> Any:
        return self._result(method, self._send(method, args))

    def ask_rows(self, method: str, *args: Any) -> tuple[Any, StoredRows | None]:
        call = self.actor.call_rows.options(concurrency_group="control", num_returns=2)
        reply, bundle = call.remote(self.role, method, list(args))
        value, rows = self._result(method, reply)
        return value, None if rows is None else with_bundle(rows, bundle)

    def _result(self, method: str, ref: Any) -> Any:
        output = outcomes_of([ref])[0]
        if isinstance(output, Exception):
            raise WorkerDiedError(death(output)[0], self.role, self.rank, self.host, method, str(output))
        return result_of(output)

    def _send(self, method: str, args: tuple[Any, ...]) -> Any:
        return on(self.actor, "call", "control").remote(self.role, method, list(args), {}, "control")


def dead_among(workers: Sequence[Any]) -> list[int]:
    """Those that are gone, or say nothing for as long as that takes to be known."""
    refs = [on(worker, "describe", "control").remote() for worker in workers]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_DEAD_S)
    alive = {ref for ref in ready if not isinstance(outcomes_of([ref])[0], Exception)}
    return [rank for rank, ref in enumerate(refs) if ref not in alive]


def wait_until_dead(workers: Sequence[Any], processes: Sequence[RankProcess]) -> None:
    """Their names are free when Ray has given them up, their devices when the processes are gone, soon after."""
    alive, give_up = list(workers), time.monotonic() + _DEAD_S
    while alive and time.monotonic() < give_up:
        refs = [on(worker, "describe", "control").remote() for worker in alive]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_POLL_S)
        dead = {ref for ref in ready if isinstance(outcomes_of([ref])[0], Exception)}
        alive = [worker for worker, ref in zip(alive, refs, strict=True) if ref not in dead]
    nodes = Nodes()
    for process in processes:
        while (nodes.look(process) or _GONE)[0] not in ("gone", "ended") and time.monotonic() < give_up:
            time.sleep(_GONE_S)


def wait_until_alive(workers: Sequence[Any], within: float, pool: str) -> None:
    """Raise a ResourceError where one has not started after so many seconds."""
    refs = [on(worker, "describe", "control").remote() for worker in workers]
    _, waiting = ray.wait(refs, num_returns=len(refs), timeout=within)
    if waiting:
        started = f"{len(waiting)} of {len(refs)} rank(s) did not start in {within:.0f} s"
        raise ResourceError(f"resource pool {pool!r}: {started}. {describe_cluster()}")
