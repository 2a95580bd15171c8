"""`algorithm.*`: from scores to advantages."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.rollout_correction import RolloutCorrectionConfig
from verl.config.schema import Block, key

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
