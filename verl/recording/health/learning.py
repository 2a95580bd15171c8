"""Health rules about learning: signal, stability, signs of reward hacking."""

from __future__ import annotations

import functools
import re
from collections import Counter

import numpy as np

from verl.recording.health.run_tables import BASELINE, Finding, Level, RunTables, finding, period_of

_PHRASE_WORDS = 6


# ---------------------------------------------------------------- learning signal


def no_signal(run: RunTables) -> Finding | None:
    """More than half of the groups have the same score for all responses.

    An alert only above 90 %: with few responses per prompt, a run learns well from a third of its groups.
    """
    steps, share = run.groups.get("step", np.array([])), run.groups.get("no_signal", np.array([]))
    period = period_of(steps, share > 0.5)
    if period is None:
        return None
    best = float(run.groups["all_best"][-1])
    level: Level = "alert" if share[-1] > 0.9 else "warning"
    return finding(
        run, "no_signal", level, "Most groups have no learning signal.", period,
        f"{share[-1]:.0%} of the groups have one score for all responses ({best:.0%} all at the maximum).",
        "Drop such groups, or use prompts of another difficulty; if every group is affected, check the reward.",
        [("algorithm.filter_groups.enable", "True")], "reward/mean",
    )  # fmt: skip


def truncation(run: RunTables) -> Finding | None:
    """More than a quarter of the responses are truncated."""
    steps, share = run.column("response_length/clip_ratio")
    period = period_of(steps, share > 0.25)
    if period is None:
        return None
    longest = int(run.setting("data.max_response_length", 1024))
    _, mean = run.column("response_length/mean")
    if len(mean) and mean[-1] < 0.9 * share[-1] * longest:  # not all truncated responses can be that long
        return finding(
            run, "truncation", "alert", "Many responses are truncated.", period,
            f"{share[-1]:.0%} of the responses end at a limit below max_response_length ({longest} tokens):"
            f" they have {mean[-1]:.0f} on average.",
            "Check the limit of the rows (max_new_tokens), of agents, or of the context.", [],
            "response_length/clip_ratio",
        )  # fmt: skip
    return finding(
        run, "truncation", "alert", "Many responses are truncated.", period,
        f"{share[-1]:.0%} of the responses reach max_response_length ({longest} tokens).",
        "Allow longer responses, or penalise long ones.",
        [("data.max_response_length", str(2 * longest)), ("reward_model.overlong_buffer.enable", "True")],
        "response_length/clip_ratio",
    )  # fmt: skip


def entropy_collapse(run: RunTables) -> Finding | None:
    """The entropy fell below a fifth of its initial value."""
    steps, entropy = run.column("actor/entropy")
    if len(entropy) <= BASELINE:
        return None
    initial = float(entropy[:BASELINE].mean())
    period = period_of(steps, entropy < 0.2 * initial)
    if period is None or initial <= 0:
        return None
    return finding(
        run, "entropy_collapse", "warning", "The entropy has collapsed.", period,
        f"{entropy[-1]:.3g} nats now, {initial:.3g} at the beginning.",
        "Clip increases of probability less, or add an entropy bonus.",
        [("actor_rollout_ref.actor.clip_ratio_high", "0.28"), ("actor_rollout_ref.actor.entropy_coeff", "0.001")],
        "actor/entropy",
    )  # fmt: skip


def constant_reward(run: RunTables) -> Finding | None:
    """The mean reward has not changed for at least `BASELINE` steps."""
    steps, reward = run.column("reward/mean", "critic/score/mean")
    if len(reward) < BASELINE or np.ptp(reward[-BASELINE:]) > 0:
        return None
    constant = reward == reward[-1]
    first = int(steps[len(constant) - int(np.argmin(constant[::-1]))]) if not constant.all() else int(steps[0])
    return finding(
        run, "constant_reward", "alert", "The reward is constant.", (first, int(steps[-1])),
        f"The mean reward is {reward[-1]:g} in every step since step {first}.",
        "Check the reward function on recorded responses: verl check.", [], "reward/mean",
    )  # fmt: skip


# ---------------------------------------------------------------- stability


def growing_mismatch(run: RunTables) -> Finding | None:
    """Rollout and trainer log-probs differ more and more."""
    steps, mismatch = run.column("rollout/log_prob_diff_mean", "rollout_corr/log_prob_diff")
    if len(mismatch) <= BASELINE:
        return None
    initial = float(mismatch[:BASELINE].mean())
    period = period_of(steps, mismatch > max(0.02, 3 * initial))
    if period is None:
        return None
    return finding(
        run, "growing_mismatch", "alert", "Rollout and trainer disagree more and more.", period,
        f"Mean difference of log-probs: {mismatch[-1]:.3g} nats now, {initial:.3g} at the beginning.",
        "Correct it by importance weights, and compute in the same precision.",
        [("algorithm.rollout_correction.rollout_is", "token")], "rollout/log_prob_diff_mean",
    )  # fmt: skip


