"""What ended a row: the engine's finish reason of the last call, whatever the loop made of the answer."""

from __future__ import annotations

import asyncio
import functools
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.chat_models import chat_tokenizer
from tests.support.engine_clients import engine_client
from tests.support.script_runner import scripted_engine
from verl.agent.chat import Chat
from verl.agent.gateway.agent import GatewayAgentLoop
from verl.agent.loop import AgentLoopBase, AgentLoopOutput
from verl.agent.outputs import RowLimits, build_trajectory
from verl.agent.search_loop import SearchAgentLoop
from verl.agent.single_turn import SingleTurnAgentLoop
from verl.agent.tool_loop import ToolAgentLoop
from verl.agent.toolbox import CallLimits, Toolbox
from verl.config import load_config
from verl.interactions.base import InteractionSet
from verl.trainer.ppo.metric_utils import truncated_rows
from verl.types.request import SamplingParams
from verl.types.trajectory import Trajectory
from verl.workers.rollout.call_trace import CallTrace, tracing
from verl.workers.rollout.training_rows import rows_from_trajectories

TOKENIZER = chat_tokenizer("qwen2_5")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
WORD, OTHER = (TOKENIZER(text, add_special_tokens=False)["input_ids"][0] for text in ("a", "b"))
QUESTION = [{"role": "user", "content": "How warm is it?"}]


@functools.cache
def config_of(max_model_len: int) -> Any:
    given = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "data.max_response_length=8"]
    given += ["data.max_prompt_length=8", f"actor_rollout_ref.rollout.max_model_len={max_model_len}"]
    given += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8"]
    return load_config(None, given, check_files=False)


def play(
    loop: type[AgentLoopBase], length: int, room: int = 40, max_model_len: int = 512, prompt: int = 4, **keywords: Any
) -> Trajectory:
    """The trajectory of a loop whose prompt has `prompt` tokens, and whose model answers with `length` tokens, the last
    of them the end token."""
    config, answers = config_of(max_model_len), [0]

    def speak(seen: Any) -> int:
        answers[0] = answers[0] % length + 1
        return END if answers[0] == length else OTHER

    async def run() -> Trajectory:
        toolbox = Toolbox([], CallLimits(0.5, 256, "middle"), interactions=InteractionSet({}, 5.0))
        loop.init_class(config, TOKENIZER, None, toolbox=toolbox, **keywords)
        params = SamplingParams(max_new_tokens=room, eos_token_ids=frozenset([END]))
        trace = CallTrace(group="uid")
        sampling = {"max_new_tokens": room, "temperature": 1.0, "stop": [], "stop_token_ids": []}
        async with engine_client(engine, params=params, max_model_len=max_model_len) as client:
            agent = loop(
                config=config,
                rollout_config=config.actor_rollout_ref.rollout,
                server_manager=client,
                tokenizer=TOKENIZER,
                toolbox=toolbox,
                **keywords,
            )
            with tracing(trace):
                outputs = await agent.run(sampling, raw_prompt=QUESTION, prompt_ids=[WORD] * prompt, uid="uid")
        return build_trajectory(outputs, trace, "uid", 0, RowLimits(room, max_model_len))

    engine = scripted_engine(speak, max_model_len, tokenizer=TOKENIZER)
    try:
        return asyncio.run(run())
    finally:
        engine.close()


def is_cut(trajectory: Trajectory) -> bool:
    """What `response_length/clip_ratio` and `algorithm.truncated_responses` read."""
    return bool(truncated_rows(rows_from_trajectories([trajectory], pad_token_id=0))[-1])


class Turns(AgentLoopBase):
    """A user's loop of two turns, which changes answers by `edit` before it goes on."""

    edit: Callable[[list[int]], list[int]] = staticmethod(lambda ids: ids)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        response, mask = [], []
        for said in ([], [WORD] * 3):
            response, mask = response + said, mask + [0] * len(said)
            answer = await self.server_manager.generate(
                "x", prompt_ids=row["prompt_ids"] + response, sampling_params=sampling_params
            )
            kept = self.edit(answer.token_ids)
            response, mask = response + kept, mask + [1] * len(kept)
        return AgentLoopOutput(row["prompt_ids"], response, mask)


