"""Names of estimators, losses, engines and other choices that the configuration accepts, with their traits."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.extensions import ExtensionTable, Traits


@dataclass(frozen=True)
class EstimatorTraits(Traits):
    """Traits of an advantage estimator (`register_adv_est`)."""

    uses_groups: bool = False
    """It compares the responses to one prompt: a group of one response has no advantage."""
    needs_critic: bool | None = False
    """It needs the values of a critic; None: unknown."""
    reads: tuple[str, ...] = ()
    """Keys below `algorithm` that it reads; other estimators ignore them. With gamma, it discounts over tokens."""


ADV_ESTIMATORS = ExtensionTable("algos.advantage", "register_adv_est", EstimatorTraits)
_UNKNOWN_ESTIMATOR = EstimatorTraits("", needs_critic=None)


def estimator_traits(name: str) -> EstimatorTraits:
    """Return the traits of an estimator; one that declares none may use groups, values and every key."""
    return ADV_ESTIMATORS.get_traits(name, _UNKNOWN_ESTIMATOR)


_DEFAULT_CLIP = (0.2, 0.2)


@dataclass(frozen=True)
class LossTraits(Traits):
    """Traits of a policy loss (`register_policy_loss`): values of its paper, for keys that the user has not set."""

    paper: str = ""
    """arXiv number."""
    loss_agg_mode: str = "token-mean"
    clip: tuple[float, float] | None = _DEFAULT_CLIP
    """Distances of the clip bounds from a ratio of 1, below and above; None: the loss does not clip the ratio."""
    reads: tuple[str, ...] = ()
    """Keys below the actor that it reads; other losses ignore them."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """`clip`, or the default of PPO for a loss that does not read it."""
        return self.clip or _DEFAULT_CLIP


POLICY_LOSSES = ExtensionTable("algos.policy_loss", "register_policy_loss", LossTraits)


def loss_traits(name: str) -> LossTraits:
    """Return the traits of a policy loss; one that declares none has those of PPO."""
    return POLICY_LOSSES.get_traits(name, POLICY_LOSSES["vanilla"])


@dataclass(frozen=True)
class RewardManagerTraits(Traits):
    """Traits of a reward manager (`register_reward_manager`)."""

    overlong_buffer: bool = False
    """It reads `reward_model.overlong_buffer`."""


REWARD_MANAGERS = ExtensionTable("workers.reward_manager", "register_reward_manager", RewardManagerTraits)


@dataclass(frozen=True)
class TrackerTraits(Traits):
    """Traits of a tracker (`register_tracker`)."""

    package: str | None = None
    """The Python package that it needs."""


LOGGERS = ExtensionTable("utils.tracking", "register_tracker", TrackerTraits)


def tracker_package(name: str) -> str | None:
    """Return the Python package that a tracker needs; None: none, or unknown."""
    return LOGGERS.get_traits(name, TrackerTraits("")).package


LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# A trailing "+" takes the value of the estimate and the unbiased gradient (straight-through); so does "kl" itself.
KL_LOSS_TYPES = KL_PENALTIES + tuple(f"{name}+" for name in KL_PENALTIES)
# KL per response token over the teacher's top-k tokens; all other tokens count as one.
TOP_K_KLS = ("reverse_kl_topk", "forward_kl_topk")


def _install_command(name: str) -> str:
    return f"make setup-{name}, or pip install -e .[{name}]"


@dataclass(frozen=True)
class TrainingEngine:
    """A training engine (`strategy` of a role)."""

    import_path: str
    """`module:attribute` of its `TrainEngine`; imported when the engine is selected."""
    block: str
    """The block with its keys in a role's configuration."""
    package: str = ""
    """The third-party package that it needs; "": none."""
    install: str = ""
    """The commands that install the package."""


_FSDP = TrainingEngine("verl.workers.engine.fsdp.engine:FSDPEngine", "fsdp_config")
_MEGATRON = TrainingEngine(
    "verl.workers.engine.megatron.engine:MegatronEngine",
    "megatron_config",
    "megatron.core",
    _install_command("megatron"),
)
TRAINING_ENGINES = {"fsdp": _FSDP, "fsdp2": _FSDP, "megatron": _MEGATRON}
STRATEGIES = tuple(TRAINING_ENGINES)


@dataclass(frozen=True)
class RolloutTraits(Traits):
    """Traits of a rollout engine (`register_rollout`)."""

    package: str = ""
    """The third-party package that it needs; "": none."""
    install: str = ""
    """The commands that install the package."""
    reports: tuple[str, ...] = ("full", "drawn")
    """Log-probs that it reports for tokens sampled with top_p, top_k or min_p: of the full distribution, or of the
    truncated one that was sampled from; values of `rollout_correction.denominator`."""

    @property
    def third_party(self) -> bool:
        """Whether it is a third-party engine: it runs in its own process, and `engine_kwargs` are passed to it."""
        return bool(self.package)


ROLLOUTS = ExtensionTable("workers.rollout", "register_rollout", RolloutTraits)


def rollout_traits(name: str) -> RolloutTraits:
    """Return the traits of a rollout engine; one that declares none runs in the process of its rank."""
    return ROLLOUTS.get_traits(name, RolloutTraits(""))


# The agent loop with one model call per trajectory: its rows need no loop worker.
SINGLE_TURN = "single_turn_agent"
AGENT_LOOPS = ExtensionTable("agent", "register_agent_loop", Traits)


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write tool calls."""

    import_path: str
    """`module:attribute` of its parser."""


def _tool_format(parser: str) -> ToolFormat:
    return ToolFormat(f"verl.utils.tool_calls:{parser}")


# The docstrings of the parsers name the models that write each format.
TOOL_FORMATS = {
    "hermes": _tool_format("HermesParser"),
    "openai": _tool_format("OpenAIParser"),
    "qwen3_coder": _tool_format("Qwen3CoderParser"),
    "llama3_json": _tool_format("Llama3JsonParser"),
    "glm": _tool_format("GlmParser"),
    "kimi": _tool_format("KimiParser"),
    "deepseek": _tool_format("DeepSeekParser"),
    "gemma": _tool_format("GemmaParser"),
}
TOOL_FORMAT_SYNONYMS = {"qwen": "hermes", "gpt-oss": "openai", "harmony": "openai"}
# Isolation of the local sandbox, weakest first (`verl.sandbox.REQUIRE`).
SANDBOX_LEVELS = ("none", "files", "network", "full")
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")

ROLES = ("actor", "rollout", "ref", "critic", "reward_model", "teacher")
# Names in role_mapping that stand for several roles, or are aliases of one.
ROLE_GROUPS = {
    "actor_rollout": ("actor", "rollout"),
    "actor_rollout_ref": ("actor", "rollout", "ref"),
    "ref_policy": ("ref",),
    "rm": ("reward_model",),
}
