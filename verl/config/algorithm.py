"""`algorithm.*`: from scores to advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from verl.config import names
from verl.config.schema import Block, key

NO_RAW_LOG_PROBS = (
    "training compares log-probs of the distribution that answers are sampled from, at its temperature",
    "Leave it out, or set processed_logprobs",
)
# How the statistic of a token becomes that of what stays or goes.
_OVER = ("token", "seq_sum", "seq_mean", "seq_max")
# k1 has a sign: the greatest of a sequence says nothing of the other side.
REJECTIONS = tuple(
    f"{over}_{kind}" for over in _OVER for kind in ("k1", "k2", "k3") if f"{over}_{kind}" != "seq_max_k1"
)
_OLD_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig(Block):
    rollout_is: str | None = key(
        "Weigh tokens by the truncated ratio of training to rollout policy; auto: token for stale answers, else off.",
        null="off",
        choices=("auto", "token", "sequence"),
    )
    rollout_is_threshold: str = key("Where that ratio is truncated; lo_hi, e.g. 0.5_2.0: outside of both it counts 0.")
    rollout_is_batch_normalize: bool = key("Divide the weights of a batch by their mean.")
    rollout_rs: str | None = key(
        "Mask what both see too differently, by a comma list of token_k1, seq_max_k2 … (docs/algorithms.md).",
        null="off",
    )
    rollout_rs_threshold: str | None = key(
        "Of each, or all: for k1 the ratio above which it is masked, or lo_hi; for k2 and k3 their value.",
        null="rollout_is_threshold (k1)",
    )
    rollout_rs_threshold_lower: float | None = key(
        "Ratio below which it is masked (k1).", null="1 / rollout_rs_threshold", above=0
    )
    denominator: str = key(
        "What ratios are taken to: full, the rollout's whole distribution, or drawn, what top_p, top_k and min_p left.",
        choices=("full", "drawn"),
        synonyms={"processed_logprobs": "drawn"},
        refused=dict.fromkeys(("raw_logprobs", "raw_logits", "processed_logits"), NO_RAW_LOG_PROBS),
        aliases=("../../actor_rollout_ref.rollout.logprobs_mode",),
    )
    bypass_mode: bool = key("Take the rollout's log-probs as old_log_probs and skip recomputing them.")
    loss_type: str = key(
        "With bypass_mode: PPO's clip on the ratio to the rollout, or the policy gradient, weighed by rollout_is.",
        choices=("ppo_clip", "reinforce"),
    )
    warn_log_prob_diff: float = key(
        "Mean |rollout - training log-prob| above which the run warns and names these keys.", above=0
    )

    by_itself: bool = field(default=False, compare=False)
    """Not a key: `rollout_is` was auto, and nobody asked for what it became."""

    @property
    def weighs_in_the_loss(self) -> bool:
        """Weights are taken while the update runs, from its own log-probs: no pass has computed others before."""
        return self.bypass_mode and self.loss_type == "reinforce"


class Bounds(NamedTuple):
    """Of a ratio. Without a lower one it is truncated at the upper one; with it, what is outside counts for nothing."""

    lower: float | None
    upper: float


class Rejection(NamedTuple):
    """What is masked: where a statistic of tokens (`over` token) or whole sequences is outside of its bounds.

    With r the ratio of training to rollout policy: k1 is -log r, whose bounds are those of r itself (its product over a
    sequence for seq_sum, the geometric mean for seq_mean); k2 is (log r)² / 2, k3 is r - 1 - log r.
    """

    over: str
    kind: str
    lower: float
    upper: float


def bounds(text: str) -> Bounds:
    """Of `2.0` or `0.5_2.0`; ValueError with the cause otherwise."""
    lower, _, upper = str(text).rpartition("_")
    try:
        found = Bounds(float(lower) if lower else None, float(upper))
    except ValueError:
        raise ValueError(f"{text} is neither a number nor lo_hi, such as 0.5_2.0") from None
    if not (found.upper > 0 and (found.lower is None or 0 < found.lower <= found.upper)):
        raise ValueError(f"{text} must be above 0, and the lower one not above the upper one")
    return found


def rejections(config: RolloutCorrectionConfig) -> tuple[Rejection, ...]:
    """What `rollout_rs` names, each with its threshold; ValueError with the cause where they do not fit."""
    if config.rollout_rs is None:
        return ()
    names = [name.strip() for name in config.rollout_rs.split(",")]
    given = config.rollout_rs_threshold
    limits = [None] if given is None else [limit.strip() for limit in given.split(",")]
    if len(limits) not in (1, len(names)):
        raise ValueError(f"{len(limits)} thresholds for {len(names)} of rollout_rs: give one for all, or one for each")
    if len(limits) == 1:
        limits *= len(names)
    found = tuple(_rejection(config, name, limit) for name, limit in zip(names, limits, strict=True))
    lower = config.rollout_rs_threshold_lower
    if lower is not None and not any(rule.kind == "k1" and rule.lower == lower for rule in found):
        raise ValueError(f"rollout_rs_threshold_lower = {lower:g} would not be read: that is for a k1 with one number")
    return found


def _rejection(config: RolloutCorrectionConfig, name: str, limit: str | None) -> Rejection:
    name = _OLD_NAMES.get(name, name)
    if name not in REJECTIONS:
        raise ValueError(f"{name!r} is not known. Use {', '.join(REJECTIONS)}")
    over, _, kind = name.rpartition("_")
    if kind != "k1":
        if limit is None:
            raise ValueError(f"{name} needs a threshold of its own: rollout_rs_threshold")
        found = bounds(limit)
        if found.lower is not None:
            raise ValueError(
                f"{name} is 0 for equal policies and grows from there: {limit} has no place for a lower one"
            )
        return Rejection(over, kind, 0.0, found.upper)
    found = bounds(config.rollout_is_threshold if limit is None else limit)
    lower = found.lower or config.rollout_rs_threshold_lower or 1 / found.upper
    if lower > found.upper:
        raise ValueError(f"the lower one is {lower:g}, the upper one {found.upper:g}: everything would be masked")
    return Rejection(over, kind, lower, found.upper)


_ON_PAIRS = (
    "trains on pairs of given answers, without generation: it is not an advantage estimator",
    "Train a reward model on the pairs (verl.trainer.main_rm) and use it with grpo here, or fine-tune on the better"
    " answers (verl.trainer.main_sft)",
)
OTHER_METHODS = dict.fromkeys(("dpo", "ipo", "kto", "orpo", "simpo", "cpo"), _ON_PAIRS) | {
    "sft": ("is supervised fine-tuning, not an advantage estimator", "Run python -m verl.trainer.main_sft"),
    "ppo": ("is the policy loss, not an advantage estimator", "Set gae, the estimator of PPO"),
}
"""Training methods that users set as `adv_estimator`: why that cannot work, and what to do instead."""
NO_FULL_KL = ("needs the whole distribution of both models at every token", "Set it to low_var_kl")


@dataclass(kw_only=True, slots=True)
class KLControllerConfig(Block):
    type: str = key("How the coefficient of the KL in the reward moves.", choices=("fixed", "adaptive"))
    kl_coef: float = key("Coefficient of the KL in the reward (the initial one when adaptive).", min=0)
    target_kl: float = key("KL per sequence that the adaptive controller steers to.", above=0)
    horizon: int = key("Samples over which the adaptive controller corrects.", min=1)


@dataclass(kw_only=True, slots=True)
class StateMaskingConfig(Block):
    start_state_marker: str = key(
        "Text that opens what the environment wrote; masked from the loss up to the end marker."
    )
    end_state_marker: str = key("Text that closes what the environment wrote.")


@dataclass(kw_only=True, slots=True)
class FilterGroupsConfig(Block):
    enable: bool = key("Drop prompts whose answers all score the same and generate more (DAPO dynamic sampling).")
    metric: str = key(
        "What must differ within a group: score, or a name that the reward returns (acc).",
        synonyms={"seq_reward": "score", "seq_final_reward": "score"},
    )
    max_num_gen_batches: int = key(
        "Generation batches tried per training step, which then goes on with what it has; 0 or less: no limit."
    )


@dataclass(kw_only=True, slots=True)
class GDPOConfig(Block):
    reward_keys: list[str] = key(
        "gdpo: the rewards to keep apart, by the names that the reward returns; score is the score itself.",
        null="none",
    )
    reward_weights: list[float] = key("gdpo: how much each of them counts; empty: all alike.", null="none")


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig(Block):
    adv_estimator: str = key(
        "How advantages are estimated.", choices=names.ADV_ESTIMATORS, extendable=True, refused=OTHER_METHODS
    )
    gamma: float = key("Discount per token.", min=0, max=1)
    lam: float = key("Lambda of GAE: 1 trusts the rewards, 0 the critic.", min=0, max=1)
    norm_adv_by_std_in_grpo: bool = key("Divide group advantages by the group's standard deviation (False: Dr.GRPO).")
    truncated_responses: str = key(
        "Answers cut at a limit: keep; mask, scored but not learned from; bootstrap, the critic's value goes on.",
        choices=("keep", "mask", "bootstrap"),
    )
    use_kl_in_reward: bool = key("Subtract the KL to the reference from the token rewards; starts a reference policy.")
    kl_penalty: str = key("Estimate of that KL.", choices=names.KL_PENALTIES, refused={"full": NO_FULL_KL})
    kl_ctrl: KLControllerConfig = key("Coefficient of the KL in the reward.")
    state_masking: StateMaskingConfig = key("Markers around what the environment wrote (search agent).")
    filter_groups: FilterGroupsConfig = key("Dynamic sampling.")
    gdpo: GDPOConfig = key("Several rewards, each normalised on its own.")
    rollout_correction: RolloutCorrectionConfig = key("When the generating and the training policy differ.")
