"""One strict load: YAML defaults + what the user set -> a whole config, or one ConfigError with every problem in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config import files, generation, resolve, rm, sft, unused_keys, validate
from verl.config.command_line import GROUPS_KEY, read_override
from verl.config.compose import alternatives, default_tree, default_values, groups
from verl.config.convert import Converter, leaves
from verl.config.extensions import read_user_declarations
from verl.config.old_keys import convert_async_training, convert_dict_keys, convert_reward_workers
from verl.config.ppo import PPOConfig
from verl.config.problems import Report, show
from verl.config.schema import Block, alias_table, pick, walk

# `(config, report)`: config is an instance of `Root.cls`; one type for rules of several config classes.
Rule = Callable[[Any, Report], None]


@dataclass(frozen=True)
class Root:
    """The configuration of one program: its class, the YAML file with the defaults, and its rules."""

    cls: type[Block]
    yaml: str  # file name in verl/trainer/config, without suffix
    resolve: Rule  # replaces nulls by the values they stand for
    validate: Rule  # checks rules between keys
    check_environment: Rule  # checks files and packages of this machine
    check_supported: Rule = lambda config, report: None  # reports unsupported values, before all other rules
    convert_old_keys: Rule = lambda values, report: None  # converts old keys in the plain values


def _convert_old_ppo_keys(values: dict[str, Any], report: Report) -> None:
    convert_async_training(values, report)
    convert_reward_workers(values, report)


PPO = Root(
    PPOConfig,
    "ppo_trainer",
    resolve.resolve,
    validate.validate,
    files.check_environment,
    unused_keys.check_supported,
    _convert_old_ppo_keys,
)
SFT = Root(
    sft.SFTConfig,
    "sft_trainer",
    sft.resolve,
    sft.validate,
    sft.check_environment,
    convert_old_keys=convert_dict_keys,
)
RM = Root(rm.RMConfig, "rm_trainer", rm.resolve, rm.validate, rm.check_environment)
GENERATION = Root(
    generation.GenerationConfig,
    "generation",
    generation.resolve_generation,
    generation.validate_generation,
    generation.check_generation,
)
EVAL = Root(
    generation.EvalConfig, "evaluation", generation.resolve_eval, generation.validate_eval, generation.check_eval
)
ROOTS = (PPO, SFT, RM, GENERATION, EVAL)


def root_of(cls: type[Block]) -> Root:
    """The program whose whole configuration is a `cls`."""
    for root in ROOTS:
        if root.cls is cls:
            return root
    known = ", ".join(root.cls.__name__ for root in ROOTS)
    raise ValueError(f"root: {cls.__name__} is a block, not a whole configuration. Use one of {known}.")


B = TypeVar("B", bound=Block)
Config = PPOConfig | DictConfig | Mapping[str, Any]
Given = Block | DictConfig | Mapping[str, Any] | None
Preflight = Callable[[Any, Report], None]
"""Called with the resolved configuration (an instance of `root`) and the report to which it adds problems."""

_ABSENT = object()


@overload
def load_config(cfg: Given = None, overrides: Sequence[str] = (), check_files: bool = True) -> PPOConfig: ...


@overload
def load_config(
    cfg: Given = None,
    overrides: Sequence[str] = (),
    check_files: bool = True,
    *,
    root: type[B],
    preflight: Preflight | None = None,
) -> B: ...


def load_config(
    cfg: Given = None,
    overrides: Sequence[str] = (),
    check_files: bool = True,
    *,
    root: type[Block] = PPOConfig,
    preflight: Preflight | None = None,
) -> Block:
    """The complete, resolved and validated configuration of the program that `root` belongs to.

    `cfg` holds some or all blocks; `overrides` are `key=value` (or `group=option`) on top. `check_files=False` leaves
    out what depends on this machine and version: files, folders, packages, and what is not built yet. `preflight`
    adds problems that the program can detect before it starts (data files, user code, devices). Raises ConfigError
    with all problems.
    """
    if isinstance(cfg, root):
        if not overrides:
            _check_loaded(cfg, preflight)
            return cfg
        cfg = cfg.to_dict()
    kind, report = root_of(root), Report()
    user = _plain(cfg, root)
    chosen, changes = _split_overrides(user.pop(GROUPS_KEY, None) or {}, overrides, groups(kind.yaml), report)
    values = _merged(_merged(default_tree(chosen, kind.yaml), user), changes)
    config = _build(kind, values, default_values(chosen, kind.yaml), report)
    if check_files:
        kind.check_supported(config, report)
    kind.validate(config, report)
    if check_files:
        kind.check_environment(config, report)
    if preflight is not None:
        preflight(config, report)
    report.raise_if_any()
    config.notices = report.notices
    return config


def _check_loaded(config: Block, preflight: Preflight | None) -> None:
    report = Report()
    if preflight is not None:
        preflight(config, report)
    report.raise_if_any()


def as_config(cls: type[B], cfg: B | DictConfig | Mapping[str, Any] | None, at: str | None = None) -> B:
    """A block for code that users call directly: ours as it is, a DictConfig or dict on top of the block's defaults.

    `at` is the block's place (`actor_rollout_ref.actor`); only needed for classes used in several places. Unknown keys
    and bad values raise; what rests on other blocks is resolved with their defaults and not validated.
    """
    if isinstance(cfg, cls):
        return cfg
    place = _place_of(cls) if at is None else at
    report = Report()
    values: Any = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else dict(cfg or {})
    for name in reversed(place.split(".") if place else ()):
        values = {name: values}
    defaults = default_values()
    config = _build(root_of(PPOConfig), _merged(defaults, values), defaults, report)
    report.problems = [problem for problem in report.problems if problem.key.startswith(place)]
    report.raise_if_any()
    return pick(config, place)


def _build(kind: Root, values: dict[str, Any], defaults: Mapping[str, Any], report: Report) -> Any:
    """Plain merged values -> resolved blocks; problems go to the report."""
    kind.convert_old_keys(values, report)
    _move_aliases(values, alias_table(kind.cls), defaults, report)
    values = _interpolated(values, defaults, report)
    read_user_declarations(values.get("external_libs") or ())
    config: Any = Converter(kind.cls, defaults, report, extended=bool(values.get("external_libs"))).convert(values)
    config.changed = _changed_keys(config, defaults, kind.yaml)
    kind.resolve(config, report)
    return config


def _changed_keys(config: Block, defaults: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Every key that is not at its default, with its value; of a configuration whose nulls are not resolved yet.

    The default of any option of the key's group counts: once Hydra has composed `algorithm=grpo`, nobody knows.
    """
    found = {}
    for path, entry in walk(type(config)):
        value = pick(config, path) if entry.block is None else None
        if entry.block is None and value != pick(defaults, path) and not _is_an_option(path, value, root):
            found[path] = value
    return found


