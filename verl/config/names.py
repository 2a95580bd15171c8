"""The names a configuration may use for registered things; tests compare them with the registries."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import policy_losses

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "opo",
    "remax",
    "gpg",
    "gdpo",
)
# Estimators that compare the answers to one prompt with each other: one answer alone says nothing.
GROUP_ESTIMATORS = ("grpo", "grpo_passk", "reinforce_plus_plus_baseline", "rloo", "opo", "gpg", "gdpo")
# Estimators that discount over tokens.
DISCOUNTING_ESTIMATORS = ("gae", "reinforce_plus_plus")
CRITIC_ESTIMATORS = ("gae",)

POLICY_LOSSES = tuple(policy_losses.POLICY_LOSSES)
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# A trailing "+" takes the value of the estimate and the unbiased gradient (straight-through); so does "kl" itself.
KL_LOSS_TYPES = KL_PENALTIES + tuple(f"{name}+" for name in KL_PENALTIES)


@dataclass(frozen=True)
class TrainingEngine:
    """A row of the table of training engines."""

    target: str
    """`module:Class` of its `TrainEngine`, imported when it is chosen; "" while it is not built."""
    block: str
    """The block of a role's configuration that holds its own keys."""


_FSDP = TrainingEngine("verl.workers.engine.fsdp.engine:FSDPEngine", "fsdp_config")
TRAINING_ENGINES = {"fsdp": _FSDP, "fsdp2": _FSDP, "megatron": TrainingEngine("", "megatron_config")}
STRATEGIES = tuple(TRAINING_ENGINES)

BUILT_ROLLOUTS, UNBUILT_ROLLOUTS = ("native", "hf"), ("vllm", "sglang", "trtllm")
ROLLOUTS = BUILT_ROLLOUTS + UNBUILT_ROLLOUTS
REWARD_MANAGERS = ("naive", "batch", "prime", "dapo")
LOGGERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "file")
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")

ROLES = ("actor", "rollout", "ref", "critic", "reward_model")
# Names in role_mapping that stand for several roles, or are another spelling of one.
ROLE_GROUPS = {
    "actor_rollout": ("actor", "rollout"),
    "actor_rollout_ref": ("actor", "rollout", "ref"),
    "ref_policy": ("ref",),
    "rm": ("reward_model",),
}
