"""Health rules: each is a pure function of recorded tables that returns a finding with its figure and remedy, or None.

    run = verl.recording.read(folder)
    findings(load(run, time.time()))

A rule reports the newest period of steps in which its condition held. `findings` calls all of `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable

from verl.recording.health import learning, operation
from verl.recording.health.run_tables import Cache, Finding, RunTables, load

__all__ = ["RULES", "Cache", "Finding", "RunTables", "findings", "load"]

RULES: tuple[Callable[[RunTables], Finding | None], ...] = (
    learning.no_signal,
    learning.truncation,
    learning.entropy_collapse,
    learning.constant_reward,
    learning.growing_mismatch,
    learning.diverging_kl,
    learning.exploding_gradient,
    learning.reward_without_validation,
    learning.length_drift,
    learning.common_phrase,
    operation.failing_rewards,
    operation.slow_rewards,
    operation.failing_agents,
    operation.waiting_for_one_rank,
    operation.training_waits_for_generation,
    operation.full_kv_cache,
    operation.preemptions,
    operation.low_mfu,
    operation.idle_devices,
    operation.slow_phase,
    operation.restarts,
    operation.stalled,
)


def findings(tables: RunTables) -> list[Finding]:
    """The findings of all rules: current ones first, alerts before warnings."""
    reported = [finding for rule in RULES if (finding := rule(tables)) is not None]
    return sorted(reported, key=lambda finding: (not finding.is_current, finding.level != "alert", -finding.last_step))
