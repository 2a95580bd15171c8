"""examples/multi_turn: what the teacher says can be read, called and scored; every command composes; it learns."""

from __future__ import annotations

import importlib
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.commands import ROOT
from tests.support.training_harness import run_training
from verl.agent.chat import Chat
from verl.agent.chat_check import check_template
from verl.agent.toolbox import Toolbox
from verl.config import load_config
from verl.config.problems import Report
from verl.interactions.base import InteractionSet, read_interactions
from verl.utils.reward_score import default_compute_score
from verl.utils.tool_calls import ToolCall, get_parser

FOLDER = ROOT / "examples/multi_turn"
KINDS = ("calculator", "mcp", "user")
ROWS = {"sft": 20, "train": 8, "val": 4}


def load(name: str) -> ModuleType:
    """A module of the example; its names are those of other examples too."""
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    try:
        spec = importlib.util.spec_from_file_location(f"multi_turn_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        del sys.path[:2]


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    return load("tasks")


@pytest.mark.parametrize("kind", ["calculator", "user"])
def test_what_the_teacher_says_survives_the_tokenizer_and_is_scored(tasks, kind):
    tokenizer, rng, parser = tasks.tokenizer(kind), random.Random(0), get_parser("hermes")
    calculate = load("calculator").calculate
    rights, calls = [], 0
    for _ in range(200):
        told = tasks.TASKS[kind].make(rng)
        talk = told.conversation(rng)
        ids = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        said = [message["content"] for message in talk if message["role"] == "assistant"]
        rights.append(default_compute_score("openai/gsm8k", " ".join(said), told.answer))
        for call in parser.parse(tokenizer.decode(tokenizer(said[0])["input_ids"]))[1]:
            calls += 1
            assert (call.name, call.error) == ("calculate", None)
            assert calculate(expression=told.expression) == told.answer
    assert 0.2 < sum(rights) / len(rights) < 0.75, "there must be something to learn, and something to begin with"
    assert (calls > 0) == (kind == "calculator")
    check_template(Chat(tokenizer), "strict")


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_composes(tasks, tmp_path, kind):
    run = load("run")
    files = tasks.make_task(tmp_path, kind, rows=ROWS)
    config = load_config(None, run.training_overrides(kind, files, files["model"], tmp_path))
    assert config.notices == []
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "tool_agent"


@pytest.mark.parametrize("kind", ["calculator", pytest.param("mcp", marks=pytest.mark.slow)])
async def test_the_calculator_answers(monkeypatch, kind):
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("MULTI_TURN", str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = load("run")
    (environment,) = run.ENVIRONMENTS[kind]
    required = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=a/b", f"{run.ROLLOUT}.mode=async"]
    config = load_config(None, [*required, environment], check_files=False)
    interactions = Toolbox.load(config.actor_rollout_ref.rollout.multi_turn)
    try:
        async with interactions.session({}) as session:
            found = await session.call(ToolCall("calculate", '{"expression": " 17 - 5 "}'))
            wrong = await session.call(ToolCall("calculate", '{"expression": "__import__(1)"}'))
    finally:
        await interactions.close()
    assert (found.text, found.failure) == ("12", None)
    assert "cannot evaluate" in wrong.text


@pytest.mark.parametrize(("stated", "reward"), [(False, 0.0), (True, -0.2)])
async def test_the_customer_states_the_number_and_repeating_it_costs_reward(monkeypatch, stated, reward):
    monkeypatch.setenv("MULTI_TURN", str(FOLDER))
    report = Report()
    interactions = InteractionSet.load(read_interactions(str(FOLDER / "customer.yaml"), report), timeout_s=5)
    report.raise_if_any()
    row = {"extra_info": {"interaction_kwargs": {"name": "customer", "number": "23", "stated": stated}}}
    async with interactions.session(row) as customer:
        done, text, score, _ = await customer.respond([{"role": "assistant", "content": "How many ?"}])
        assert (done, "23" in text, score) == (False, True, reward)
        assert await customer.respond([{"role": "assistant", "content": "#### 7"}]) == (True, "", 0.0, {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["calculator", "user"])
def test_a_run_of_tool_agents_shares_prefixes_by_default(tasks, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("MULTI_TURN", str(FOLDER))
    run = load("run")
    files = tasks.make_task(tmp_path, kind, rows=ROWS)
    small = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.test_freq=-1"]
    small += ["trainer.total_training_steps=1", "trainer.val_before_train=False"]
    small += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32"]
    trainer = run_training([*run.training_overrides(kind, files, files["model"], tmp_path), *small])
    assert trainer.config.actor_rollout_ref.rollout.agent.default_agent_loop == "tool_agent"
    (metrics,) = trainer.history
    assert 0.1 < metrics["actor/prefix_saving"] < 1
    assert metrics["num_turns/max"] > 2 or kind == "calculator", "the simulated user answers"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_the_agent_learns(tmp_path: Path, kind: str):
    command = [sys.executable, "examples/multi_turn/run.py", kind, "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    before, after = map(float, re.search(r"reward ([\d.]+) before, ([\d.]+) after", done.stdout).groups())
    assert after > before + 0.3
