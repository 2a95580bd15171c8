"""Checks before Ray starts: data files, users' code, tool files, the sandbox, the device and the model hub.

They take about a second, import neither torch nor ray and run no user code. Problems are added to the report of the
configuration, so that all are reported at once. Other problems are reported when data and code are loaded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from verl.config import ConfigError, PPOConfig, Problem, RMConfig, SFTConfig, SupervisedConfig
from verl.config.devices import has_no_gpu
from verl.config.generation import GenerationConfig
from verl.config.layout import scored_by_model, uses_custom_agent_loop
from verl.config.problems import Report
from verl.trainer.common.ray_cluster import joins_cluster
from verl.utils.fs import HubRepo, expand_path, find_hub_problems, is_hub_id

logger = logging.getLogger(__name__)

# Rules for the rows of a file, or a function that returns them for the columns of the file.
Rules = list[Any] | Callable[[Sequence[str]], list[Any]]

_AGENT = "actor_rollout_ref.rollout.agent"
# Number of files of a key that are opened.
_MAX_FILES = 256
# Tools that run code in the sandbox.
_CODE_TOOLS = ("verl.tools.sandbox_fusion_tools.SandboxFusionTool", "verl.tools.code_session_tool.CodeSessionTool")


def ppo_preflight(config: PPOConfig, report: Report) -> None:
    """Report problems that would stop `main_ppo` before its first step."""
    hub = _HubCheck(model_paths(config), _data_files(config))
    _check_device(config.trainer, report, config.trainer.node_rank is not None)
    check_user_code(config, report)
    _check_tools(config, report)
    data = config.data
    if data.custom_cls.path is None:
        size, key = data.train_batch_size, "data.train_batch_size"
        if data.gen_batch_size and data.gen_batch_size != size:
            size, key = data.gen_batch_size, "data.gen_batch_size"
        rules = _rl_rules(config)
        rows = _check_files("data.train_files", data.train_files, "train", rules, report, _notice_rules(config))
        _check_batch(key, size, rows, data.train_max_samples, report)
        _check_files("data.val_files", data.val_files, "validation", _rl_rules(config, validates=True), report)
    hub.report_to(report)


def basic_preflight(config: PPOConfig, report: Report) -> None:
    """Report problems that also stop a user's own TaskRunner, which may load data and code differently."""
    _check_device(config.trainer, report, config.trainer.node_rank is not None)


def supervised_preflight(config: SupervisedConfig, report: Report) -> None:
    """Report problems that would stop `main_sft` or `main_rm` before their first step."""
    from verl.utils.dataset.problems import present_rule, sft_rules

    data = config.data
    hub = _HubCheck({"model.path": config.model.path}, _data_files(config))
    _check_device(config.trainer, report)
    if data.custom_cls.path is not None:
        _check_code("data.custom_cls.path", data.custom_cls.path, data.custom_cls.name, report)
    elif isinstance(config, RMConfig):
        pairs = [present_rule(config.data[f"{name}_key"], f"data.{name}_key") for name in ("chosen", "rejected")]
        rows = _check_files("data.train_files", data.train_files, "train", pairs, report)
        _check_batch("data.train_batch_size", data.train_batch_size, rows, data.train_max_samples, report)
        _check_files("data.val_files", data.val_files, "validation", pairs, report)
    elif isinstance(config, SFTConfig):
        rules = partial(sft_rules, config.data)
        # A conversation may become several rows: only the dataset knows how many.
        _check_files("data.train_files", data.train_files, "train", rules, report)
        _check_files("data.val_files", data.val_files, "validation", rules, report)
    hub.report_to(report)


def generation_preflight(config: GenerationConfig, report: Report) -> None:
    """Report problems that would stop `main_generation` before its first response."""
    from verl.utils.dataset.problems import chat_rule

    rules = [chat_rule(config.data.prompt_key, "data.prompt_key")]
    hub = _HubCheck({"model.path": config.model.path}, {"data.path": config.data.path or ()})
    _check_device(config.trainer, report)
    _check_files("data.path", config.data.path, None, rules, report)
    hub.report_to(report)


