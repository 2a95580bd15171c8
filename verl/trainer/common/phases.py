"""Phases of a step: `with phases("update_actor"):` adds its seconds, notes its peak memory, tells the status line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl.trainer.common.status_line import StatusLine

_ANSWER_S = 10.0


class Phases:
    """Seconds and, on GPUs, memory per phase of one training step: the peak as `name`, what stays as `name/after`.

    Workers are asked after a phase of theirs only: asking costs the controller milliseconds. Peaks of nested phases are
    the outer one's too.
    """

    def __init__(
        self,
        status: StatusLine,
        memory: Callable[[tuple[Any, ...]], tuple[float, float]] | None = None,
        enter: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`memory` gives (peak since it was last asked, now) in GB, of the fullest rank of some groups.

        `enter` is told of every phase before it begins, and may refuse it.
        """
        self._status, self._memory, self._enter = status, memory, enter
        self._running: dict[str, float] = {}
        self._peaks: list[float] = []
        self.seconds: dict[str, float] = {}
        self.memory_gb: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, *groups: Any) -> Iterator[None]:
        """Time a phase, in which these worker groups work; nested phases each count their own whole time."""
        self._enter(name)
        start, inner = time.perf_counter(), len(self._peaks)
        self._running[name] = start
        try:
            with self._status.phase(name, *groups):
                yield
        finally:
            self._running.pop(name, None)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        working = tuple(group for group in groups if group is not None)
        if self._memory is not None and working:
            peak, self.memory_gb[f"{name}/after"] = self._memory(working)
            self._peaks.append(peak)
        if self._peaks[inner:]:
            self.memory_gb[name] = max(self.memory_gb.get(name, 0.0), *self._peaks[inner:])

    def within(self, name: str) -> bool:
        """Whether this phase runs now."""
        return name in self._running

    def spent(self) -> dict[str, float]:
        """Seconds by phase so far, those that run included. From any thread."""
        now, seconds = time.perf_counter(), dict(self.seconds)
        for name, start in dict(self._running).items():
            seconds[name] = seconds.get(name, 0.0) + now - start
        return seconds


def memory_gb(groups: tuple[Any, ...]) -> tuple[float, float]:
    """(peak since last asked, now) of the fullest rank that works; one that is gone is found by its next call."""
    ranks = [memory for group in groups for memory in group.ask("memory_gb", _ANSWER_S) if memory is not None]
    return max((peak for peak, _ in ranks), default=0.0), max((now for _, now in ranks), default=0.0)


# What helps where a phase takes most of the time.
_REMEDIES = {
    "gen": "shorter answers (data.max_response_length), a larger actor_rollout_ref.rollout.gpu_memory_utilization",
    "reward": "a faster reward function, more scorers (reward_model.reward_kwargs.num_processes)",
    "ref": "no KL (use_kl_loss, use_kl_in_reward), larger ref.log_prob_micro_batch_size_per_gpu",
    "teacher": "larger distillation.teacher.log_prob_micro_batch_size_per_gpu, a pool of their own (role_mapping)",
    "old_log_prob": "larger actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "values": "larger critic.forward_micro_batch_size_per_gpu",
    "update_actor": "larger actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, no gradient checkpointing",
    "update_critic": "larger critic.ppo_micro_batch_size_per_gpu, or an estimator without a critic (grpo)",
    "testing": "a larger trainer.test_freq, fewer validation rows (data.val_max_samples)",
    "save_checkpoint": "a larger trainer.save_freq",
}


# The same for generation whose agents wait for tools more than for the model.
_IN_TOOLS = (
    "faster tools, more concurrent conversations (a larger actor_rollout_ref.rollout.agent.max_concurrent_requests), a"
    " shorter actor_rollout_ref.rollout.multi_turn.tool_timeout"
)


def verdict(seconds: dict[str, float], tool_share: float = 0.0) -> str:
    """One line: which phase takes most of the run, and what would help. `tool_share`: of the agents' time."""
    phases = {name: value for name, value in seconds.items() if name != "step"}
    total = sum(phases.values())
    if total <= 0:
        return "no step was timed"
    name = max(phases, key=lambda phase: phases[phase])
    waits = name == "gen" and tool_share > 0.5
    remedy = _IN_TOOLS if waits else _REMEDIES.get(name)
    said = f"{name} took {phases[name] / total:.0%} of the time" + (
        f", {tool_share:.0%} of it in tools" if waits else ""
    )
    return said + (f"; what helps: {remedy}" if remedy else "")