def _is_an_option(path: str, value: Any, root: str) -> bool:
    group, _, below = path.partition(".")
    stated = (_at(option, below) for option in alternatives(group, root))
    return any(value == (None if other is _ABSENT else other) for other in stated)


def _plain(cfg: Given, root: type[Block]) -> dict[str, Any]:
    """What the user set as plain dicts; `${…}` still stand as text."""
    if cfg is None:
        return {}
    if not isinstance(cfg, Mapping | DictConfig):
        raise TypeError(f"config: a DictConfig, a mapping or a {root.__name__} is expected, not {type(cfg).__name__}.")
    tree = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(dict(cfg))
    values = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(values, dict)
    values.pop("hydra", None)
    return values  # type: ignore[return-value]


def _merged(below: Any, above: Any) -> Any:
    """`above` on top of `below`, block by block; neither is changed."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{name: _merged(below.get(name), value) for name, value in above.items()}}


def _split_overrides(
    chosen: Mapping[str, Any], overrides: Sequence[str], known: Mapping[str, Sequence[str]], report: Report
) -> tuple[dict[str, str], dict[str, Any]]:
    """The options chosen of each group, and the other changes as nested values."""
    wanted = {str(group): str(option) for group, option in chosen.items()}
    changes: dict[str, Any] = {}
    for override in overrides:
        change = read_override(override, known)
        if change is None:
            report.problem(override, None, "is not an override", "Write it as key=value")
        elif change.is_option:
            wanted[change.key] = str(change.value)
        else:
            one: dict[str, Any] = {}
            _set(one, change.key, change.value)
            changes = _merged(changes, one)
    for group, option in list(wanted.items()):
        options = known.get(group, ())
        if option not in options:
            report.problem(group, option, f"{group} has no option of that name", f"Set one of {', '.join(options)}")
            del wanted[group]
    return wanted, changes


def _move_aliases(
    values: dict[str, Any], aliases: Mapping[str, str], defaults: Mapping[str, Any], report: Report
) -> None:
    """Values under another spelling go to their key, and the log says so; two that disagree are a problem."""
    for alias, canonical in aliases.items():
        given = _take(values, alias)
        for spelled, value in () if given in (_ABSENT, {}) else leaves(given, alias):
            target = canonical + spelled.removeprefix(alias)
            current = _at(values, target)
            if current is _ABSENT or current in (_at(defaults, target), value):
                _set(values, target, value)
                report.spelled(target, spelled)
                if spelled == alias or alias.partition(".")[0] != target.partition(".")[0]:
                    report.notice(f"{spelled} is read as {target}, which is {show(value)} now.")
                else:  # a block beside ours, of which scripts set a dozen keys
                    report.notice(f"{alias}.* is read as {canonical}.*.")
            else:
                why = f"is another spelling of {target} = {show(current)}, and they differ"
                report.broken(spelled, value, why, "Keep one of the two")


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return _ABSENT
        values = values[name]
    return values


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, copying the blocks on the way (they may be shared with the defaults)."""
    name, _, rest = path.partition(".")
    if rest:
        inner = values.get(name)
        values[name] = dict(inner) if isinstance(inner, Mapping) else {}
        _set(values[name], rest, value)
    else:
        values[name] = value


