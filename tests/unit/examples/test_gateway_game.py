"""The agents of `examples/multi_turn/gateway` against a gateway whose model plays well, or badly."""

from __future__ import annotations

import json
import shutil
import urllib.request

import pytest

from tests.support.commands import ROOT, run_script
from tests.support.gateway_server import running_gateway
from tests.support.training_harness import run_training
from verl.agent.gateway.agent import load_agent, start_agent
from verl.utils.import_utils import load_extern_object

FOLDER = ROOT / "examples" / "multi_turn" / "gateway"


def play(name, base_url, secret, **keywords):
    return start_agent(
        load_agent(f"{FOLDER / 'agent.py'}:{name}", keywords),
        base_url=base_url,
        prompt=[{"role": "user", "content": "guess"}],
        request_kwargs={"max_tokens": 1},
        metadata={"reward_model": {"ground_truth": str(secret)}},
        **keywords,
    ).result()


def session(gateway, name):
    with urllib.request.urlopen(gateway.base_url(name)) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize(
    ("said", "reward", "heard"),
    [("465", 1.0, ["guess", "higher", "lower"]), ("444", 0.0, ["guess", "higher", "higher"]), ("x", 0.0, ["guess"])],
)
def test_the_python_agent_plays(said, reward, heard):
    with running_gateway(said.__getitem__) as gateway:
        assert play("run_agent", gateway.base_url("s"), 5) == {"reward": reward, "guesses": len(heard)}
        nodes = session(gateway, "s")["nodes"]
        assert [node["messages"][-1]["content"] for node in nodes] == heard
        assert [node["parent"] for node in nodes] == [None, 0, 1][: len(heard)], "what was said is not tokenised again"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
@pytest.mark.parametrize(("said", "reward"), [("465", 1), ("4444", 0)])
def test_the_javascript_agent_plays_and_posts_its_reward(said, reward):
    with running_gateway(said.__getitem__) as gateway:
        play("run_node", gateway.base_url("s"), 5, program=str(FOLDER / "agent.mjs"))
        state = session(gateway, "s")
        assert state["reward_info"] == {"reward": reward}
        assert len(state["nodes"]) == 3


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
def test_a_javascript_agent_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match=r"agent\.mjs .*\b1$"):
        play("run_node", "http://127.0.0.1:9/sessions/s", 5, program=str(FOLDER / "agent.mjs"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reward_of_the_example_rises(tmp_path, monkeypatch):
    """The command of run.sh, in one process and for half of its steps."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FOLDER", str(tmp_path / "game"))
    _, _, *arguments = run_script("examples/multi_turn/gateway/run.sh", tmp_path)
    load_extern_object(str(FOLDER / "game.py"), "make_game")(tmp_path / "game")
    trainer = run_training(
        [*arguments, "trainer.total_training_steps=30", "trainer.test_freq=-1", "trainer.logger=[file]"]
    )
    rewards = [step["critic/score/mean"] for step in trainer.history if "critic/score/mean" in step]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards
