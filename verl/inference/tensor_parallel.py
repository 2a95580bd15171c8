"""TensorParallel: one model over several ranks. Each holds a part of every matmul; sums and pieces meet between them.

Rank 0 of the group schedules; the others carry out the plans it sends. All see the same logits and draw with the same
noise, so tokens need not be sent. Marks in the stream of plans tell followers when the leader has come to rest.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.inference.async_engine import AsyncEngine
from verl.inference.engine import Pending, Runner, StepEngine
from verl.inference.step_plan import StepPlan
from verl.types.request import Output, Request

__all__ = ["SINGLE", "FollowingEngine", "LeadingEngine", "LeadingRunner", "TensorParallel"]

# What the leader says beside plans.
_MARK, _END = "mark", "end"


class TensorParallel:
    """This rank's place in its group: sums and gathers between the ranks that share a model."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: Any = None, channel: Any = None, meeting: Any = None
    ) -> None:
        """`group` moves tensors of the device; of the two gloo groups, `channel` moves plans from the leader's thread
        to the followers', and at `meeting` those who call the engine agree on numbers."""
        self.rank, self.size = rank, size
        self.group, self.channel, self.meeting = group, channel, meeting

    @classmethod
    def of_world(cls, size: int) -> TensorParallel:
        """Neighbouring ranks of the process group, `size` each. Every rank of it must call this."""
        if size == 1:
            return SINGLE
        if not dist.is_initialized():
            raise ValueError(
                f"tensor_model_parallel_size: {size} ranks share an engine, and this one is alone. Start it in a"
                " process group, or set it to 1."
            )
        world, rank = dist.get_world_size(), dist.get_rank()
        if world % size:
            raise ValueError(f"tensor_model_parallel_size: {size} does not divide the {world} ranks.")
        mine: dict[str, Any] = {}
        for first in range(0, world, size):
            ranks = list(range(first, first + size))
            # Nothing comes through the channel while the model trains, for however long.
            groups = {
                "group": dist.new_group(ranks),
                "channel": dist.new_group(ranks, timedelta(days=365), backend="gloo"),
                "meeting": dist.new_group(ranks, backend="gloo"),
            }
            if rank in ranks:
                mine = {"rank": rank - first, **groups}
        return cls(size=size, **mine)

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` added up, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` [rows, columns] side by side: [rows, columns of all]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def smallest(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        if self.size == 1:
            return number
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.meeting)
        return int(found)

    def send(self, message: Any) -> None:
        """From the leader to all others."""
        dist.broadcast_object_list([message], group_src=0, group=self.channel)

    def receive(self) -> Any:
        box = [None]
        dist.broadcast_object_list(box, group_src=0, group=self.channel)
        return box[0]


SINGLE = TensorParallel()


class LeadingRunner:
    """The leader's runner: tells the others what it is about to compute."""

    def __init__(self, runner: Runner, parallel: TensorParallel) -> None:
        self._runner, self._parallel = runner, parallel
        self.lag = runner.lag

    def launch(self, plan: StepPlan) -> Pending:
        self._parallel.send(plan)
        return self._runner.launch(plan)


class LeadingEngine(AsyncEngine):
    """The leader's loop. Whenever it comes to rest it says so; followers that wait for it go on then."""

    def __init__(self, engine: StepEngine, parallel: TensorParallel, tokenizer: Callable[[], Any] | None) -> None:
        super().__init__(engine, tokenizer)
        self._parallel = parallel

    def halt(self, reason: str) -> None:
        super().halt(reason)
        self.say_at_rest()

    def say_at_rest(self) -> None:
        """Everything that was submitted is answered, or the loop is halted."""
        self._parallel.send(_MARK)

    def close(self) -> None:
        super().close()
        self._parallel.send(_END)


class FollowingEngine:
    """The others' loop: receives plans and carries them out. It has the leader's surface; requests are the leader's.

    The leader may go on before this rank has its memory or its new weights: plans wait from a halt to its end.
    """

    def __init__(self, runner: Runner, parallel: TensorParallel) -> None:
        self.version = 0
        self._runner, self._parallel = runner, parallel
        self._marks: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._unheard = 0  # marks that nobody here has waited for yet
        self._halted: set[str] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rollout-follower", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        raise RuntimeError("rollout: requests go to the first of the ranks that share an engine, not to this one.")

    def halt(self, reason: str) -> None:
        """Return when the leader has come to rest and so has this rank; no plan is carried out until `go`."""
        error = self._marks.get()
        with self._changed:
            self._unheard -= 1
            self._halted.add(reason)
        if error is not None:
            raise RuntimeError("rollout: this tensor-parallel rank could not carry out a step.") from error

    def go(self, reason: str) -> None:
        """Carry out plans again, unless halted for another reason."""
        with self._changed:
            self._halted.discard(reason)
            self._changed.notify_all()

    # Requests, pauses and the queue are the leader's affair.

    def abort(self, ids: Iterable[str] | None) -> None: ...
    def pause(self, mode: str) -> None: ...
    def unpause(self) -> None: ...
    def recompute(self, running: bool = True) -> None: ...
    def fail(self, error: BaseException) -> None: ...

    def close(self) -> None:
        """Return when the leader has said that it ends."""
        self._thread.join()

    def _run(self) -> None:
        pending: deque[Pending] = deque()
        failure: BaseException | None = None
        while True:
            message = self._parallel.receive()
            if message == _END:
                return
            try:
                if message == _MARK:
                    while pending:
                        pending.popleft().wait()
                elif failure is None:
                    self._wait_until_ready()
                    pending.append(self._runner.launch(message))
                    if len(pending) > self._runner.lag:
                        pending.popleft().wait()
            except Exception as error:  # noqa: BLE001 - raised where the next mark is waited for
                failure = error
            if message == _MARK:
                with self._changed:
                    self._unheard += 1
                self._marks.put(failure)

    def _wait_until_ready(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._unheard and not self._halted)
