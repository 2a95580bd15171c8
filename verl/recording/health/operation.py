"""Health rules about operation: rewards, agents, speed, restarts."""

from __future__ import annotations

import numpy as np

from verl.recording.health.run_tables import BASELINE, Finding, RunTables, finding, period_of, share_of_step

# ---------------------------------------------------------------- rewards, tools


def failing_rewards(run: RunTables) -> Finding | None:
    """More than one percent of the responses could not be scored."""
    steps, share = run.column("reward/scoring_failed/mean")
    period = period_of(steps, share > 0.01, 1)
    if period is None:
        return None
    return finding(
        run, "failing_rewards", "alert", "Rewards fail.", period,
        f"Up to {share.max():.1%} of the responses of a step could not be scored.",
        "The kind of each error is in reward_info of its response and in the events; try verl check.",
        [], "reward/scoring_failed/mean",
    )  # fmt: skip


def slow_rewards(run: RunTables) -> Finding | None:
    """Training waits for rewards for more than a fifth of the step."""
    share, steps = share_of_step(run, "timing_s/reward")
    period = period_of(steps, share > 0.2)
    if period is None:
        return None
    return finding(
        run, "slow_rewards", "warning", "Training waits for rewards.", period,
        f"{share[-1]:.0%} of the step.", "Score in more processes, or limit the time of a call.",
        [("reward_model.reward_kwargs", "{num_processes: 16, timeout: 5}")], "timing_s/reward",
    )  # fmt: skip


def failing_agents(run: RunTables) -> Finding | None:
    """More than five percent of the conversations of agents failed."""
    steps, share = run.groups.get("step", np.array([])), run.groups.get("failed", np.array([]))
    period = period_of(steps, share > 0.05, 1)
    if period is None:
        return None
    return finding(
        run, "failing_agents", "alert", "Conversations of agents fail.", period,
        f"{share.max():.0%} of the responses of a step have the status failed.",
        "Open a failed response (Groups, filter by status): its agent field has the error.", [], None,
    )  # fmt: skip


# ---------------------------------------------------------------- speed


def waiting_for_one_rank(run: RunTables) -> Finding | None:
    """All ranks wait for one for more than 15 % of the step."""
    share, steps = share_of_step(run, "timing_s/waiting_for_one_rank")
    period = period_of(steps, share > 0.15)
    if period is None:
        return None
    return finding(
        run, "waiting_for_one_rank", "warning", "Ranks wait for one slow rank.", period,
        f"{share[-1]:.0%} of the step.",
        "See who waited for whom (Timeline); balance tokens, and check the device of the slow rank.",
        [("trainer.balance_batch", "True")], "timing_s/waiting_for_one_rank",
    )  # fmt: skip


def training_waits_for_generation(run: RunTables) -> Finding | None:
    """In an asynchronous run, training waits for responses for more than 40 % of the step."""
    share, steps = share_of_step(run, "timing_s/gen")
    period = period_of(steps, share > 0.4)
    if period is None or run.setting("trainer.mode", "sync") == "sync":
        return None
    return finding(
        run, "training_waits_for_generation", "warning", "Training waits for generation.", period,
        f"{share[-1]:.0%} of the step.", "Use more devices for generation, or allow older responses.",
        [("trainer.max_staleness", str(1 + int(run.setting("trainer.max_staleness", 1))))], "timing_s/gen",
    )  # fmt: skip


def full_kv_cache(run: RunTables) -> Finding | None:
    """Requests wait while the KV cache is full."""
    used, waiting = run.engines.get("kv_used", np.array([])), run.engines.get("waiting", np.array([]))
    full = (used > 0.95) & (waiting > 0)
    if len(full) < 10 or full.mean() <= 0.25:
        return None
    share = float(run.setting("actor_rollout_ref.rollout.gpu_memory_utilization", 0.4))
    return finding(
        run, "full_kv_cache", "warning", "The KV cache is full.", (run.last_step, run.last_step),
        f"{full.mean():.0%} of the newest records: requests wait, and more than 95 % of the cache is used.",
        "Give the engine more memory, or run fewer requests at once.",
        [("actor_rollout_ref.rollout.gpu_memory_utilization", f"{min(0.9, share + 0.1):.1f}")], None,
    )  # fmt: skip