def _take(values: dict[str, Any], path: str) -> Any:
    """Remove and return the value at a dotted path, and blocks above it that held nothing else."""
    name, _, rest = path.partition(".")
    if not rest:
        return values.pop(name, _ABSENT)
    if not isinstance(values.get(name), Mapping):
        return _ABSENT
    inner = dict(values[name])
    taken = _take(inner, rest)
    if taken is not _ABSENT:
        values[name] = inner
        if not inner:
            del values[name]
    return taken


def _interpolated(values: dict[str, Any], defaults: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Every `${…}` resolved; those that lead nowhere are reported and take their defaults."""
    pending = [path for path, value in leaves(values, "") if "${" in str(value)]
    if not pending:
        return values
    tree = OmegaConf.create(values)
    for path in pending:
        try:
            resolved = OmegaConf.select(tree, path, throw_on_missing=True)
            plain = OmegaConf.to_container(resolved, resolve=True) if OmegaConf.is_config(resolved) else resolved
        except OmegaConfBaseException as error:
            why = str(error).splitlines()[0].strip().rstrip(".")
            fix = "Correct what is in ${…}, or set a value"
            report.broken(path, _at(values, path), f"cannot be resolved ({why})", fix)
            plain = _at(defaults, path)
        _set(values, path, None if plain is _ABSENT else plain)
    return values


def _place_of(cls: type[Block]) -> str:
    if cls is PPOConfig:
        return ""
    places = [path for path, entry in walk(PPOConfig) if entry.block is cls]
    if len(places) != 1:
        raise ValueError(f"at: {cls.__name__} is used in {len(places)} places ({', '.join(places)}). Say which one.")
    return places[0]
