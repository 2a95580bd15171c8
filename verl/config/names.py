"""What comes with verl and is chosen by name: one row each, which configuration, documents and registries read.

A new estimator, policy loss, reward manager or tracker is its file and its row here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages. A user's own may do anything: `OWN_ESTIMATOR`."""

    at: str
    compares: bool = False
    """It compares the answers to one prompt with each other: one answer alone says nothing."""
    critic: bool = False
    """It needs a critic's values."""
    reads: tuple[str, ...] = ()
    """Keys below `algorithm` that only such estimators read; one that reads gamma discounts over tokens."""


def _estimator(place: str, **traits: object) -> Estimator:
    return Estimator(f"verl.algos.advantage.{place}", **traits)  # type: ignore[arg-type]


OWN_ESTIMATOR = Estimator("")
ADV_ESTIMATORS = {
    "gae": _estimator("gae:compute_gae_advantage_return", critic=True, reads=("gamma", "lam")),
    "grpo": _estimator("grpo:compute_grpo_outcome_advantage", compares=True, reads=("norm_adv_by_std_in_grpo",)),
    "grpo_passk": _estimator(
        "grpo_passk:compute_grpo_passk_outcome_advantage", compares=True, reads=("norm_adv_by_std_in_grpo",)
    ),
    "reinforce_plus_plus": _estimator(
        "reinforce_plus_plus:compute_reinforce_plus_plus_outcome_advantage", reads=("gamma",)
    ),
    "reinforce_plus_plus_baseline": _estimator(
        "reinforce_plus_plus_baseline:compute_reinforce_plus_plus_baseline_outcome_advantage", compares=True
    ),
    "rloo": _estimator("rloo:compute_rloo_outcome_advantage", compares=True),
    "opo": _estimator("opo:compute_opo_outcome_advantage", compares=True),
    "remax": _estimator("remax:compute_remax_outcome_advantage"),
    "gpg": _estimator("gpg:compute_gpg_outcome_advantage", compares=True),
    "gdpo": _estimator("gdpo:compute_gdpo_outcome_advantage", compares=True, reads=("gdpo.*",)),
}


def estimator_traits(name: str) -> Estimator:
    """What is known of an estimator; of a user's own, nothing."""
    return ADV_ESTIMATORS.get(name, OWN_ESTIMATOR)


_USUAL_CLIP = (0.2, 0.2)


@dataclass(frozen=True)
class Loss:
    """A policy loss and the values of its paper, for keys of the actor that the user has not set."""

    at: str
    paper: str
    """arXiv."""
    loss_agg_mode: str
    clip: tuple[float, float] | None = None
    """Distances of the ratio from 1, down and up; None: the loss does not clip it."""
    reads: tuple[str, ...] = ()
    """Keys below the actor that only this loss reads."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Those distances; where nothing is clipped, the usual ones, which nobody reads."""
        return self.clip or _USUAL_CLIP


def _loss(
    name: str, paper: str, loss_agg_mode: str, clip: tuple[float, float] | None = None, reads: tuple[str, ...] = ()
) -> Loss:
    return Loss(f"verl.algos.policy_loss.{name}:compute_policy_loss_{name}", paper, loss_agg_mode, clip, reads)


# In the order in which they are listed to users. A weight that is clipped at 1 - 1 has no lower bound.
POLICY_LOSSES = {
    "vanilla": _loss("vanilla", "1707.06347", "token-mean", _USUAL_CLIP, ("clip_ratio_c",)),
    "gspo": _loss("gspo", "2507.18071", "seq-mean-token-mean", (3e-4, 4e-4)),
    # 2506.13585 tunes the upper bound of the weight and names none; 5 is that of ScaleRL (2510.13786).
    "cispo": _loss("cispo", "2506.13585", "token-mean", (1.0, 4.0)),
    "sapo": _loss("sapo", "2511.20347", "seq-mean-token-mean", reads=("policy_loss.tau_*",)),
    "gpg": _loss("gpg", "2504.02546", "token-mean"),
    "clip_cov": _loss("clip_cov", "2505.22617", "token-mean", _USUAL_CLIP, ("policy_loss.clip_cov_*",)),
    "kl_cov": _loss(
        "kl_cov", "2505.22617", "token-mean", reads=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")
    ),
    "geo_mean": _loss("geo_mean", "2507.20673", "seq-mean-token-mean", (0.4, 0.4)),
}


def loss_traits(name: str) -> Loss:
    """Those of a loss; a loss of the user's own starts from the usual ones."""
    return POLICY_LOSSES.get(name, POLICY_LOSSES["vanilla"])


@dataclass(frozen=True)
class Manager:
    """A reward manager."""

    at: str
    overlong_buffer: bool = False
    """It knows `reward_model.overlong_buffer`."""


REWARD_MANAGERS = {
    "naive": Manager("verl.workers.reward_manager.naive:NaiveRewardManager"),
    "batch": Manager("verl.workers.reward_manager.batch:BatchRewardManager"),
    "prime": Manager("verl.workers.reward_manager.prime:PrimeRewardManager"),
    "dapo": Manager("verl.workers.reward_manager.dapo:DAPORewardManager", overlong_buffer=True),
}


@dataclass(frozen=True)
class Tracker:
    """Where metrics go, and the package it needs."""

    at: str
    package: str | None = None


