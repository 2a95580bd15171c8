"""TrajectoryStream: rows come in at any time, trajectories leave as they end, by a call that stands open for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.agent.answering import Answering, AskedRow, Host
from verl.protocol import DataProto
from verl.single_controller.base.handle import RankHandle
from verl.types.request import Output
from verl.types.trajectory import Trajectory
from verl.utils.progress import pulses

__all__ = ["Finished", "TrajectoryStream"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finished:
    """What whoever collects is told."""

    trajectories: list[Trajectory]
    pulses: int
    """A number that changes as long as the process moves."""
    ended: bool = False
    """No more will come."""
    lost: str | None = None
    """Why a replica is gone, told once: what it was asked goes on elsewhere, or waits for new ones."""


class TrajectoryStream:
    """For any thread; the work is done in the event loop's."""

    def __init__(
        self, host: Host, meta: Mapping[str, Any], replicas: Sequence[RankHandle], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._loop, self._changed = loop, threading.Condition()
        self._finished: list[Trajectory] = []
        self._lost: str | None = None
        self._ended = False
        self._answering = Answering(host, meta, replicas, self._done)
        self._do(lambda: self._answering.open(loop, self._lose))

    def add(self, prompts: DataProto, partials: Mapping[str, Output]) -> None:
        """Begin with these rows; what is wrong with them is raised."""
        rows = self._answering.asked(prompts, partials)
        self._do(lambda: self._answering.add(rows))

    def collect(self, within: float) -> Finished:
        """What has ended since this was last asked; waits so many seconds for something."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._lost is not None or self._ended, within)
            finished, self._finished = self._finished, []
            lost, self._lost = self._lost, None
            return Finished(finished, pulses(), self._ended, lost)

    def renew(self, replicas: Sequence[RankHandle]) -> None:
        """Those that were lost are there again, at these handles (one for each replica)."""
        self._do(lambda: self._answering.renew(replicas))

    def drop(self, names: Iterable[str]) -> None:
        """End these; what became of them is not told."""
        self._do(lambda: self._answering.drop(names))

    def partials(self) -> dict[str, Output]:
        """What there is of answers under way, by trajectory."""
        return self._wait(self._answering.partials())

    def close(self) -> None:
        """End what is left, and tell whoever collects."""
        self._wait(self._answering.close())
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _done(self, row: AskedRow, trajectory: Trajectory) -> None:
        with self._changed:
            self._finished.append(trajectory)
            self._changed.notify_all()

    def _lose(self, why: str) -> None:
        with self._changed:
            self._lost = self._lost or why
            self._changed.notify_all()

    def _do(self, act: Callable[[], None]) -> None:
        async def acting() -> None:
            act()

        self._wait(acting())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
