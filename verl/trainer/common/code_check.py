"""Before Ray starts: does this run execute code that the model writes, and may it be executed here?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.config import ConfigError, PPOConfig, Problem
from verl.config.layout import scored_by_model
from verl.sandbox.code_runner import CodeSettings
from verl.utils.reward_score import code, score_function

logger = logging.getLogger(__name__)

_TOOLS = ("verl.tools.sandbox_fusion_tools.SandboxFusionTool", "verl.tools.code_session_tool.CodeSessionTool")


def check_code_runner(config: PPOConfig) -> None:
    """Say where model-written code runs and what isolates it; a ConfigError where nothing good enough does.

    Only where something is known to run such code: our tools, and our reward for code.
    """
    settings = CodeSettings.of(config.sandbox, config.sandbox_fusion)
    users = [*_tools(config), *_data_sources(config)]
    if not users:
        return
    try:
        offered = settings.check()
    except ValueError as error:
        key, value = ("sandbox_fusion.url", settings.url) if settings.url else ("sandbox.require", settings.require)
        fix = f"It is needed for {', '.join(users)}"
        raise ConfigError([Problem(key, value, str(error).rstrip("."), fix)]) from error
    logger.info("code that the model writes (%s) runs in %s", ", ".join(users), offered)


def _tools(config: PPOConfig) -> Iterator[str]:
    """Those of the tool file that run code in the sandbox of this run."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    if not turns.enable or turns.tool_config_path is None:
        return
    import yaml

    listed: Any = yaml.safe_load(Path(turns.tool_config_path).read_text())
    for tool in (listed or {}).get("tools") or []:
        if tool.get("class_name") in _TOOLS and not (tool.get("config") or {}).get("sandbox_fusion_url"):
            yield str(tool["class_name"]).rpartition(".")[2]


def _data_sources(config: PPOConfig) -> Iterator[str]:
    """Those of the data, as far as it lies here in parquet files, that the reward for code scores."""
    if config.custom_reward_function.path is not None or scored_by_model(config):
        return
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    column, found = config.data.reward_fn_key, set()
    for path in (*config.data.train_files, *(config.data.val_files or ())):
        if path.endswith(".parquet") and Path(path).is_file() and column in pq.read_schema(path).names:
            found |= set(pc.unique(pq.read_table(path, columns=[column])[column]).to_pylist())
    for source in sorted(map(str, found)):
        try:
            if score_function(source).compute is code.compute_score:
                yield source
        except ValueError:  # nobody scores it: said with file and row when the data is loaded
            continue