LOGGERS = {
    "console": Tracker("verl.utils.tracking.console:Console"),
    "tensorboard": Tracker("verl.utils.tracking.tensorboard:TensorBoard", "tensorboard"),
    "wandb": Tracker("verl.utils.tracking.wandb:Wandb", "wandb"),
    "mlflow": Tracker("verl.utils.tracking.mlflow:MLflow", "mlflow"),
    "swanlab": Tracker("verl.utils.tracking.swanlab:SwanLab", "swanlab"),
    "trackio": Tracker("verl.utils.tracking.trackio:Trackio", "trackio"),
    "file": Tracker("verl.utils.tracking.file:JsonFiles"),
}

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# A trailing "+" takes the value of the estimate and the unbiased gradient (straight-through); so does "kl" itself.
# Over the teacher's likeliest tokens and the rest, at every place of an answer.
TOP_K_KLS = ("reverse_kl_topk", "forward_kl_topk")
KL_LOSS_TYPES = KL_PENALTIES + tuple(f"{name}+" for name in KL_PENALTIES)


def _extra(name: str) -> str:
    return f"make setup-{name}, or pip install -e .[{name}]"


@dataclass(frozen=True)
class TrainingEngine:
    """A row of the table of training engines."""

    at: str
    """Its `TrainEngine`, imported when it is chosen."""
    block: str
    """The block of a role's configuration that holds its own keys."""
    package: str = ""
    """What must be installed for it; "" where nothing has to be."""
    install: str = ""
    """How."""


_FSDP = TrainingEngine("verl.workers.engine.fsdp.engine:FSDPEngine", "fsdp_config")
_MEGATRON = TrainingEngine(
    "verl.workers.engine.megatron.engine:MegatronEngine", "megatron_config", "megatron.core", _extra("megatron")
)
TRAINING_ENGINES = {"fsdp": _FSDP, "fsdp2": _FSDP, "megatron": _MEGATRON}
STRATEGIES = tuple(TRAINING_ENGINES)


@dataclass(frozen=True)
class RolloutEngine:
    """A row of the table of rollout engines."""

    at: str
    """Its `BaseRollout`, imported when it is chosen."""
    package: str = ""
    """What must be installed for it; "" where nothing has to be."""
    install: str = ""
    """How."""
    reports: tuple[str, ...] = ("full", "drawn")
    """Of tokens drawn from a part of the distribution (top_p, top_k, min_p): log-probs under the full one, or under
    what they were drawn from; values of `rollout_correction.denominator`."""

    @property
    def foreign(self) -> bool:
        """Another project's engine: in a process of its own, with keys that are forwarded to it."""
        return bool(self.package)


def _foreign(name: str, rollout: str, package: str, install: str, reports: str) -> RolloutEngine:
    return RolloutEngine(f"verl.workers.rollout.{name}_rollout.{name}_rollout:{rollout}", package, install, (reports,))


ROLLOUTS = {
    "native": RolloutEngine("verl.workers.rollout.native_rollout:NativeRollout"),
    "hf": RolloutEngine("verl.workers.rollout.hf_rollout:HFRollout"),
    "vllm": _foreign("vllm", "vLLMRollout", "vllm", _extra("vllm"), "drawn"),
    "sglang": _foreign("sglang", "SGLangRollout", "sglang", _extra("sglang"), "full"),
    "trtllm": _foreign("trtllm", "TRTLLMRollout", "tensorrt_llm", "pip install tensorrt-llm", "drawn"),
}


@dataclass(frozen=True)
class AgentLoop:
    """How a trajectory comes about."""

    at: str


# The loop with one model call per trajectory: its rows need no loop worker.
SINGLE_TURN = "single_turn_agent"

AGENT_LOOPS = {
    SINGLE_TURN: AgentLoop("verl.agent.single_turn:SingleTurnAgentLoop"),
    "tool_agent": AgentLoop("verl.agent.tool_loop:ToolAgentLoop"),
    "search_agent": AgentLoop("verl.agent.search_loop:SearchAgentLoop"),
}


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    at: str
    """Its parser."""


def _tool_format(name: str, parser: str) -> ToolFormat:
    return ToolFormat(f"verl.utils.tool_calls.{name}:{parser}")


# Which models write each of them: the first line of its file.
TOOL_FORMATS = {
    "hermes": _tool_format("hermes", "HermesParser"),
    "openai": _tool_format("openai", "OpenAIParser"),
    "qwen3_coder": _tool_format("qwen3_coder", "Qwen3CoderParser"),
    "llama3_json": _tool_format("llama3_json", "Llama3JsonParser"),
    "glm": _tool_format("glm", "GlmParser"),
    "kimi": _tool_format("kimi", "KimiParser"),
    "deepseek": _tool_format("deepseek", "DeepSeekParser"),
    "gemma": _tool_format("gemma", "GemmaParser"),
}
TOOL_FORMAT_SYNONYMS = {"qwen": "hermes", "gpt-oss": "openai", "harmony": "openai"}
# Isolation of the local sandbox, weakest first (`verl.utils.sandbox.REQUIRE`).
SANDBOX_LEVELS = ("none", "files", "network", "full")
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")

ROLES = ("actor", "rollout", "ref", "critic", "reward_model", "teacher")
# Names in role_mapping that stand for several roles, or are another spelling of one.
ROLE_GROUPS = {
    "actor_rollout": ("actor", "rollout"),
    "actor_rollout_ref": ("actor", "rollout", "ref"),
    "ref_policy": ("ref",),
    "rm": ("reward_model",),
}