def diverging_kl(run: RunTables) -> Finding | None:
    """One update changes the policy by far more than usual, or the KL to the reference explodes."""
    for name, limit in (("actor/approx_kl", 0.1), ("actor/ppo_kl", 0.1), ("kl/mean", 1.0), ("actor/kl_loss", 1.0)):
        steps, divergence = run.column(name)
        period = period_of(steps, np.abs(divergence) > limit, 2)
        if period is not None:
            rate = float(run.setting("actor_rollout_ref.actor.optim.lr", 1e-6))
            return finding(
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
    period, figure = period_of(steps, skipped > 0, 1), "An update was skipped: its gradient was not finite."
    if period is None:
        steps, norm = run.column("actor/grad_norm", "train/grad_norm")
        if len(norm) < BASELINE:
            return None
        period = period_of(steps, norm > 10 * np.median(norm), 2)
        figure = f"The largest gradient norm is {norm.max():.3g}, its median {np.median(norm):.3g}."
    if period is None:
        return None
    supervised = "train/grad_norm" in run.metrics
    key = "optim.lr" if supervised else "actor_rollout_ref.actor.optim.lr"
    rate = float(run.setting(key, 1e-6))
    return finding(
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
    if len(accuracy) < 4 or len(reward) < 2 * BASELINE:
        return None
    best = int(np.argmax(accuracy[:-1]))
    since = reward[reward_steps >= steps[best]]
    lost, gained = float(accuracy[best] - accuracy[-2:].mean()), float(since[-3:].mean() - since[:3].mean())
    if lost < 0.03 or gained < 0.02:
        return None
    return finding(
        run, "reward_without_validation", "alert", "The reward rises while validation falls.",
        (int(steps[best]), int(steps[-1])),
        f"Since step {int(steps[best])}: reward {gained:+.3f}, {name} {-lost:+.3f}.",
        "Read responses with a high reward (Groups), fix the reward, and continue from the best checkpoint.",
        [("actor_rollout_ref.actor.use_kl_loss", "True")], name,
    )  # fmt: skip


def length_drift(run: RunTables) -> Finding | None:
    """The responses became more than twice as long, or less than half as long."""
    steps, length = run.column("response_length/mean")
    if len(length) <= 2 * BASELINE:
        return None
    initial = float(length[:BASELINE].mean())
    period = period_of(steps, (length > 2 * initial) | (length < 0.5 * initial))
    if period is None:
        return None
    return finding(
        run, "length_drift", "warning", "The length of the responses drifts.", period,
        f"{length[-1]:.0f} tokens now, {initial:.0f} at the beginning.",
        "Compare long and short responses of one group (Groups); if the length is exploited, limit it.",
        [("reward_model.overlong_buffer.enable", "True")], "response_length/mean",
    )  # fmt: skip


def common_phrase(run: RunTables) -> Finding | None:
    """One phrase is in most responses of the newest step, and was not at the beginning."""
    if len(run.last_texts) < 8:
        return None
    counts = _phrases(tuple(run.last_texts))
    before = _phrases(tuple(run.first_texts))
    for phrase, count in counts.most_common(50):
        share = count / len(run.last_texts)
        if share <= 0.5:
            return None
        earlier = before[phrase] / max(1, len(run.first_texts))
        if earlier < 0.5 * share:
            return finding(
                run, "common_phrase", "warning", "One phrase is in most responses.", (run.last_step, run.last_step),
                f"“{phrase}” is in {share:.0%} of the responses of the newest step, in {earlier:.0%} at the beginning.",
                "Search for it (Groups): if it is rewarded without being right, fix the reward.", [], None,
            )  # fmt: skip
    return None


@functools.lru_cache(maxsize=4)
def _phrases(texts: tuple[str, ...]) -> Counter[str]:
    """Return for every phrase of `_PHRASE_WORDS` words the number of texts that contain it. Cached, because the rules
    run after every step."""
    counts: Counter[str] = Counter()
    for text in texts:
        words = text.split()
        phrases = (" ".join(words[i : i + _PHRASE_WORDS]) for i in range(len(words) - _PHRASE_WORDS + 1))
        counts.update(dict.fromkeys(phrases, 1))  # a dict, not a set: ties keep the order of the text
    return counts