def preemptions(run: RunTables) -> Finding | None:
    """Requests were preempted in more than a tenth of the newest records: their KV is computed again."""
    counts = run.engines.get("preemptions", np.array([]))
    counts = counts[~np.isnan(counts)]
    if len(counts) < 10 or (counts > 0).mean() <= 0.1:
        return None
    requests = int(run.setting("actor_rollout_ref.rollout.max_num_seqs", 1024))
    return finding(
        run, "preemptions", "warning", "Requests are preempted.", (run.last_step, run.last_step),
        f"{int(counts.sum())} preemptions in the newest {len(counts)} records: the KV cache is too small for the"
        " requests that run at once.",
        "Run fewer requests at once, or give the engine more memory.",
        [("actor_rollout_ref.rollout.max_num_seqs", str(max(1, requests // 2)))], None,
    )  # fmt: skip


def low_mfu(run: RunTables) -> Finding | None:
    """The actor update uses less than a tenth of the peak rate of its devices."""
    # `actor_computed` counts only computed work; `actor` also counts shared prefixes, which are not computed again.
    name = "perf/mfu/actor_computed" if "perf/mfu/actor_computed" in run.metrics else "perf/mfu/actor"
    steps, share = run.column(name)
    period = period_of(steps, share < 0.1, BASELINE)
    if period is None:
        return None
    return finding(
        run, "low_mfu", "warning", "The actor update uses its devices poorly.", period,
        f"{share[-1]:.1%} of the peak rate (MFU).",
        "Larger micro-batches of packed sequences; fewer devices for a small model.",
        [("actor_rollout_ref.model.use_remove_padding", "True"), ("actor_rollout_ref.actor.use_dynamic_bsz", "True")],
        name,
    )  # fmt: skip


def idle_devices(run: RunTables) -> Finding | None:
    """Devices run kernels in less than half of the time."""
    used = run.devices.get("utilization", np.array([]))
    used = used[~np.isnan(used)]
    if len(used) < 20 or used.mean() >= 0.5:
        return None
    return finding(
        run, "idle_devices", "warning", "Devices are idle.", (run.last_step, run.last_step),
        f"A kernel runs in {used.mean():.0%} of the time.",
        "See which phase leaves them idle (Timeline); larger micro-batches, or more concurrent requests.",
        [("actor_rollout_ref.actor.use_dynamic_bsz", "True")], None,
    )  # fmt: skip


def slow_phase(run: RunTables) -> Finding | None:
    """A phase of a recent step took more than three times its median."""
    skipped = ("timing_s/step", "timing_s/record", "timing_s/testing", "timing_s/save_checkpoint")
    worst: tuple[float, str, int, float, float] | None = None
    total = float(np.median(run.column("timing_s/step")[1])) if len(run.column("timing_s/step")[1]) else 0.0
    for name in run.metrics:
        steps, seconds = run.column(name)
        if not name.startswith("timing_s/") or name in skipped or len(seconds) < 10:
            continue
        median, recent = float(np.median(seconds)), seconds[-20:]
        number = len(seconds) - len(recent) + int(np.argmax(recent))
        extra = float(seconds[number]) - median
        # The first step starts engines and compiles.
        if number > 0 and seconds[number] > 3 * median and extra > 0.2 * total and (worst is None or extra > worst[0]):
            worst = (extra, name, int(steps[number]), float(seconds[number]), median)
    if worst is None:
        return None
    _, name, step, seconds_, median = worst
    return finding(
        run, "slow_phase", "warning", "A phase took far longer than usual.", (step, step),
        f"Step {step}: {name.removeprefix('timing_s/')} took {seconds_:.1f} s, its median is {median:.1f} s.",
        "See what the ranks did in this step (Timeline) and the events at this time.", [], name,
    )  # fmt: skip


# ---------------------------------------------------------------- events


def restarts(run: RunTables) -> Finding | None:
    """The run was restarted, or lost workers."""
    interruptions = [e for e in run.events if e["kind"] in ("resume", "restart", "recovery")]
    if not interruptions:
        return None
    causes = [e["message"] for e in run.events if e["kind"] in ("end", "restart", "recovery") and e["message"]]
    steps = [int(event["step"] or 0) for event in interruptions]
    cause = f" The last cause: {causes[-1][:200]}" if causes else ""
    return finding(
        run, "restarts", "warning", "The run was restarted.", (steps[0], steps[-1]),
        f"{len(interruptions)} time{'s' if len(interruptions) > 1 else ''}.{cause}",
        "The events have the cause of each restart; save more often if much work was lost.", [], None,
    )  # fmt: skip


def stalled(run: RunTables) -> Finding | None:
    """Nothing has been recorded for many times the duration of a step, and the run has not ended."""
    times = run.metrics.get("time", np.array([]))
    ended = bool(run.events) and [e for e in run.events if e["kind"] in ("start", "resume", "end")][-1:]
    if run.now is None or len(times) < 3 or (ended and ended[0]["kind"] == "end"):
        return None
    step = float(np.median(np.diff(times)))
    silent = run.now - float(times[-1])
    if silent < max(60.0, 10 * step):
        return None
    return finding(
        run, "stalled", "alert", "The run does not continue.", (run.last_step, run.last_step),
        f"No step has ended for {silent / 60:.0f} min; a step takes {step:.1f} s.",
        "A rank may have stopped: see the last phase of every track (Timeline).", [], None,
    )  # fmt: skip