def check_code_runner(config: PPOConfig) -> None:
    """Log where model-written code runs and how it is isolated. Raises ConfigError if the isolation is insufficient.

    Does nothing if no configured tool or data source runs such code.
    """
    from verl.sandbox.code_runner import CodeSettings

    settings = CodeSettings.from_config(config.sandbox, config.sandbox_fusion)
    consumers = [*_code_tools(config), *_code_data_sources(config)]
    if not consumers:
        return
    try:
        isolation = settings.check()
    except ValueError as error:
        key, value = ("sandbox_fusion.url", settings.url) if settings.url else ("sandbox.require", settings.require)
        fix = f"The sandbox is needed for {', '.join(consumers)}"
        raise ConfigError([Problem(key, value, str(error).rstrip("."), fix)]) from error
    logger.info("code that the model writes (%s) runs in %s", ", ".join(consumers), isolation)


def model_paths(config: PPOConfig) -> dict[str, str]:
    """Return the paths of the models that the run loads, by configuration key."""
    paths: dict[str, str | None] = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if config.critic.enable:
        paths["critic.model.path"] = config.critic.model.path
    if config.reward_model.enable:
        paths["reward_model.path"] = config.reward_model.path
    for name, teacher in config.distillation.local_teachers.items():
        paths[f"distillation.teacher_models.{name}.model_path"] = teacher.model_path
    return {key: path for key, path in paths.items() if path}


def _data_files(config: Any) -> dict[str, Sequence[str]]:
    custom = config.data.custom_cls.path is not None
    return {} if custom else {f"data.{name}": config.data[name] or () for name in ("train_files", "val_files")}


def _check_device(trainer: Any, report: Report, has_node_rank: bool = False) -> None:
    """Report `trainer.device=cuda` on a single machine without a GPU; nodes of a cluster are checked after joining."""
    nodes = getattr(trainer, "nnodes", 1)
    in_cluster = has_node_rank or _has_joined_cluster() or joins_cluster()
    if trainer.device == "cuda" and nodes == 1 and not in_cluster and has_no_gpu():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "no GPU is visible on this machine"
        if visible is not None:
            why += f" (CUDA_VISIBLE_DEVICES={visible!r})"
        fix = "Set trainer.device=cpu (or auto), or check the driver with nvidia-smi"
        report.problem("trainer.device", "cuda", why, fix)


def _has_joined_cluster() -> bool:
    """Return whether a user's program has already called `ray.init`. Does not import ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _rl_rules(config: PPOConfig, validates: bool = False) -> list[Any]:
    from verl.utils.dataset.problems import present_rule, rl_rules
    from verl.utils.reward_score import known_data_sources

    key, reward = "data.reward_fn_key", config.reward_model
    scored = validates or config.distillation.scores_responses
    has_other_reward = config.custom_reward_function.path is not None or reward.enable or reward.url is not None
    # Modules of external_libs may register data sources, which are only known after their import.
    needed = scored and not has_other_reward and not uses_custom_agent_loop(config)
    sources = None if not needed or config.external_libs else known_data_sources()
    rules = rl_rules(config.data, sources, needed)
    if sources is None and key in config.changed:  # the user has named a column: it must exist
        rules.append(present_rule(config.data.reward_fn_key, key))
    return rules


def _notice_rules(config: PPOConfig) -> list[Any]:
    """Return rules whose violations are only logged: a user's reward function probably needs a ground truth."""
    from verl.utils.dataset.problems import ground_truth_rule

    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    has_own_reward = config.custom_reward_function.path is not None
    return [ground_truth_rule(config.data.ground_truth_key, loop)] if has_own_reward else []