class Stripping(Turns):
    edit = staticmethod(lambda ids: ids[:-1] if ids[-1:] == [END] else ids)


class Cutting(Turns):
    edit = staticmethod(lambda ids: ids[:2])


class Rewording(Turns):
    """No token of an answer is as it was sampled."""

    edit = staticmethod(lambda ids: [WORD] * len(ids))


@pytest.mark.parametrize(
    ("loop", "length", "room", "reason"),
    [
        (Turns, 5, 40, "stop"),
        (Turns, 30, 40, "length"),
        (Turns, 30, 33, "length"),  # no room for the second answer
        (Stripping, 5, 40, "stop"),
        (Stripping, 30, 40, "length"),
        (Cutting, 5, 40, "length"),
        (Rewording, 5, 40, "stop"),
        (Rewording, 60, 40, "length"),
    ],
)
def test_a_users_loop(loop, length, room, reason):
    trajectory = play(loop, length, room)
    assert trajectory.rows[-1].finish_reason == reason
    assert is_cut(trajectory) == (reason == "length")


@pytest.mark.parametrize("loop", [SingleTurnAgentLoop, ToolAgentLoop])
def test_our_loops_that_stop(loop):
    assert play(loop, 5).rows[-1].finish_reason == "stop"


@pytest.mark.parametrize("loop", [SingleTurnAgentLoop, ToolAgentLoop, SearchAgentLoop])
@pytest.mark.parametrize("has_room", [True, False])
def test_our_loops_that_run_out_of_tokens(loop, has_room, monkeypatch):
    """The model's answer is cut, or the prompt fills the whole window."""
    monkeypatch.setattr(SearchAgentLoop, "init_class", classmethod(lambda cls, *args, **own: None))
    prompt = len(Chat(TOKENIZER).prompt_ids(QUESTION))
    trajectory = play(loop, 60, max_model_len=512 if has_room else prompt, prompt=prompt)
    assert bool(trajectory.rows[-1].response_length) == has_room
    assert trajectory.rows[-1].finish_reason == "length"
    assert is_cut(trajectory)


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        return json.load(urllib.request.urlopen(request))
    except urllib.error.HTTPError as error:
        return json.load(error)


async def talks(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any, say: str, starts_anew: bool) -> Any:
    """Goes on until there is no room, and does not mind."""
    messages = list(prompt)
    for _ in range(3):
        reply = await asyncio.to_thread(post, f"{base_url}/v1/chat/completions", {"model": "m", "messages": messages})
        if "error" in reply:
            return {"reward": float(reply["error"]["code"] == "context_length_exceeded")}
        more = {"role": "user", "content": say}
        messages = [more] if starts_anew else [*messages, reply["choices"][0]["message"], more]
    return {"reward": 1.0}


@pytest.mark.parametrize(
    ("room", "max_model_len", "say", "starts_anew", "reason"),
    [
        (400, 512, "go on", False, "stop"),
        (12, 512, "go on and on and on", False, "length"),  # of tokens
        (400, 128, "go on " * 100, False, "length"),  # of context
        (400, 128, "go on " * 100, True, "stop"),  # of context in a new conversation: the row before it is finished
        (400, 512, "go on", True, "stop"),
    ],
)
def test_the_gateway(room, max_model_len, say, starts_anew, reason):
    keywords = {"run_agent": f"{__name__}.talks", "agent_kwargs": {"say": say, "starts_anew": starts_anew}}
    trajectory = play(GatewayAgentLoop, 5, room, max_model_len, **keywords)
    assert trajectory.rows[-1].finish_reason == reason
    assert is_cut(trajectory) == (reason == "length")
    assert trajectory.score == 1.0
    assert all(turn.finish_reason == "stop" for row in trajectory.rows[:-1] for turn in row.turns if turn.log_probs)
