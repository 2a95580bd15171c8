"""tool_agent, a scripted model in the real engine: every branch, and whose tokens are whose, one by one."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from typing import Any

import pytest

from tests.support.chat_models import chat_tokenizer
from tests.support.engine_clients import engine_client
from tests.support.script_runner import log_prob, scripted_engine, scripted_turns
from verl.agent.chat import Chat
from verl.agent.outputs import build_trajectory
from verl.agent.tool_loop import ToolAgentLoop
from verl.agent.toolbox import CallLimits, Toolbox
from verl.config import load_config
from verl.interactions.base import BaseInteraction, InteractionSet
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool
from verl.types.request import SamplingParams
from verl.workers.rollout.call_trace import CallTrace, tracing

TURNS = "actor_rollout_ref.rollout.multi_turn"
QUESTION = [{"role": "user", "content": "How warm is it?"}]
TOKENIZER = chat_tokenizer("qwen2_5")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")

LIMITS = CallLimits(0.5, 256, "middle")


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def call(name, **arguments):
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def weather(city: str, days: int = 1):
    """Of a city.

    Args:
        city: where
        days: how many
    """
    return f"{city}: {days} warm"


async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"slept {seconds}"


def broken() -> str:
    raise OSError("no cable")


def rewarding(reward: float):
    return "thanks", reward


class Counting(BaseTool):
    """State for each trajectory, and a reward at its end."""

    def __init__(self) -> None:
        schema = {
            "type": "function",
            "function": {"name": "count", "description": "", "parameters": {"type": "object", "properties": {}}},
        }
        super().__init__({}, schema)
        self.live: dict[str, int] = {}

    async def create(self, instance_id=None, **kwargs):
        self.live[instance_id] = 0
        return instance_id, None

    async def execute(self, instance_id, parameters, **kwargs):
        self.live[instance_id] += 1
        return str(self.live[instance_id])

    async def calc_reward(self, instance_id, **kwargs):
        return 10.0 * self.live[instance_id]

    async def release(self, instance_id, **kwargs):
        del self.live[instance_id]


@functools.cache
def config_of(*changes):
    lengths = ("data.max_prompt_length=8", "data.max_response_length=8")
    given = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", *lengths, *changes]
    return load_config(None, given, check_files=False)


class Played:
    """One trajectory of a model that says `turns`."""

    def __init__(
        self,
        turns,
        *changes,
        tools=(),
        users=None,
        room=2000,
        max_model_len=4096,
        row=None,
        tokenizer=TOKENIZER,
        prompt="<|im_start|>assistant\n",
        ends=("<|im_end|>",),
    ):
        """All turns end with the first of `ends`; the engine stops at each of them."""
        config = config_of(f"actor_rollout_ref.rollout.max_model_len={max_model_len}", *changes)
        self.ends = tokenizer.convert_tokens_to_ids(list(ends))
        said = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
        prompt = Chat(tokenizer).encode(prompt)
        self.engine = scripted_engine(scripted_turns(said, prompt, self.ends[0]), max_model_len)
        self.engine.version = 3
        self.trace = CallTrace()
        made = [FunctionTool(tool) if callable(tool) else tool for tool in tools]
        self.toolbox = Toolbox(made, LIMITS, interactions=InteractionSet(users or {}, 5.0))
        self.row = {"raw_prompt": QUESTION, **(row or {})}
        try:
            self.output = asyncio.run(self._run(config, tokenizer, room, max_model_len))
        finally:
            self.engine.close()
        self.chat = Chat(tokenizer, self.toolbox.schemas())
        self.trajectory = build_trajectory(self.output, self.trace, "uid", 0)
        self.metrics = self.trajectory.extra["agent_metrics"]
        self.turns = self.trajectory.rows[0].turns

    async def _run(self, config, tokenizer, room, max_model_len):
        ToolAgentLoop.init_class(config, tokenizer, None, toolbox=self.toolbox, end_token_ids=self.ends)
        params = SamplingParams(max_new_tokens=room, eos_token_ids=frozenset(self.ends))
        reached = {"params": params, "max_model_len": max_model_len, "on_lost": self.on_lost}
        async with engine_client(self.engine, **reached) as client:
            loop = ToolAgentLoop(
                config=config,
                rollout_config=config.actor_rollout_ref.rollout,
                server_manager=client,
                tokenizer=tokenizer,
                toolbox=self.toolbox,
            )
            with tracing(self.trace):
                return await loop.run({"max_new_tokens": room, "temperature": 1.0}, **self.row)

    def on_lost(self, why):
        raise AssertionError(why)

    @property
    def said(self):
        """Text of each turn, the model's and others'."""
        return [(turn.source, self.chat.decode(turn.token_ids)) for turn in self.turns]

    @property
    def told(self):
        """What the tools said, as the template frames it."""
        texts = [text for source, text in self.said if source == "environment"]
        return [
            part.partition("\n</tool_response>")[0] for text in texts for part in text.split("<tool_response>\n")[1:]
        ]


def test_tokens_masks_log_probs_and_versions_line_up_one_by_one():
    engine = []

    def newer(city: str) -> str:
        engine[0].version = 4  # weights that arrive between two turns
        return f"{city}: warm"

    class Noted(Played):
        async def _run(self, *args):
            engine.append(self.engine)
            return await super()._run(*args)

    played = Noted([f"Let me see.\n{call('newer', city='Köln')}", "It is warm."], tools=[newer])
    first, told, last = played.turns
    whole = [*played.output.prompt_ids, *first.token_ids, *told.token_ids, *last.token_ids]
    messages = [
        *QUESTION,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"type": "function", "function": {"name": "newer", "arguments": {"city": "Köln"}}}],
        },
        {"role": "tool", "content": "Köln: warm"},
        {"role": "assistant", "content": "It is warm."},
    ]
    text = TOKENIZER.apply_chat_template(messages, tools=played.toolbox.schemas(), tokenize=False).rstrip("\n")
    assert TOKENIZER.decode(whole) == text
    assert whole == encode(text)
    assert played.output.response_mask == [1] * len(first.token_ids) + [0] * len(told.token_ids) + [1] * len(
        last.token_ids
    )
    position = len(played.output.prompt_ids)
    for turn, version in ((first, 3), (told, None), (last, 4)):
        if version is None:
            assert (turn.source, turn.log_probs, turn.versions) == ("environment", None, None)
        else:
            assert turn.log_probs == [log_prob(place) for place in range(position, position + len(turn.token_ids))]
            assert turn.versions == [version] * len(turn.token_ids)
            assert turn.finish_reason == "stop"
        position += len(turn.token_ids)
    assert played.metrics["unmatched_tokens"] == 0
    assert played.trajectory.status == "finished"
    assert played.trajectory.extra["num_turns"] == 4


def test_the_conversation_for_a_reward_model_has_calls_and_results():
    turns = ["\n".join(["Let me see.", call("weather", city="Bonn"), call("weather", city="Rome", days=2)]), "Warm."]
    played = Played(turns, f"{TURNS}.max_parallel_calls=2", tools=[weather])
    calls = [{"city": "Bonn"}, {"city": "Rome", "days": 2}]
    assert played.trajectory.rows[0].messages == [
        *QUESTION,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": f"call0000{n}", "type": "function", "function": {"name": "weather", "arguments": json.dumps(of)}}
                for n, of in enumerate(calls)
            ],
        },
        {"role": "tool", "name": "weather", "content": "Bonn: 1 warm", "tool_call_id": "call00000"},
        {"role": "tool", "name": "weather", "content": "Rome: 2 warm", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "Warm."},
    ]
    cut = Played([call("weather", city="Bonn" * 20), "Never said."], room=110, tools=[weather])
    assert [message["role"] for message in cut.trajectory.rows[0].messages] == ["user", "assistant"]


LLAMA_PROMPT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
GLM_CALL = (
    "\n<think>Hm.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("family", "form", "prompt", "said", "ends", "told"),
    [
        *(
            ("llama3", "llama3_json", LLAMA_PROMPT, '{"name": "weather", "parameters": {"city": "Bonn"}}', ends, told)
            for ends in (["<|eom_id|>", "<|eot_id|>"], ["<|eot_id|>", "<|eom_id|>"])
            for told in [f'<|start_header_id|>ipython<|end_header_id|>\n\n"Bonn: 1 warm"<|eot_id|>{LLAMA_PROMPT}']
        ),
        *(
            (
                "glm4_5",
                "glm",
                "<|assistant|>",
                GLM_CALL,
                [first, "<|user|>", "<|observation|>"],
                f"{opening}\n<tool_response>\nBonn: 1 warm\n</tool_response><|assistant|>",
            )
            for first, opening in (("<|endoftext|>", "<|observation|>"), ("<|observation|>", ""))
        ),
        (
            "qwen2_5_plain_end",
            "hermes",
            "<|im_start|>assistant\n",
            call("weather", city="Bonn"),
            ["<|im_end|>"],
            "\n<|im_start|>user\n<tool_response>\nBonn: 1 warm\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "vicuna",
            "hermes",
            "ASSISTANT:",
            call("weather", city="Bonn"),
            ["</s>"],
            "\nRESULT: Bonn: 1 warm\nASSISTANT:",
        ),
    ],
)
def test_a_call_is_one_call_whatever_token_ends_it_and_the_context_continues_after_that_token(
    family, form, prompt, said, ends, told
):
    """Llama 3.1 ends calls with <|eom_id|>, GLM with the next role token, and some tokens are not special ones."""
    played = Played(
        [said, "Warm."],
        f"{TURNS}.format={form}",
        tools=[weather],
        tokenizer=chat_tokenizer(family),
        prompt=prompt,
        ends=ends,
    )
    assert played.said == [("model", said + ends[0]), ("environment", told), ("model", f"Warm.{ends[0]}")]
    assert (played.metrics["tool_calls"], played.metrics["failures"]) == (1, {})


def test_parallel_calls_run_side_by_side_and_answer_in_order():
    second_is_there = asyncio.Event()

    async def first() -> str:
        await second_is_there.wait()
        return "first"

    async def second() -> str:
        second_is_there.set()
        return "second"

    calls = "\n".join([call("first"), call("second"), call("weather", city="Bonn", days=2)])
    played = Played([calls, "Done."], f"{TURNS}.max_parallel_calls=3", tools=[first, second, weather])
    assert played.told == ["first", "second", "Bonn: 2 warm"]
    assert (played.metrics["tool_calls"], played.metrics["failures"]) == (3, {})
    assert {name: told["calls"] for name, told in played.metrics["tools"].items()} == {
        "first": 1,
        "second": 1,
        "weather": 1,
    }


def test_calls_beyond_the_limits_are_not_run_and_the_model_is_told():
    calls = "\n".join(call("weather", city=city) for city in ("Bonn", "Köln", "Trier"))
    played = Played([calls, "Done."], tools=[weather])
    assert played.told == [
        "Bonn: 1 warm",
        "Not run: weather, weather. Tool calls are limited to at most 1 in one turn.",
    ]
    assert played.metrics["failures"] == {"limit": 2}
    turns = [call("weather", city="Bonn")] * 3
    played = Played([*turns, "Done."], f"{TURNS}.max_tool_calls=2", tools=[weather])
    assert played.told[:2] == ["Bonn: 1 warm"] * 2
    assert played.told[2].startswith("Not run: weather. Tool calls are limited to at most 1 in one turn and 2 in all")
    assert (played.metrics["tool_calls"], played.metrics["failures"]) == (2, {"limit": 1})


def test_thousands_of_calls_in_one_turn_cost_one_sentence():
    played = Played(["<tool_call></tool_call>" * 200, "Done."], tools=[weather])
    assert len(played.told) == 2
    assert "and 191 more" in played.told[1]
    assert played.metrics["failures"] == {"malformed": 1, "limit": 199}


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (
            '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>',
            "malformed",
            "Invalid JSON in arguments for 'weather'",
        ),
        (call("wether", city="Bonn"), "unknown", "Unknown function 'wether'. Available tools: ['broken', 'weather']"),
        (call("weather", town="Bonn"), "arguments", "city"),
        (call("weather", city=3), "arguments", "city"),
        (call("broken"), "exception", "Error executing tool 'broken': "),
    ],
)
def test_what_goes_wrong_comes_back_as_text_and_is_counted(said, kind, words):
    played = Played([said, "I see."], tools=[weather, broken])
    (text,) = played.told
    assert words in text
    assert played.metrics["failures"] == {kind: 1}
    assert played.said[-1] == ("model", "I see.<|im_end|>")


def test_a_tool_that_takes_too_long_is_given_up():
    played = Played([call("slow", seconds=60), "Well."], tools=[slow])
    assert played.metrics["failures"] == {"timeout": 1}
    assert "Error executing tool 'slow'" in played.told[0]


def test_a_long_answer_of_a_tool_is_shortened():
    def long() -> str:
        return "x" * 5000

    played = Played([call("long"), "Well."], tools=[long])
    assert len(played.told[0]) < 300


def test_an_answer_that_does_not_fit_is_cut_and_ends_the_trajectory():
    played = Played([call("weather", city="Bonn" * 20), "Never said."], room=110, tools=[weather])
    assert [turn.source for turn in played.turns] == ["model", "environment"]
    assert len(played.output.response_ids) == 110
    assert played.trajectory.rows[0].finish_reason == "length"
    assert played.metrics["failures"] == {"length": 1}


def test_an_answer_of_the_model_that_is_cut_ends_the_trajectory():
    played = Played([call("weather", city="Bonn" * 50)], room=50, tools=[weather])
    assert [(turn.source, len(turn.token_ids), turn.finish_reason) for turn in played.turns] == [
        ("model", 50, "length")
    ]
    assert played.metrics["tool_calls"] == 0


def test_the_window_of_the_model_counts_too():
    length = len(Chat(TOKENIZER, Toolbox([FunctionTool(weather)], LIMITS).schemas()).prompt_ids(QUESTION))
    played = Played([call("weather", city="Bonn"), "x" * 500], max_model_len=length + 100, tools=[weather])
    assert len(played.output.prompt_ids) + len(played.output.response_ids) == length + 100
    assert played.trajectory.rows[0].finish_reason == "length"


@pytest.mark.parametrize(("key", "sources"), [("max_assistant_turns=2", "mem"), ("max_user_turns=2", "memem")])
def test_turns_are_limited(key, sources):
    played = Played([call("weather", city="Bonn")] * 9, f"{TURNS}.{key}", tools=[weather])
    assert "".join(turn.source[0] for turn in played.turns) == sources
    assert played.metrics["failures"] == {"turn_limit": 1}
    assert played.trajectory.status == "finished"


def test_an_abort_in_the_middle_keeps_what_was_said():
    class Aborted(Played):
        async def _run(self, *args):
            running = asyncio.create_task(super()._run(*args))
            while len(self.trace.calls) < 1 or not self.engine.unfinished:
                await asyncio.sleep(0)
            self.engine.abort(None)
            return await running

    played = Aborted([call("weather", city="Bonn"), "x" * 1900], tools=[weather])
    assert [turn.source for turn in played.turns][:2] == ["model", "environment"]
    assert played.trajectory.status == "aborted"
    assert len(played.output.response_ids) < 2000


def test_rewards_belong_to_the_turns_that_earned_them():
    counting = Counting()
    turns = [call("rewarding", reward=0.5), call("count"), "Done."]
    played = Played(turns, tools=[rewarding, counting])
    assert [turn.reward for turn in played.turns] == [0.5, None, None, None, 10.0]
    assert played.trajectory.extra["tool_rewards"] == [0.5, 10.0]
    assert [turn.name for turn in played.turns if turn.source == "environment"] == ["rewarding", "count"]
    assert counting.live == {}


class Teacher(BaseInteraction):
    ended = 0

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == kwargs["truth"]
        return right, "Try again.", 1.0 if right else -0.25, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        Teacher.ended += 1


def test_a_simulated_user_answers_until_content():
    row = {"extra_info": {"interaction_kwargs": {"name": "teacher", "truth": "4"}}}
    before = Teacher.ended
    played = Played(
        ["3", call("weather", city="Bonn"), "4", "5"], tools=[weather], users={"teacher": Teacher({})}, row=row
    )
    assert [turn.source[0] for turn in played.turns] == ["m", "e", "m", "e", "m"]
    assert played.said[1][1] == "\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n"
    assert [turn.reward for turn in played.turns] == [-0.25, None, None, None, 1.0]
    assert played.trajectory.extra["turn_scores"] == [-0.25, 1.0]
    assert [turn.name for turn in played.turns if turn.source == "environment"] == ["user", "weather"]
    assert Teacher.ended == before + 1


def test_tools_are_released_when_the_model_is_lost():
    counting = Counting()

    class Lost(Played):
        async def _run(self, *args):
            self.running = asyncio.create_task(super()._run(*args))
            while not counting.live or not self.engine.unfinished:
                await asyncio.sleep(0)
            self.engine.fail(RuntimeError("device lost"))
            return await self.running

        def on_lost(self, why):
            self.running.cancel()  # as a batch does; otherwise the request waits for another engine

    with pytest.raises(RuntimeError, match="device lost"):
        Lost([call("count"), "x" * 1900], tools=[counting])
    assert counting.live == {}


def test_a_row_may_choose_its_tools():
    row = {"extra_info": {"tool_selection": ["weather"]}}
    played = Played([call("broken"), "I see."], tools=[weather, broken], row=row)
    assert played.told == ["Unknown function 'broken'. Available tools: ['weather']"]
    assert "broken" not in TOKENIZER.decode(played.output.prompt_ids)


def test_a_format_that_is_not_the_templates_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        Played(["Hello."], f"{TURNS}.format=glm", tools=[weather])
    assert "writes a tool call as" in caplog.text
    assert "multi_turn.format = glm finds no call" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Played(["Hello."], tools=[weather])
    assert caplog.text == ""


def test_tools_that_take_the_room_of_answers_are_said(caplog):
    config = config_of("actor_rollout_ref.rollout.max_model_len=100")
    with caplog.at_level(logging.WARNING):
        ToolAgentLoop.init_class(config, TOKENIZER, None, toolbox=Toolbox([FunctionTool(weather)], LIMITS))
    (line,) = caplog.messages
    assert "the list of tools adds" in line
    assert "actor_rollout_ref.rollout.max_model_len=" in line


def test_a_template_that_does_not_fit_is_an_error_at_start():
    tokenizer: Any = chat_tokenizer("llama3", r" ?\p{L}+|\s+(?!\S)|\s+|.")
    toolbox = Toolbox([FunctionTool(weather)], LIMITS)
    with pytest.raises(ValueError, match="tokenization_sanity_check_mode = strict"):
        ToolAgentLoop.init_class(config_of(), tokenizer, None, toolbox=toolbox)
    assert not ToolAgentLoop.chats  # a later trajectory checks the template again
    ToolAgentLoop.init_class(
        config_of(f"{TURNS}.tokenization_sanity_check_mode=disable"), tokenizer, None, toolbox=toolbox
    )
