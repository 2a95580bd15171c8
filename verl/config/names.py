"""Names of estimators, losses, engines and other choices that the configuration accepts, with their properties.

An extension (estimator, policy loss, reward manager, tracker, agent loop, rollout engine) is one file. A decorator
declares its name and its *traits*, the properties that the configuration needs to know:

    @register_adv_est("grpo", uses_groups=True, reads=("norm_adv_by_std_in_grpo",))
    def compute_grpo_outcome_advantage(...): ...

The configuration is validated before torch is imported, so this module parses the files instead of importing them:
names and traits have to be literals. Modules of `external_libs` are read in the same way.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

_PACKAGE_FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True)
class Traits:
    """Properties of an extension that the configuration reads. Subclasses have a field per trait, with a default."""

    import_path: str
    """`module:attribute` of the function or class."""


T = TypeVar("T", bound=Traits)
_TABLES: list[ExtensionTable[Any]] = []


class ExtensionTable(dict[str, T], Generic[T]):
    """Traits of verl's built-in extensions by name.

    `get_traits` also looks up extensions declared in users' modules.
    """

    def __init__(self, package: str, decorator: str, traits: type[T]) -> None:
        """Read the extensions that `decorator` declares in the files of `package` (relative to verl)."""
        self._decorator, self._traits = decorator, traits
        self._user_traits: dict[str, T] = {}
        for file in sorted((_PACKAGE_FOLDER / package.replace(".", "/")).rglob("*.py")):
            module = ".".join(file.relative_to(_PACKAGE_FOLDER.parent).with_suffix("").parts)
            self.update(self._read_declarations(file, module))
        _TABLES.append(self)

    def get_traits(self, name: str, default: T) -> T:
        """Return the traits of an extension; `default` if it is not built in and no user module declares traits."""
        return self.get(name) or self._user_traits.get(name, default)

    def add_user_module(self, file: Path, module: str) -> None:
        """Read the traits that a user's module declares."""
        for name, traits in self._read_declarations(file, module).items():
            # Skip declarations with default traits only: `get_traits` returns the caller's default for them.
            if traits != self._traits(traits.import_path):
                self._user_traits[name] = traits

    def _read_declarations(self, file: Path, module: str) -> dict[str, T]:
        """Return the traits of the extensions that a file declares, by name."""
        source = file.read_text(encoding="utf-8")
        if f"{self._decorator}(" not in source:
            return {}
        known = [field.name for field in fields(self._traits) if field.name != "import_path"]
        extensions = {}
        for name, attribute, traits in _declarations(source, file, self._decorator):
            if unknown := sorted(traits.keys() - set(known)):
                raise ValueError(
                    f"{file}: @{self._decorator}({name!r}): {unknown[0]!r} is not a trait."
                    f" Known traits: {', '.join(known)}."
                )
            extensions[name] = self._traits(f"{module}:{attribute}", **traits)
        return extensions


def read_user_declarations(modules: Iterable[str]) -> None:
    """Read the traits that users' modules declare, without importing them. Modules that do not exist are skipped."""
    for module in modules:
        file = _source_file(module)
        if file is not None:
            for table in _TABLES:
                table.add_user_module(file, module)


def _source_file(module: str) -> Path | None:
    """Return the source file of a module, or None. The module and its parent packages are not imported."""
    package, *submodules = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    module_paths = [Path(folder).joinpath(*submodules) for folder in spec.submodule_search_locations or ()]
    candidates = [file for path in module_paths for file in (path.with_suffix(".py"), path / "__init__.py")]
    if not submodules and spec.origin is not None:
        candidates = [Path(spec.origin)]
    return next((file for file in candidates if file.suffix == ".py" and file.is_file()), None)


def _declarations(source: str, file: Path, decorator: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, attribute, traits) of every decorated function and class at the top level of a file."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return  # reported with its line where the module is imported
    for node in statements:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for call in node.decorator_list:
            if not isinstance(call, ast.Call) or not call.args:
                continue
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if function != decorator:
                continue
            try:
                name = ast.literal_eval(call.args[0])
                traits = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            except ValueError as error:
                raise ValueError(
                    f"{file}: line {call.lineno}: name and traits of @{decorator} must be literals, because they are "
                    "read without importing the file."
                ) from error
            yield name, node.name, traits


@dataclass(frozen=True)
class EstimatorTraits(Traits):
    """Traits of an advantage estimator (`register_adv_est`)."""

    uses_groups: bool = False
    """It compares the responses to one prompt: a group of one response has no advantage."""
    needs_critic: bool | None = False
    """It needs the values of a critic; None: unknown."""
    reads: tuple[str, ...] = ()
    """Keys below `algorithm` that have an effect only with estimators that list them. One that lists `gamma` discounts
    over tokens."""


ADV_ESTIMATORS = ExtensionTable("algos.advantage", "register_adv_est", EstimatorTraits)
_UNKNOWN_ESTIMATOR = EstimatorTraits("", needs_critic=None)


def estimator_traits(name: str) -> EstimatorTraits:
    """Return the traits of an estimator. If it declares none, `needs_critic` is None (unknown)."""
    return ADV_ESTIMATORS.get_traits(name, _UNKNOWN_ESTIMATOR)


_DEFAULT_CLIP = (0.2, 0.2)


@dataclass(frozen=True)
class LossTraits(Traits):
    """Traits of a policy loss (`register_policy_loss`)."""

    paper: str = ""
    """arXiv number."""
    loss_agg_mode: str = "token-mean"
    """Aggregation in the paper, the default of `loss_agg_mode`."""
    clip: tuple[float, float] | None = _DEFAULT_CLIP
    """Distances of the clip bounds from a ratio of 1 in the paper, the defaults of `clip_ratio_low` and
    `clip_ratio_high`. None: the loss does not clip the ratio."""
    reads: tuple[str, ...] = ()
    """Keys below the actor that have an effect only with the losses that list them."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """`clip`; for a loss that does not clip, the default of PPO."""
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


TRACKERS = ExtensionTable("utils.tracking", "register_tracker", TrackerTraits)


def tracker_package(name: str) -> str | None:
    """Return the Python package that a tracker needs; None if it needs none or declares no traits."""
    return TRACKERS.get_traits(name, TrackerTraits("")).package


LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# A trailing "+" combines the value of the estimate with the unbiased gradient (straight-through); "kl" is k1 with that
# gradient (`verl.algos.kl`).
KL_LOSS_TYPES = KL_PENALTIES + tuple(f"{name}+" for name in KL_PENALTIES)
# KL per response token over the teacher's top-k tokens and one more outcome, which stands for all other tokens.
TOP_K_KLS = ("reverse_kl_topk", "forward_kl_topk")


def _install_command(name: str) -> str:
    return f"make setup-{name}, or pip install -e .[{name}]"


@dataclass(frozen=True)
class TrainingEngine:
    """A training engine (`strategy` of a role)."""

    import_path: str
    """`module:attribute` of its `TrainEngine`; imported when the engine is selected."""
    block: str
    """Name of the block in a role's configuration that has the engine's keys."""
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
