"""Health rules: each is a pure function of recorded tables that returns a finding with its figure and remedy, or None.

    run = verl.recording.read(folder)
    findings(load(run, time.time()))

A rule reports the newest period of steps in which its condition held. `findings` calls all of `RULES`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from verl.recording.run_tables import RunTables, load

__all__ = ["RULES", "Finding", "RunTables", "findings", "load"]

# Consecutive steps in which a condition must hold.
_STEADY = 3
# Steps at the beginning that later ones are compared with.
_BASELINE = 5
_PHRASE_WORDS = 6


class Finding(NamedTuple):
    """A problem of a run. `settings`: keys with values that would help."""

    rule: str
    level: Literal["alert", "warning"]
    title: str
    figure: str
    remedy: str
    settings: list[tuple[str, str]]
    first_step: int
    last_step: int
    is_current: bool
    """Whether it held until the newest step."""
    metric: str | None = None
    """Metric that shows it."""


def findings(tables: RunTables) -> list[Finding]:
    """The findings of all rules: current ones first, alerts before warnings."""
    found = [finding for rule in RULES if (finding := rule(tables)) is not None]
    return sorted(found, key=lambda finding: (not finding.is_current, finding.level != "alert", -finding.last_step))


# ---------------------------------------------------------------- learning signal


def no_signal(run: RunTables) -> Finding | None:
    """More than half of the groups have the same score for all answers."""
    steps, share = run.groups.get("step", np.array([])), run.groups.get("no_signal", np.array([]))
    period = _period(steps, share > 0.5)
    if period is None:
        return None
    best = float(run.groups["all_best"][-1])
    return _finding(
        run, "no_signal", "alert", "Most groups have no learning signal.", period,
        f"{share[-1]:.0%} of the groups have one score for all answers ({best:.0%} all at the maximum).",
        "Drop such groups, or use prompts of another difficulty; if every group is affected, check the reward.",
        [("algorithm.filter_groups.enable", "True")], "reward/mean",
    )  # fmt: skip


def truncation(run: RunTables) -> Finding | None:
    """More than a quarter of the answers are truncated."""
    steps, share = run.column("response_length/clip_ratio")
    period = _period(steps, share > 0.25)
    if period is None:
        return None
    longest = int(run.setting("data.max_response_length", 1024))
    return _finding(
        run, "truncation", "alert", "Many answers are truncated.", period,
        f"{share[-1]:.0%} of the answers reach max_response_length ({longest} tokens).",
        "Allow longer answers, or penalise long ones.",
        [("data.max_response_length", str(2 * longest)), ("reward_model.overlong_buffer.enable", "True")],
        "response_length/clip_ratio",
    )  # fmt: skip


def entropy_collapse(run: RunTables) -> Finding | None:
    """The entropy fell below a fifth of its initial value."""
    steps, entropy = run.column("actor/entropy")
    if len(entropy) <= _BASELINE:
        return None
    initial = float(entropy[:_BASELINE].mean())
    period = _period(steps, entropy < 0.2 * initial)
    if period is None or initial <= 0:
        return None
    return _finding(
        run, "entropy_collapse", "warning", "The entropy has collapsed.", period,
        f"{entropy[-1]:.3g} nats now, {initial:.3g} at the beginning.",
        "Clip increases of probability less, or add an entropy bonus.",
        [("actor_rollout_ref.actor.clip_ratio_high", "0.28"), ("actor_rollout_ref.actor.entropy_coeff", "0.001")],
        "actor/entropy",
    )  # fmt: skip


def constant_reward(run: RunTables) -> Finding | None:
    """The reward has the same value in all steps."""
    steps, reward = run.column("reward/mean", "critic/score/mean")
    if len(reward) < _BASELINE or np.ptp(reward[-_BASELINE:]) > 0:
        return None
    constant = reward == reward[-1]
    first = int(steps[len(constant) - int(np.argmin(constant[::-1]))]) if not constant.all() else int(steps[0])
    return _finding(
        run, "constant_reward", "alert", "The reward is constant.", (first, int(steps[-1])),
        f"The mean reward is {reward[-1]:g} in every step since step {first}.",
        "Check the reward function on recorded answers: verl check.", [], "reward/mean",
    )  # fmt: skip


# ---------------------------------------------------------------- stability


def growing_mismatch(run: RunTables) -> Finding | None:
    """Rollout and trainer log-probs differ more and more."""
    steps, mismatch = run.column("rollout/log_prob_diff_mean", "rollout_corr/log_prob_diff")
    if len(mismatch) <= _BASELINE:
        return None
    initial = float(mismatch[:_BASELINE].mean())
    period = _period(steps, mismatch > max(0.02, 3 * initial))
    if period is None:
        return None
    return _finding(
        run, "growing_mismatch", "alert", "Rollout and trainer disagree more and more.", period,
        f"Mean difference of log-probs: {mismatch[-1]:.3g} nats now, {initial:.3g} at the beginning.",
        "Correct it by importance weights, and compute in the same precision.",
        [("algorithm.rollout_correction.rollout_is", "token")], "rollout/log_prob_diff_mean",
    )  # fmt: skip


def diverging_kl(run: RunTables) -> Finding | None:
    """One update changes the policy by far more than usual, or the KL to the reference explodes."""
    for name, limit in (("actor/approx_kl", 0.1), ("actor/ppo_kl", 0.1), ("kl/mean", 1.0), ("actor/kl_loss", 1.0)):
        steps, divergence = run.column(name)
        period = _period(steps, np.abs(divergence) > limit, 2)
        if period is not None:
            rate = float(run.setting("actor_rollout_ref.actor.optim.lr", 1e-6))
            return _finding(
                run, "diverging_kl", "alert", "The policy diverges.", period,
                f"{name} is {divergence[-1]:.3g} (limit {limit:g}).",
                "Lower the learning rate, or use a KL loss.",
                [("actor_rollout_ref.actor.optim.lr", f"{rate / 10:.1e}"),
                 ("actor_rollout_ref.actor.use_kl_loss", "True")], name,
            )  # fmt: skip
    return None


def exploding_gradient(run: RunTables) -> Finding | None:
    """The gradient norm is far above its median, or updates were skipped because it was not finite."""
    steps, skipped = run.column("actor/skipped_steps", "train/skipped_steps")
    period, figure = _period(steps, skipped > 0, 1), "An update was skipped: its gradient was not finite."
    if period is None:
        steps, norm = run.column("actor/grad_norm", "train/grad_norm")
        if len(norm) < _BASELINE:
            return None
        period = _period(steps, norm > 10 * np.median(norm), 2)
        figure = f"The largest gradient norm is {norm.max():.3g}, its median {np.median(norm):.3g}."
    if period is None:
        return None
    supervised = "train/grad_norm" in run.metrics
    key = "optim.lr" if supervised else "actor_rollout_ref.actor.optim.lr"
    rate = float(run.setting(key, 1e-6))
    return _finding(
        run, "exploding_gradient", "alert", "The gradient explodes.", period, figure,
        "Lower the learning rate.", [(key, f"{rate / 10:.1e}")], "train/grad_norm" if supervised else "actor/grad_norm",
    )  # fmt: skip


# ---------------------------------------------------------------- signs of reward hacking


def reward_without_validation(run: RunTables) -> Finding | None:
    """The reward rises while the validation accuracy falls."""
    name = next((n for n in run.metrics if re.fullmatch(r"val/.+/accuracy|val-core/.+/mean@\d+", n)), None)
    if name is None:
        return None
    steps, accuracy = run.column(name)
    reward_steps, reward = run.column("reward/mean", "critic/score/mean")
    if len(accuracy) < 4 or len(reward) < 2 * _BASELINE:
        return None
    best = int(np.argmax(accuracy[:-1]))
    since = reward[reward_steps >= steps[best]]
    lost, gained = float(accuracy[best] - accuracy[-2:].mean()), float(since[-3:].mean() - since[:3].mean())
    if lost < 0.03 or gained < 0.02:
        return None
    return _finding(
        run, "reward_without_validation", "alert", "The reward rises while validation falls.",
        (int(steps[best]), int(steps[-1])),
        f"Since step {int(steps[best])}: reward {gained:+.3f}, {name} {-lost:+.3f}.",
        "Read answers with a high reward (Groups), fix the reward, and continue from the best checkpoint.",
        [("actor_rollout_ref.actor.use_kl_loss", "True")], name,
    )  # fmt: skip


def length_drift(run: RunTables) -> Finding | None:
    """The answers became more than twice as long, or less than half as long."""
    steps, length = run.column("response_length/mean")
    if len(length) <= 2 * _BASELINE:
        return None
    initial = float(length[:_BASELINE].mean())
    period = _period(steps, (length > 2 * initial) | (length < 0.5 * initial))
    if period is None:
        return None
    return _finding(
        run, "length_drift", "warning", "The length of the answers drifts.", period,
        f"{length[-1]:.0f} tokens now, {initial:.0f} at the beginning.",
        "Compare long and short answers of one group (Groups); if the length is exploited, limit it.",
        [("reward_model.overlong_buffer.enable", "True")], "response_length/mean",
    )  # fmt: skip


def common_phrase(run: RunTables) -> Finding | None:
    """One phrase is in most answers of the newest step, and was not at the beginning."""
    if len(run.last_texts) < 8:
        return None
    counts = _phrases(run.last_texts)
    before = _phrases(run.first_texts)
    for phrase, count in counts.most_common(50):
        share = count / len(run.last_texts)
        if share <= 0.5:
            return None
        earlier = before[phrase] / max(1, len(run.first_texts))
        if earlier < 0.5 * share:
            return _finding(
                run, "common_phrase", "warning", "One phrase is in most answers.", (run.last_step, run.last_step),
                f"“{phrase}” is in {share:.0%} of the answers of the newest step, in {earlier:.0%} at the beginning.",
                "Search for it (Groups): if it is rewarded without being right, fix the reward.", [], None,
            )  # fmt: skip
    return None


# ---------------------------------------------------------------- rewards, tools


def failing_rewards(run: RunTables) -> Finding | None:
    """More than one percent of the answers could not be scored."""
    steps, share = run.column("reward/scoring_failed/mean")
    period = _period(steps, share > 0.01, 1)
    if period is None:
        return None
    return _finding(
        run, "failing_rewards", "alert", "Rewards fail.", period,
        f"Up to {share.max():.1%} of the answers of a step could not be scored.",
        "The kind of each error is in reward_info of its answer and in the events; try verl check.",
        [], "reward/scoring_failed/mean",
    )  # fmt: skip


def slow_rewards(run: RunTables) -> Finding | None:
    """Training waits for rewards for more than a fifth of the step."""
    share, steps = _share_of_step(run, "timing_s/reward")
    period = _period(steps, share > 0.2)
    if period is None:
        return None
    return _finding(
        run, "slow_rewards", "warning", "Training waits for rewards.", period,
        f"{share[-1]:.0%} of the step.", "Score in more processes, or limit the time of a call.",
        [("reward_model.reward_kwargs", "{num_processes: 16, timeout: 5}")], "timing_s/reward",
    )  # fmt: skip


def failing_agents(run: RunTables) -> Finding | None:
    """More than five percent of the conversations of agents failed."""
    steps, share = run.groups.get("step", np.array([])), run.groups.get("failed", np.array([]))
    period = _period(steps, share > 0.05, 1)
    if period is None:
        return None
    return _finding(
        run, "failing_agents", "alert", "Conversations of agents fail.", period,
        f"{share.max():.0%} of the answers of a step have the status failed.",
        "Open a failed answer (Groups, filter by status): its agent field has the error.", [], None,
    )  # fmt: skip


# ---------------------------------------------------------------- speed


def waiting_for_one_rank(run: RunTables) -> Finding | None:
    """All ranks wait for one for more than 15 % of the step."""
    share, steps = _share_of_step(run, "timing_s/waiting_for_one_rank")
    period = _period(steps, share > 0.15)
    if period is None:
        return None
    return _finding(
        run, "waiting_for_one_rank", "warning", "Ranks wait for one slow rank.", period,
        f"{share[-1]:.0%} of the step.",
        "See who waited for whom (Timeline); balance tokens, and check the device of the slow rank.",
        [("trainer.balance_batch", "True")], "timing_s/waiting_for_one_rank",
    )  # fmt: skip


def training_waits_for_generation(run: RunTables) -> Finding | None:
    """In an asynchronous run, training waits for answers for more than 40 % of the step."""
    share, steps = _share_of_step(run, "timing_s/gen")
    period = _period(steps, share > 0.4)
    if period is None or run.setting("trainer.mode", "sync") == "sync":
        return None
    return _finding(
        run, "training_waits_for_generation", "warning", "Training waits for generation.", period,
        f"{share[-1]:.0%} of the step.", "Use more devices for generation, or allow older answers.",
        [("trainer.max_staleness", str(1 + int(run.setting("trainer.max_staleness", 1))))], "timing_s/gen",
    )  # fmt: skip


def full_kv_cache(run: RunTables) -> Finding | None:
    """Requests wait while the KV cache is full."""
    used, waiting = run.engines.get("kv_used", np.array([])), run.engines.get("waiting", np.array([]))
    full = (used > 0.95) & (waiting > 0)
    if len(full) < 10 or full.mean() <= 0.25:
        return None
    share = float(run.setting("actor_rollout_ref.rollout.gpu_memory_utilization", 0.4))
    return _finding(
        run, "full_kv_cache", "warning", "The KV cache is full.", (run.last_step, run.last_step),
        f"{full.mean():.0%} of the newest records: requests wait, and more than 95 % of the cache is used.",
        "Give the engine more memory, or run fewer requests at once.",
        [("actor_rollout_ref.rollout.gpu_memory_utilization", f"{min(0.9, share + 0.1):.1f}")], None,
    )  # fmt: skip


def idle_devices(run: RunTables) -> Finding | None:
    """Devices run kernels in less than half of the time."""
    used = run.devices.get("utilization", np.array([]))
    used = used[~np.isnan(used)]
    if len(used) < 20 or used.mean() >= 0.5:
        return None
    return _finding(
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
    return _finding(
        run, "slow_phase", "warning", "A phase took far longer than usual.", (step, step),
        f"Step {step}: {name.removeprefix('timing_s/')} took {seconds_:.1f} s, its median is {median:.1f} s.",
        "See what the ranks did in this step (Timeline) and the events at this time.", [], name,
    )  # fmt: skip


# ---------------------------------------------------------------- events


def restarts(run: RunTables) -> Finding | None:
    """The run was restarted, or lost workers."""
    kinds = [e for e in run.events if e["kind"] in ("resume", "restart", "recovery")]
    if not kinds:
        return None
    causes = [e["message"] for e in run.events if e["kind"] in ("end", "restart", "recovery") and e["message"]]
    steps = [int(event["step"] or 0) for event in kinds]
    cause = f" The last cause: {causes[-1][:200]}" if causes else ""
    return _finding(
        run, "restarts", "warning", "The run was restarted.", (steps[0], steps[-1]),
        f"{len(kinds)} time{'s' if len(kinds) > 1 else ''}.{cause}",
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
    return _finding(
        run, "stalled", "alert", "The run does not continue.", (run.last_step, run.last_step),
        f"No step has ended for {silent / 60:.0f} min; a step takes {step:.1f} s.",
        "A rank may have stopped: see the last phase of every lane (Timeline).", [], None,
    )  # fmt: skip


Rule = Callable[[RunTables], Finding | None]
RULES: tuple[Rule, ...] = (
    no_signal, constant_reward, truncation, entropy_collapse, growing_mismatch, diverging_kl, exploding_gradient,
    reward_without_validation, length_drift, common_phrase, failing_rewards, slow_rewards, failing_agents,
    waiting_for_one_rank, training_waits_for_generation, full_kv_cache, idle_devices, slow_phase, restarts, stalled,
)  # fmt: skip


# ---------------------------------------------------------------- helpers


def _period(steps: np.ndarray, condition: np.ndarray, length: int = _STEADY) -> tuple[int, int] | None:
    """First and last step of the newest period in which the condition held for at least `length` recorded steps."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], condition.astype(int), [0]])))
    periods = [(start, end - 1) for start, end in edges.reshape(-1, 2) if end - start >= length]
    return (int(steps[periods[-1][0]]), int(steps[periods[-1][1]])) if periods else None


