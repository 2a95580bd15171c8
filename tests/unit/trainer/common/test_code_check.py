"""Before Ray starts it is known whether code that the model writes may be run: only where something runs such code."""

from __future__ import annotations

import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config import ConfigError, load_config, names
from verl.sandbox import REQUIRE, Isolation, code_runner
from verl.trainer.common.preflight import check_code_runner

TOOLS = """
tools:
  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {}
"""


def config(tmp_path, source, *overrides):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([{"data_source": source, "prompt": "?"}] * 3), path)
    return load_config(
        None, [f"data.train_files={path}", "actor_rollout_ref.model.path=a/b", *overrides], check_files=False
    )


@pytest.fixture
def bare_host(monkeypatch):
    """A host that isolates nothing."""
    monkeypatch.setattr(code_runner, "available", lambda: Isolation(missing=("no user namespaces",)))


def test_a_run_without_code_asks_for_nothing(tmp_path, bare_host):
    check_code_runner(config(tmp_path, "openai/gsm8k", "sandbox.require=full"))


def test_too_little_isolation_for_rewards_is_refused_with_the_remedy(tmp_path, bare_host, caplog):
    with pytest.raises(ConfigError, match=r"(?s)sandbox\.require = files.*'none'.*taco_easy"):
        check_code_runner(config(tmp_path, "taco_easy"))
    caplog.set_level(logging.INFO)
    check_code_runner(config(tmp_path, "taco_easy", "sandbox.require=none"))
    assert "(taco_easy) runs in the local sandbox: level none" in caplog.text


def test_tools_that_run_code_ask_too(tmp_path, bare_host):
    file = tmp_path / "tools.yaml"
    turns = ["actor_rollout_ref.rollout.multi_turn.enable=True", "actor_rollout_ref.rollout.mode=async"]
    turns += [f"actor_rollout_ref.rollout.multi_turn.tool_config_path={file}"]
    file.write_text(TOOLS)
    with pytest.raises(ConfigError, match=r"(?s)sandbox\.require = files.*SandboxFusionTool"):
        check_code_runner(config(tmp_path, "gsm8k", *turns))
    file.write_text(TOOLS.replace("{}", "{sandbox_fusion_url: http://127.0.0.1:1}"))
    check_code_runner(config(tmp_path, "gsm8k", *turns))


def test_a_server_that_does_not_answer_is_told_and_its_spellings_are_one(tmp_path, bare_host):
    loaded = config(tmp_path, "mbpp", "reward.sandbox_fusion.url=http://127.0.0.1:1")
    assert loaded.sandbox_fusion.url == "http://127.0.0.1:1"
    assert any(notice.startswith("reward.sandbox_fusion.url ") for notice in loaded.notices)
    with pytest.raises(ConfigError, match=r"sandbox_fusion\.url = http.*verl\.sandbox\.server"):
        check_code_runner(loaded)
    other = config(tmp_path, "mbpp", "reward_model.sandbox_fusion={url: http://h, max_concurrent: 8}").sandbox_fusion
    assert (other.url, other.max_concurrent, other.memory_limit_mb) == ("http://h", 8, 1024)


def test_the_levels_are_those_of_the_sandbox():
    assert names.SANDBOX_LEVELS == REQUIRE