def _check_files(
    key: str,
    names: Iterable[str] | None,
    split: str | None,
    rules: Rules,
    report: Report,
    notices: Sequence[Any] = (),
) -> int | None:
    """Check the first rows of the local files of a key; return the number of rows of all files, None if unknown.

    Rows that violate `rules` are reported as problems; rows that violate `notices` are only logged.
    """
    from verl.trainer.common.file_preview import ReadBudget, read_preview
    from verl.utils.dataset.problems import find_problems
    from verl.utils.dataset.rows import Rows

    local = [_local_files(key, name, split, report) for name in names or ()]
    files = [file for entry in local for file in entry or ()]
    counts: list[int | None] = [None] if None in local or len(files) > _MAX_FILES else []
    budget = ReadBudget(min(len(files), _MAX_FILES))
    for file in files[:_MAX_FILES]:
        try:
            preview = read_preview(file, budget)
            counts.append(None if preview is None else preview.row_count)
            if preview is None:
                continue
            rows = Rows([preview.rows])
            for problem in find_problems(rows, rules(rows.columns) if callable(rules) else rules):
                report.formatted_problem(key, file, problem)
            for notice in find_problems(rows, notices) if len(rows) else ():
                report.notice(f"{key}: {notice}")
        except (ValueError, OSError) as error:
            report.formatted_problem(key, file, str(error))
            counts.append(None)
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _local_files(key: str, name: str, split: str | None, report: Report) -> list[str] | None:
    """Return the local files of an entry of `key` (file or folder); None: not local, or listed in a dataset card."""
    from verl.utils.dataset.rows import find_files

    local = Path(expand_path(name).removeprefix("file://"))
    # The library that reads the splits of a dataset card takes seconds to import.
    if not local.exists() or (local.is_dir() and (local / "README.md").exists()):
        return None
    try:
        return find_files(str(local), split)
    except ValueError as error:
        report.formatted_problem(key, name, str(error))
        return None


def _check_batch(key: str, size: int, rows: int | None, limit: int, report: Report) -> None:
    usable = rows if rows is None or limit < 0 else min(rows, limit)
    if usable and size > usable:
        why = f"data.train_files have only {usable} rows"
        report.problem(key, size, why, f"Set it to {usable} or less, or use more data", ("data.train_files",))


def check_user_code(config: PPOConfig, report: Report) -> None:
    reward, data, trainer = config.custom_reward_function, config.data, config.trainer
    _check_code("custom_reward_function.path", reward.path, reward.name, report)
    _check_code("data.custom_cls.path", data.custom_cls.path, data.custom_cls.name, report)
    _check_code("data.sampler.path", data.sampler.path, data.sampler.name, report)
    for module in config.external_libs:
        _check_code("external_libs", module, None, report)
    if trainer.cls_path is not None:
        path, _, name = trainer.cls_path.rpartition(":" if ":" in trainer.cls_path.removeprefix("pkg://") else ".")
        _check_code("trainer.cls_path", path, name, report)


def _check_code(key: str, path: str | None, name: str | None, report: Report) -> None:
    """Report a module or file that cannot be loaded; `load_config` has already reported files that do not exist."""
    from verl.trainer.common.code_scan import find_code_problem
    from verl.utils.import_utils import UserModule

    if not path:
        return
    try:
        problem = find_code_problem(UserModule.read(path), name)
    except (FileNotFoundError, UnicodeDecodeError):
        return
    if problem is not None:
        report.formatted_problem(key, path, problem)


def _check_tools(config: PPOConfig, report: Report) -> None:
    rollout = config.actor_rollout_ref.rollout
    turns, agent = rollout.multi_turn, rollout.agent
    if turns.enable and (turns.tool_config_path or turns.function_tool_path or turns.interaction_config_path):
        _check_tool_files(turns, report)
    if agent.agent_loop_config_path is not None and Path(agent.agent_loop_config_path).is_file():
        _check_loop_file(agent.agent_loop_config_path, report)
    if ":" in agent.default_agent_loop:
        path, _, name = agent.default_agent_loop.rpartition(":")
        _check_code(f"{_AGENT}.default_agent_loop", path, name, report)