def _finding(
    run: RunTables,
    rule: str,
    level: Literal["alert", "warning"],
    title: str,
    period: tuple[int, int],
    figure: str,
    remedy: str,
    settings: list[tuple[str, str]],
    metric: str | None,
) -> Finding:
    is_current = period[1] >= run.last_step - 1
    changed = [(key, value) for key, value in settings if str(run.setting(key, None)) != value]
    return Finding(rule, level, title, figure, remedy, changed, *period, is_current, metric)


def _share_of_step(run: RunTables, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Share of the step that a phase takes, and the steps."""
    if name not in run.metrics or "timing_s/step" not in run.metrics:
        return np.array([]), np.array([])
    share = run.metrics[name] / np.maximum(run.metrics["timing_s/step"], 1e-9)
    known = ~np.isnan(share)
    return share[known], run.metrics["step"][known]


def _phrases(texts: Sequence[str]) -> Counter[str]:
    """In how many texts every phrase of some words occurs."""
    counts: Counter[str] = Counter()
    for text in texts:
        words = text.split()
        phrases = (" ".join(words[i : i + _PHRASE_WORDS]) for i in range(len(words) - _PHRASE_WORDS + 1))
        counts.update(dict.fromkeys(phrases, 1))  # in order: equally frequent phrases keep theirs
    return counts
