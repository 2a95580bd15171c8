"""`algorithm.*`: advantages, KL penalty, dynamic sampling, rollout correction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from verl.config import names
from verl.config.schema import Block, key

NO_RAW_LOG_PROBS = (
    "training needs log-probs of the sampling distribution, at its temperature",
    "Leave it out, or set processed_logprobs",
)
# How the statistics of tokens are aggregated before the threshold is applied.
_AGGREGATIONS = ("token", "seq_sum", "seq_mean", "seq_max")
# k1 is signed: the maximum over a sequence would ignore large negative values.
REJECTIONS = tuple(
    f"{over}_{kind}" for over in _AGGREGATIONS for kind in ("k1", "k2", "k3") if f"{over}_{kind}" != "seq_max_k1"
)
_OLD_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig(Block):
    rollout_is: str | None = key(
        "Truncated importance weights (training / rollout policy); auto: token in asynchronous modes, else off.",
        null="off",
        choices=("auto", "token", "sequence"),
    )
    rollout_is_threshold: str = key("Upper bound of the weights; as lo_hi (0.5_2.0), weights out of range become 0.")
    rollout_is_batch_normalize: bool = key("Divide the importance weights of a batch by their mean.")
    rollout_rs: str | None = key(
        "Mask tokens or sequences with a large mismatch: comma list of token_k1, seq_max_k2 … (policy_and_weights.md).",
        null="off",
    )
    rollout_rs_threshold: str | None = key(
        "Threshold for all, or a comma list: k1 takes a largest ratio or lo_hi, k2 and k3 a largest value.",
        null="rollout_is_threshold (k1)",
    )
    rollout_rs_threshold_lower: float | None = key(
        "Smallest ratio that is not masked (k1).", null="1 / rollout_rs_threshold", above=0
    )
    denominator: str = key(
        "Rollout log-probs in the ratio: of the full distribution, or as truncated by top_p, top_k, min_p (drawn).",
        choices=("full", "drawn"),
        synonyms={"processed_logprobs": "drawn"},
        refused=dict.fromkeys(("raw_logprobs", "raw_logits", "processed_logits"), NO_RAW_LOG_PROBS),
        aliases=("../../actor_rollout_ref.rollout.logprobs_mode",),
    )
    bypass_mode: bool = key("Use the rollout's log-probs as old_log_probs instead of recomputing them.")
    loss_type: str = key(
        "With bypass_mode: PPO's clipped ratio to the rollout policy, or REINFORCE weighted by rollout_is.",
        choices=("ppo_clip", "reinforce"),
    )
    warn_log_prob_diff: float = key("Warn when the mean |rollout - training log-prob| exceeds this value.", above=0)

    rollout_is_from_auto: bool = field(default=False, compare=False)
    """Not a key: `rollout_is` was resolved from auto to token, not set by the user."""

    @property
    def computes_weights_in_loss(self) -> bool:
        """Whether the loss computes the importance weights, from the log-probs of the update itself."""
        return self.bypass_mode and self.loss_type == "reinforce"


class Bounds(NamedTuple):
    """Bounds of an importance weight: truncated at `upper`; with `lower`, set to 0 outside of the range instead."""

    lower: float | None
    upper: float


class Rejection(NamedTuple):
    """A rejection rule: mask tokens (`over` = token) or sequences whose mismatch statistic is out of bounds.

    With r = training / rollout probability: k1 is -log r, but its bounds apply to r (for seq_sum to the product over
    the sequence, for seq_mean to the geometric mean); k2 is (log r)² / 2, k3 is r - 1 - log r.
    """

    over: str
    kind: str
    lower: float
    upper: float


def parse_bounds(text: str) -> Bounds:
    """Parse `2.0` or `0.5_2.0`. ValueError, with the cause, for other texts."""
    lower, _, upper = str(text).rpartition("_")
    try:
        parsed = Bounds(float(lower) if lower else None, float(upper))
    except ValueError:
        raise ValueError(f"{text} is neither a number nor a range lo_hi such as 0.5_2.0") from None
    if not (parsed.upper > 0 and (parsed.lower is None or 0 < parsed.lower <= parsed.upper)):
        raise ValueError(f"{text} must be above 0, and the lower bound not above the upper bound")
    return parsed


def parse_rejections(config: RolloutCorrectionConfig) -> tuple[Rejection, ...]:
    """Return the rejection rules of `rollout_rs` with their thresholds. ValueError: one of them is invalid."""
    if config.rollout_rs is None:
        return ()
    names = [name.strip() for name in config.rollout_rs.split(",")]
    thresholds = config.rollout_rs_threshold
    limits = [None] if thresholds is None else [limit.strip() for limit in thresholds.split(",")]
    if len(limits) not in (1, len(names)):
        raise ValueError(
            f"{len(limits)} thresholds for {len(names)} rules in rollout_rs: set one for all, or one for each"
        )
    if len(limits) == 1:
        limits *= len(names)
    rules = tuple(_parse_rejection(config, name, limit) for name, limit in zip(names, limits, strict=True))
    lower = config.rollout_rs_threshold_lower
    if lower is not None and not any(rule.kind == "k1" and rule.lower == lower for rule in rules):
        raise ValueError(
            f"rollout_rs_threshold_lower = {lower:g} has no effect: it applies to k1 with one number as threshold"
        )
    return rules


def _parse_rejection(config: RolloutCorrectionConfig, name: str, limit: str | None) -> Rejection:
    name = _OLD_NAMES.get(name, name)
    if name not in REJECTIONS:
        raise ValueError(f"{name!r} is not known. Use {', '.join(REJECTIONS)}")
    over, _, kind = name.rpartition("_")
    if kind != "k1":
        if limit is None:
            raise ValueError(f"{name} needs a threshold: rollout_rs_threshold")
        limits = parse_bounds(limit)
        if limits.lower is not None:
            raise ValueError(
                f"{name} is never negative and 0 for equal policies: a lower bound ({limit}) has no meaning"
            )
        return Rejection(over, kind, 0.0, limits.upper)
    limits = parse_bounds(config.rollout_is_threshold if limit is None else limit)
    lower = limits.lower or config.rollout_rs_threshold_lower or 1 / limits.upper
    if lower > limits.upper:
        raise ValueError(
            f"the lower bound {lower:g} is above the upper bound {limits.upper:g}: everything would be masked"
        )
    return Rejection(over, kind, lower, limits.upper)


_PREFERENCE_TRAINING = (
    "trains on preference pairs without generation: it is not an advantage estimator",
    "Train a reward model on the pairs (verl.trainer.main_rm) and use it with grpo here, or fine-tune on the chosen"
    " responses (verl.trainer.main_sft)",
)
OTHER_METHODS = dict.fromkeys(("dpo", "ipo", "kto", "orpo", "simpo", "cpo"), _PREFERENCE_TRAINING) | {
    "sft": ("is supervised fine-tuning, not an advantage estimator", "Run python -m verl.trainer.main_sft"),
    "ppo": ("is the policy loss, not an advantage estimator", "Set gae, the estimator of PPO"),
}
"""Training methods that users set as `adv_estimator` by mistake: (cause, remedy)."""
NO_FULL_KL = ("needs the whole distribution of both models at every token", "Set it to low_var_kl")


@dataclass(kw_only=True, slots=True)
class KLControllerConfig(Block):
    type: str = key("KL coefficient in the reward: fixed, or adapted to target_kl.", choices=("fixed", "adaptive"))
    kl_coef: float = key("Coefficient of the KL in the reward (the initial one when adaptive).", min=0)
    target_kl: float = key("Target KL per sequence of the adaptive controller.", above=0)
    horizon: int = key("Time constant of the adaptive controller, in samples.", min=1)


@dataclass(kw_only=True, slots=True)
class StateMaskingConfig(Block):
    start_state_marker: str = key(
        "Search agent: text inserted before search results; inserted tokens are masked from the loss by position."
    )
    end_state_marker: str = key("Search agent: text inserted after search results.")


@dataclass(kw_only=True, slots=True)
class FilterGroupsConfig(Block):
    enable: bool = key("Drop prompts whose responses all have the same score, generate more (DAPO dynamic sampling).")
    metric: str = key(
        "Value that must differ within a group: score, or a field that the reward returns (acc).",
        synonyms={"seq_reward": "score", "seq_final_reward": "score"},
    )
    max_num_gen_batches: int = key(
        "Largest number of generation batches per training step, then train on the groups so far; 0 or less: no limit."
    )


@dataclass(kw_only=True, slots=True)
class GDPOConfig(Block):
    reward_keys: list[str] = key(
        "gdpo: fields of the reward's result to normalise separately; score is the score itself.", null="none"
    )
    reward_weights: list[float] = key("gdpo: weight of each reward; empty: equal weights.", null="none")


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig(Block):
    adv_estimator: str = key(
        "Advantage estimator.", choices=names.ADV_ESTIMATORS, extendable=True, refused=OTHER_METHODS
    )
    gamma: float = key("Discount per token.", min=0, max=1)
    lam: float = key("Lambda of GAE: 1 uses returns only, 0 one-step TD errors of the critic.", min=0, max=1)
    norm_adv_by_std_in_grpo: bool = key("Divide group advantages by the group's standard deviation (False: Dr.GRPO).")
    truncated_responses: str = key(
        "Responses cut at a length limit: keep; mask them in the loss; bootstrap from the critic's value.",
        choices=("keep", "mask", "bootstrap"),
    )
    use_kl_in_reward: bool = key("Subtract the KL to the reference from the token rewards; starts a reference policy.")
    kl_penalty: str = key(
        "Estimator of the KL in the reward.", choices=names.KL_PENALTIES, refused={"full": NO_FULL_KL}
    )
    kl_ctrl: KLControllerConfig = key("Coefficient of the KL in the reward.")
    state_masking: StateMaskingConfig = key("Markers around environment text (search agent).")
    filter_groups: FilterGroupsConfig = key("Dynamic sampling.")
    gdpo: GDPOConfig = key("Several rewards, normalised separately.")
    rollout_correction: RolloutCorrectionConfig = key("Correction of the mismatch between rollout and training policy.")
