"""Tensor parallelism: one model over several ranks, each with a shard of every matmul.

Rank 0 of the group (the leader) schedules; the followers execute the plans it broadcasts. All ranks see the same logits
and sample with the same noise, so tokens need not be sent. When the leader has halted (see `AsyncEngine.halt`), it also
broadcasts a halt mark: a follower that receives it has received all plans before the halt.
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
from verl.inference.engine import PendingStep, Runner, StepEngine
from verl.inference.step_plan import StepPlan
from verl.types.request import Output, Request

__all__ = ["SINGLE", "FollowerEngine", "LeaderEngine", "LeaderRunner", "TensorParallel"]

# Messages of the leader besides plans: it has halted; it has closed.
_HALT_MARK, _END = "halt", "end"


class TensorParallel:
    """This rank's position in its group, and collectives between the ranks that share a model."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        plan_group: dist.ProcessGroup | None = None,
        cpu_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group` is for device tensors. `plan_group` (gloo) broadcasts plans between the engine threads; `cpu_group`
        (gloo) is for collectives of the calling threads."""
        self.rank, self.size = rank, size
        self.group, self.plan_group, self.cpu_group = group, plan_group, cpu_group

    @classmethod
    def from_world(cls, size: int) -> TensorParallel:
        """Split the default process group into groups of `size` neighbouring ranks; return that of this rank.

        Every rank must call this.
        """
        if size == 1:
            return SINGLE
        if not dist.is_initialized():
            raise ValueError(
                f"tensor_model_parallel_size: {size} ranks share an engine, but there is no process group."
                " Initialise torch.distributed first, or set tensor_model_parallel_size=1."
            )
        world, rank, tp_rank = dist.get_world_size(), dist.get_rank(), 0
        if world % size:
            raise ValueError(f"tensor_model_parallel_size: {size} does not divide the {world} ranks.")
        own_groups: dict[str, Any] = {}
        for first in range(0, world, size):
            ranks = list(range(first, first + size))
            # A long timeout: no plan arrives while the model trains.
            groups = {
                "group": dist.new_group(ranks),
                "plan_group": dist.new_group(ranks, timedelta(days=365), backend="gloo"),
                "cpu_group": dist.new_group(ranks, backend="gloo"),
            }
            if rank in ranks:
                tp_rank, own_groups = rank - first, groups
        return cls(tp_rank, size, **own_groups)

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over the ranks; in place if `x` is contiguous."""
        if self.size > 1:
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' `x` [rows, columns] to [rows, columns * size]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def all_reduce_min(self, number: int) -> int:
        """The minimum of the ranks' numbers."""
        if self.size == 1:
            return number
        minimum = torch.tensor([number])
        dist.all_reduce(minimum, dist.ReduceOp.MIN, group=self.cpu_group)
        return int(minimum)

    def exchange_error(self, error: Exception | None) -> Exception | None:
        """Return this rank's error; if only other ranks failed, an error with their messages; None if no rank failed.
        Every rank of the group must call this."""
        if self.size == 1:
            return error
        texts: list[str | None] = [None] * self.size
        dist.all_gather_object(texts, error and f"{type(error).__name__}: {error}", group=self.cpu_group)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if error is not None or not failed:
            return error
        return RuntimeError(f"rollout: another rank of this tensor-parallel engine has failed. {'; '.join(failed)}")

    def send(self, message: Any) -> None:
        """Broadcast a message from the leader to the followers."""
        dist.broadcast_object_list([message], group_src=0, group=self.plan_group)

    def receive(self) -> Any:
        """Receive the next message of the leader."""
        received = [None]
        dist.broadcast_object_list(received, group_src=0, group=self.plan_group)
        return received[0]


SINGLE = TensorParallel()


class LeaderRunner:
    """The leader's runner: broadcasts each plan before it executes it."""

    def __init__(self, runner: Runner, parallel: TensorParallel) -> None:
        self._runner, self._parallel = runner, parallel
        self.steps_ahead = runner.steps_ahead

    def launch(self, plan: StepPlan) -> PendingStep:
        self._parallel.send(plan)
        return self._runner.launch(plan)


class LeaderEngine(AsyncEngine):
    """The leader's engine. After each halt it broadcasts a halt mark, which `FollowerEngine.halt` waits for."""

    def __init__(self, engine: StepEngine, parallel: TensorParallel, tokenizer: Callable[[], Any] | None) -> None:
        super().__init__(engine, tokenizer)
        self._parallel = parallel

    def halt(self, reason: str) -> None:
        super().halt(reason)
        self._parallel.send(_HALT_MARK)

    def close(self) -> None:
        super().close()
        self._parallel.send(_END)


class FollowerEngine:
    """A follower's engine: receives plans and executes them. Same interface as the leader's, without requests.

    The leader may resume before this rank has its memory or new weights: plans wait for `resume` on this rank.
    """

    def __init__(self, runner: Runner, parallel: TensorParallel) -> None:
        self.version = 0
        self._runner, self._parallel = runner, parallel
        self._halt_results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        """One entry per halt mark: the error of an earlier step, or None."""
        self._unread_halts = 0
        """Number of halt marks for which `halt` has not been called yet."""
        self._halt_reasons: set[str] = set()
        self._state_changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rollout-follower", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        raise RuntimeError(
            "rollout: requests must be submitted to the leader (rank 0 of the tensor-parallel group), not to this rank."
        )

    def halt(self, reason: str) -> None:
        """Return when the leader and this rank have halted; no plan is executed until `resume`.

        RuntimeError if a step failed on this rank.
        """
        error = self._halt_results.get()
        with self._state_changed:
            self._unread_halts -= 1
            self._halt_reasons.add(reason)
        if error is not None:
            raise RuntimeError("rollout: this tensor-parallel rank failed to execute a step.") from error

    def resume(self, reason: str) -> None:
        """Execute plans again, unless halted for another reason."""
        with self._state_changed:
            self._halt_reasons.discard(reason)
            self._state_changed.notify_all()

    # Requests, pauses and the queue are managed by the leader.

    def abort(self, ids: Iterable[str] | None) -> None: ...
    def pause(self, mode: str) -> None: ...
    def unpause(self) -> None: ...
    def invalidate_kv_cache(self, running: bool = True) -> None: ...
    def fail(self, error: BaseException) -> None: ...

    def close(self) -> None:
        """Return when the leader has closed."""
        self._thread.join()

    def _run(self) -> None:
        """Execute the leader's messages until it closes. Runs in its own thread.

        A failure is final, and all later halts raise it: the KV cache of this rank misses the skipped steps. The leader
        ends as well. If the step fails there, too, its `EngineHost` or the call that generates raises the error, which
        ends the run; otherwise its step waits for this rank in a collective, until that times out.
        """
        pending: deque[PendingStep] = deque()
        failure: BaseException | None = None
        while True:
            message = self._parallel.receive()
            if message == _END:
                return
            try:
                if message == _HALT_MARK:
                    while pending:
                        pending.popleft().wait()
                elif failure is None:
                    self._wait_until_ready()
                    pending.append(self._runner.launch(message))
                    if len(pending) > self._runner.steps_ahead:
                        pending.popleft().wait()
            except Exception as error:  # noqa: BLE001 - raised by the next `halt`
                failure = error
            if message == _HALT_MARK:
                with self._state_changed:
                    self._unread_halts += 1
                self._halt_results.put(failure)

    def _wait_until_ready(self) -> None:
        """Wait until every halt that the leader has announced was also called, and resumed, on this rank."""
        with self._state_changed:
            self._state_changed.wait_for(lambda: not self._unread_halts and not self._halt_reasons)