def _check_tool_files(turns: Any, report: Report) -> None:
    from verl.agent.toolbox import FUNCTIONS, parse_tool_files
    from verl.trainer.common.code_scan import find_code_problem, find_tool_problem

    paths = [turns[name] for name in ("tool_config_path", "function_tool_path", "interaction_config_path")]
    if not all(path is None or Path(path).exists() for path in paths):
        return  # load_config has reported the missing file
    files = parse_tool_files(turns, report)
    for entry in (*(tool.base for tool in files.entries), *files.interactions):
        problem = find_code_problem(entry.path.module, entry.path.name)
        if problem is not None:
            report.formatted_problem(f"{entry.location}.class_name", str(entry.path), problem)
    if files.functions is not None:
        problem = find_tool_problem(files.functions)
        if problem is not None:
            report.formatted_problem(FUNCTIONS, files.functions.path, problem)


def _check_loop_file(path: str, report: Report) -> None:
    import yaml

    from verl.utils.import_utils import yaml_problem

    key = f"{_AGENT}.agent_loop_config_path"
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        report.problem(key, path, yaml_problem(error), "Correct the file at that line or the one above")
        return
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        report.problem(key, path, "is not a list of mappings", "Write a list of {name, _target_, …}")
        return
    for number, entry in enumerate(entries):
        target = str(entry.get("_target_", ""))
        module, _, name = target.rpartition(":" if ".py:" in target else ".")
        _check_code(f"{path}: entry {number}._target_", module, name, report)


def _code_tools(config: PPOConfig) -> Iterator[str]:
    """Yield the classes in the tool file that run code in the sandbox of this run."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if not turns.enable or turns.tool_config_path is None:
        return
    import yaml

    content: Any = yaml.safe_load(Path(turns.tool_config_path).read_text())
    for tool in (content or {}).get("tools") or []:
        if tool.get("class_name") in _CODE_TOOLS and not (tool.get("config") or {}).get("sandbox_fusion_url"):
            yield str(tool["class_name"]).rpartition(".")[2]


def _code_data_sources(config: PPOConfig) -> Iterator[str]:
    """Yield the data sources in local parquet files that are scored by the reward for code."""
    if config.custom_reward_function.path is not None or scored_by_model(config):
        return
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from verl.utils.reward_score import code, score_function

    column, sources = config.data.reward_fn_key, set()
    for path in (*config.data.train_files, *(config.data.val_files or ())):
        if path.endswith(".parquet") and Path(path).is_file() and column in pq.read_schema(path).names:
            sources |= set(pc.unique(pq.read_table(path, columns=[column])[column]).to_pylist())
    for source in sorted(map(str, sources)):
        try:
            if score_function(source).compute is code.compute_score:
                yield source
        except ValueError:  # an unknown source: reported with file and row when the data is loaded
            continue


class _HubCheck:
    """Checks in a thread, while other checks run, that the hub repositories of the run can be downloaded."""

    def __init__(self, models: Mapping[str, str | None], data: dict[str, Sequence[str]]) -> None:
        """`models`, `data`: paths by configuration key; local and missing paths are ignored."""
        self._keys: dict[HubRepo, str] = {}
        self._problems: Future[dict[HubRepo, str]] | None = None
        for key, path in models.items():
            if path and _is_on_hub(path):
                self._keys.setdefault(HubRepo(path), key)
        for key, names in data.items():
            for name in filter(_is_on_hub, names):
                self._keys.setdefault(HubRepo(name, "dataset"), key)
        if self._keys:
            executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub-check")
            self._problems = executor.submit(find_hub_problems, self._keys)
            executor.shutdown(wait=False)

    def report_to(self, report: Report) -> None:
        """Wait for the result, and report the repositories that cannot be downloaded."""
        for repo, problem in (self._problems.result() if self._problems is not None else {}).items():
            report.formatted_problem(self._keys[repo], repo.name, problem)


def _is_on_hub(path: str) -> bool:
    location = expand_path(path)
    return not os.path.exists(location) and is_hub_id(location)
