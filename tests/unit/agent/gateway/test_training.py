"""Training with agents that only know an HTTP address: those that play, and those that die in every way."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.training_harness import make_task, overrides, run_training

ROLLOUT = "actor_rollout_ref.rollout"
# How each of them ends; a batch has two rows of every kind.
AGENTS = ("talks", "strips", "raises", "is_killed", "is_silent", "blocks", "posts_and_raises", "is_plain")
AGENT_FILE = '''
import asyncio, json, sys, time, urllib.request
from openai import AsyncOpenAI, OpenAI

CLIENT = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1", max_retries=0)
NEXT = {"role": "user", "content": "go on"}
# It asks once, asks again, and is killed before it has read the answer.
KILLED = """
import http.client, json, os, signal, sys, urllib.parse
from openai import OpenAI
address, messages = urllib.parse.urlsplit(sys.argv[1]), [{"role": "user", "content": "x"}]
client = OpenAI(api_key="none", base_url=sys.argv[1] + "/v1")
client.chat.completions.create(model="m", messages=messages, max_tokens=2)
connection = http.client.HTTPConnection(address.netloc)
body = json.dumps({"model": "m", "messages": messages, "stream": True, "ignore_eos": True})
connection.request("POST", address.path + "/v1/chat/completions", body, {"Content-Type": "application/json"})
connection.getresponse()
os.kill(os.getpid(), signal.SIGKILL)
"""

async def ask(base_url, messages, **kwargs):
    client = CLIENT.with_options(base_url=base_url + "/v1")
    told = await client.chat.completions.create(model="m", messages=messages, max_tokens=3, **kwargs)
    return told.choices[0].message

async def talks(base_url, prompt, request_kwargs, metadata):
    said = await ask(base_url, prompt, **request_kwargs)
    again = await ask(base_url, [*prompt, said, NEXT])
    text = said.content + again.content
    return {"reward": sum(c < "P" for c in text) / max(1, len(text)), "index": metadata["extra_info"]["index"]}

async def strips(base_url, prompt, request_kwargs, metadata):
    await ask(base_url, prompt)
    changed = {"role": "assistant", "content": "what I heard"}
    await ask(base_url, [*prompt, changed, NEXT])
    return {"reward_info": {"reward": 0.25}}

async def raises(base_url, prompt, request_kwargs, metadata):
    await ask(base_url, prompt)
    sys.exit("lost")  # the other agents' event loop is this one's

async def is_killed(base_url, prompt, request_kwargs, metadata):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, base_url)
    if await process.wait():
        raise RuntimeError(f"exit code {process.returncode}")

async def is_silent(base_url, prompt, request_kwargs, metadata):
    return {"reward": 1.0}

def blocks(base_url, prompt, request_kwargs, metadata):
    time.sleep(5)

async def posts_and_raises(base_url, prompt, request_kwargs, metadata):
    await ask(base_url, prompt)
    body = json.dumps({"reward_info": {"reward": 0.5}}).encode()
    request = urllib.request.Request(base_url + "/reward_info", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request).close()  # blocks the agents' event loop, never the one that answers
    raise ValueError("after the reward")

def is_plain(base_url, prompt, request_kwargs, metadata):
    """No async, and no reward of its own: scored as any answer is."""
    with OpenAI(api_key="none", base_url=base_url + "/v1") as client:
        client.chat.completions.create(model="m", messages=prompt, max_tokens=4)
'''


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("gateway")
    task = make_task(folder, rows=len(AGENTS))
    for split in ("train", "val"):
        table = pq.read_table(task[split]).to_pylist()
        rows = [{**row, "agent_name": AGENTS[number % len(AGENTS)]} for number, row in enumerate(table)]
        pq.write_table(pa.Table.from_pylist(rows), task[split])
    (folder / "agents.py").write_text(AGENT_FILE)
    entries = [
        {
            "name": name,
            "_target_": "verl.agent.gateway.GatewayAgentLoop",
            "run_agent": f"{folder / 'agents.py'}:{name}",
            "timeout": 1.0 if name == "blocks" else 60.0,
            "request_kwargs": {"temperature": 0.0} if name == "talks" else {},
        }
        for name in AGENTS
    ]
    (folder / "agents.yaml").write_text(yaml.safe_dump(entries))
    arguments = overrides(
        task,
        folder,
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.agent.agent_loop_config_path={folder / 'agents.yaml'}",
        "data.max_prompt_length=48",
        "data.max_response_length=64",
        "trainer.total_training_steps=1",
        f"trainer.rollout_data_dir={folder / 'dumps'}",
    )
    return run_training(arguments), folder


def test_a_step_is_trained_and_every_death_is_counted(trained):
    trainer, _ = trained
    (step,) = trainer.history
    kinds = {name.rpartition("/")[2]: value for name, value in step.items() if name.startswith("agent_loop/failures/")}
    assert kinds == {"branch": 2, "exception": 6, "no_request": 2, "timeout": 2}
    assert step["agent_loop/trajectories/failed"] == 8
    assert step["agent_loop/unmatched_tokens"] == 0
    assert step["actor/grad_norm"] > 0


def test_rewards_are_the_agents_or_as_of_any_answer(trained):
    _, folder = trained
    rows = [json.loads(line) for line in (folder / "dumps" / "1.jsonl").read_text().splitlines()]
    of = {name: [row for row in rows if row["agent_name"] == name] for name in AGENTS}
    for row in of["talks"]:
        assert [turn["by"] for turn in row["turns"]] == ["model", "environment", "model"]
        assert "go on" in row["turns"][1]["text"]
        assert row["score"] == pytest.approx(row["reward_info"]["reward"])
        assert row["reward_info"]["index"] == row["extra_info"]["index"], "an agent knows its row"
    assert {row["score"] for row in of["strips"]} == {0.25}
    assert {row["score"] for row in of["posts_and_raises"]} == {0.5}
    for row in of["is_plain"]:
        assert row["score"] == pytest.approx(sum(c < "P" for c in row["output"]) / len(row["output"]))
    died = [row for name in ("raises", "is_killed", "is_silent", "blocks") for row in of[name]]
    assert {row["status"] for row in died} == {"failed"}
