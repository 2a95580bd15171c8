"""`load_config`: defaults + user values -> validated config, or one ConfigError with all problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config import files, generation, resolve, rm, sft, unused_keys, validate
from verl.config.command_line import GROUPS_KEY, not_an_override, read_override
from verl.config.compose import alternatives, default_tree, default_values, groups, merge
from verl.config.convert import Converter, leaves
from verl.config.names import read_user_declarations
from verl.config.old_keys import convert_async_training, convert_dict_keys, convert_reward_workers
from verl.config.ppo import PPOConfig
from verl.config.problems import Report, show
from verl.config.schema import Block, alias_table, entries, get_path, join, walk

# Called with the config (an instance of `Root.cls`; `convert_old_keys`: the plain values) and the report.
ConfigFunction = Callable[[Any, Report], None]


@dataclass(frozen=True)
class Root:
    """The configuration of one program: its class, the YAML file with the defaults, and its rules."""

    cls: type[Block]
    yaml: str  # file name in verl/trainer/config, without suffix
    resolve: ConfigFunction  # replaces nulls by the values they stand for
    validate: ConfigFunction  # checks rules between keys
    check_environment: ConfigFunction  # checks files and packages of this machine
    check_supported: ConfigFunction = lambda config, report: None  # reports unsupported values, before all other rules
    convert_old_keys: ConfigFunction = lambda values, report: None  # converts old keys in the plain values


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
    sft.SFTConfig, "sft_trainer", sft.resolve, sft.validate, sft.check_environment, convert_old_keys=convert_dict_keys
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
    """Return the `Root` whose class is `cls`."""
    for root in ROOTS:
        if root.cls is cls:
            return root
    known = ", ".join(root.cls.__name__ for root in ROOTS)
    raise ValueError(f"root: {cls.__name__} is a block, not a whole configuration. Use one of {known}.")


B = TypeVar("B", bound=Block)
Config = PPOConfig | DictConfig | Mapping[str, Any]
ConfigInput = Block | DictConfig | Mapping[str, Any] | None
Preflight = Callable[[Any, Report], None]
"""Called with the resolved configuration (an instance of `root`) and the report to which it adds problems."""

_MISSING = object()


@overload
def load_config(cfg: ConfigInput = None, overrides: Sequence[str] = (), check_files: bool = True) -> PPOConfig: ...


@overload
def load_config(
    cfg: ConfigInput = None,
    overrides: Sequence[str] = (),
    check_files: bool = True,
    *,
    root: type[B],
    preflight: Preflight | None = None,
) -> B: ...


def load_config(
    cfg: ConfigInput = None,
    overrides: Sequence[str] = (),
    check_files: bool = True,
    *,
    root: type[Block] = PPOConfig,
    preflight: Preflight | None = None,
) -> Block:
    """Return the complete, resolved and validated configuration of a program, an instance of `root`.

    `cfg` contains some or all blocks; `overrides` (`key=value` or `group=option`) are applied on top.
    `check_files=False` skips checks that depend on this machine and version: files, packages, unsupported values.
    `preflight` adds problems that the program can detect before it starts (data files, user code, devices).
    Raises ConfigError with all problems.
    """
    if isinstance(cfg, root):
        if not overrides:
            report = Report()
            if preflight is not None:
                preflight(cfg, report)
            report.raise_if_any()
            return cfg
        cfg = cfg.to_dict()
    program, report = root_of(root), Report()
    user_values = _to_plain(cfg, root)
    selected = user_values.pop(GROUPS_KEY, None) or {}
    options, changes = _split_overrides(selected, overrides, groups(program.yaml), report)
    values = merge(merge(default_tree(options, program.yaml), user_values), changes)
    config = _build(program, values, default_values(options, program.yaml), report)
    if check_files:
        program.check_supported(config, report)
    program.validate(config, report)
    if check_files:
        program.check_environment(config, report)
    if preflight is not None:
        preflight(config, report)
    report.raise_if_any()
    config.notices = report.notices
    return config


def as_config(cls: type[B], cfg: B | DictConfig | Mapping[str, Any] | None, at: str | None = None) -> B:
    """Convert to a block: a `cls` is returned unchanged, a DictConfig or dict is merged with the block's defaults.

    `at` is the path of the block (`actor_rollout_ref.actor`), required for classes used in several paths. Unknown
    keys and invalid values raise ConfigError. Values that depend on other blocks are resolved with the defaults of
    those blocks; rules between keys are not checked.
    """
    if isinstance(cfg, cls):
        return cfg
    block = _find_path(cls) if at is None else at
    report = Report()
    values: Any = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else dict(cfg or {})
    for name in reversed(block.split(".") if block else ()):
        values = {name: values}
    defaults = default_values()
    config = _build(root_of(PPOConfig), merge(defaults, values), defaults, report)
    report.problems = [problem for problem in report.problems if problem.key.startswith(block)]
    report.raise_if_any()
    return get_path(config, block)


def _build(program: Root, values: dict[str, Any], defaults: Mapping[str, Any], report: Report) -> Any:
    """Convert merged plain values to resolved blocks; add problems to the report."""
    program.convert_old_keys(values, report)
    _move_aliases(values, alias_table(program.cls), defaults, report)
    values = _resolve_interpolations(values, defaults, report)
    config: Any = Converter(program.cls, defaults, report, extended=bool(values.get("external_libs"))).convert(values)
    libraries = getattr(config, "external_libs", [])  # only PPO has this key
    try:
        read_user_declarations(libraries)
    except ValueError as error:
        report.formatted_problem("external_libs", libraries, f"external_libs: {error}")
    config.changed = _changed_keys(config, defaults, program.yaml)
    program.resolve(config, report)
    return config


def _changed_keys(config: Block, defaults: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return the keys that differ from their defaults, with their values, before nulls are resolved.

    Values of any option of the key's group are defaults too: after Hydra has composed `algorithm=grpo`, the selected
    option is unknown.
    """
    changed: dict[str, Any] = {}
    _add_changed_keys(changed, config, defaults, "", root)
    return changed


def _add_changed_keys(changed: dict[str, Any], block: Block, defaults: Mapping[str, Any], path: str, root: str) -> None:
    for name, entry in entries(type(block)).items():
        value, default, key_path = getattr(block, name), defaults[name], join(path, name)
        if entry.block is not None:
            _add_changed_keys(changed, value, default, key_path, root)
        elif value != default and not _is_option_value(key_path, value, root):
            changed[key_path] = value


def _is_option_value(path: str, value: Any, root: str) -> bool:
    group, _, below = path.partition(".")
    option_values = (_get_or_missing(option, below) for option in alternatives(group, root))
    return any(value == (None if other is _MISSING else other) for other in option_values)


def _to_plain(cfg: ConfigInput, root: type[Block]) -> dict[str, Any]:
    """Convert the user's values to plain dicts; `${…}` stay text."""
    if cfg is None:
        return {}
    if not isinstance(cfg, Mapping | DictConfig):
        raise TypeError(f"config: expected a DictConfig, a mapping or a {root.__name__}, not {type(cfg).__name__}.")
    tree = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(dict(cfg))
    values = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(values, dict)
    values.pop("hydra", None)
    return values  # type: ignore[return-value]


def _split_overrides(
    preselected: Mapping[str, Any], overrides: Sequence[str], known: Mapping[str, Sequence[str]], report: Report
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the selected option of each group, and all other overrides as nested values.

    `preselected`: options that the command line has selected already; `known`: the options of each group.
    """
    selected = {str(group): str(option) for group, option in preselected.items()}
    changes: dict[str, Any] = {}
    for override in overrides:
        parsed = read_override(override, known)
        if parsed is None:
            report.add(not_an_override(override))
        elif parsed.is_option:
            selected[parsed.key] = str(parsed.value)
        else:
            nested: dict[str, Any] = {}
            _set_value(nested, parsed.key, parsed.value)
            changes = merge(changes, nested)
    for group, option in list(selected.items()):
        options = known.get(group, ())
        if option not in options:
            report.problem(group, option, f"{group} has no option of that name", f"Set one of {', '.join(options)}")
            del selected[group]
    return selected, changes


def _move_aliases(
    values: dict[str, Any], aliases: Mapping[str, str], defaults: Mapping[str, Any], report: Report
) -> None:
    """Move values from aliases to their keys and log it; conflicting values are a problem."""
    for alias, canonical in aliases.items():
        aliased = _pop_value(values, alias)
        for alias_path, value in () if aliased in (_MISSING, {}) else leaves(aliased, alias):
            target = canonical + alias_path.removeprefix(alias)
            current = _get_or_missing(values, target)
            if current is _MISSING or current in (_get_or_missing(defaults, target), value):
                _set_value(values, target, value)
                report.record_alias(target, alias_path)
                if alias_path == alias or alias.partition(".")[0] != target.partition(".")[0]:
                    report.notice(f"{alias_path} is an alias: {target} = {show(value)}.")
                else:  # an alias of a block: one notice for all of its keys
                    report.notice(f"{alias}.* is an alias of {canonical}.*.")
            else:
                why = f"is an alias of {target} = {show(current)}, and they differ"
                report.invalid(alias_path, value, why, "Keep one of the two")


def _get_or_missing(values: Any, path: str) -> Any:
    """Return the value at a dotted path of plain values; `_MISSING` if there is none."""
    for name in path.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return _MISSING
        values = values[name]
    return values


def _set_value(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, copying the blocks on the way (they may be shared with the defaults)."""
    name, _, rest = path.partition(".")
    if rest:
        inner = values.get(name)
        values[name] = dict(inner) if isinstance(inner, Mapping) else {}
        _set_value(values[name], rest, value)
    else:
        values[name] = value


def _pop_value(values: dict[str, Any], path: str) -> Any:
    """Remove and return the value at a dotted path; also remove blocks that become empty."""
    name, _, rest = path.partition(".")
    if not rest:
        return values.pop(name, _MISSING)
    if not isinstance(values.get(name), Mapping):
        return _MISSING
    inner = dict(values[name])
    taken = _pop_value(inner, rest)
    if taken is not _MISSING:
        values[name] = inner
        if not inner:
            del values[name]
    return taken


def _resolve_interpolations(values: dict[str, Any], defaults: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Resolve every `${…}`; report those that cannot be resolved and use their defaults."""
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
            fix = "Correct the expression in ${…}, or set a value"
            report.invalid(path, _get_or_missing(values, path), f"cannot be resolved ({why})", fix)
            plain = _get_or_missing(defaults, path)
        _set_value(values, path, None if plain is _MISSING else plain)
    return values


def _find_path(cls: type[Block]) -> str:
    if cls is PPOConfig:
        return ""
    paths = [path for path, entry in walk(PPOConfig) if entry.block is cls]
    if len(paths) != 1:
        raise ValueError(
            f"at: {cls.__name__} is used in {len(paths)} places ({', '.join(paths)}). Set at to one of them."
        )
    return paths[0]
