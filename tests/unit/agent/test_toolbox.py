"""The tools of a loop worker: loaded from files, called with checked arguments, with a state for each trajectory."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.agent.tool_arguments import ArgumentCheck, CallFailed
from verl.agent.toolbox import CallLimits, Toolbox, ToolResult, read_tool_files
from verl.config import load_config
from verl.config.problems import ConfigError
from verl.tools.base_tool import BaseTool, ToolError
from verl.tools.function_tool import FunctionTool, function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.tool_calls import ToolCall

LIMITS = CallLimits(timeout_s=5.0, max_characters=4000, truncate_side="middle")
NO_ROW: dict[str, Any] = {}


def schema(name: str, **properties: str) -> Any:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": {**parameters, "required": list(properties)}}}


def asked(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


class Notebook(BaseTool):
    """Keeps words per trajectory and notes everything that happens to its instances."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema or schema("note", word="string"))
        self.words: dict[str, list[str]] = {}
        self.log: list[tuple[Any, ...]] = []

    async def create(self, instance_id: str | None = None, owner: str = "nobody", **kwargs: Any) -> Any:
        self.log.append(("create", owner, kwargs["create_kwargs"]))
        self.words[instance_id] = [owner]
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.words[instance_id].append(parameters["word"])
        await asyncio.sleep(0.001)
        return ToolResponse(text=" ".join(self.words[instance_id])), 0.5, {"agent": kwargs["agent_data"]}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(len(self.words[instance_id]))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.words[instance_id]


class Slow(Notebook):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config, schema("slow"))
        self.begun = asyncio.Event()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.begun.set()
        await asyncio.sleep(60)


def row(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"extra_info": {"index": 7, "tools_kwargs": {name: kwargs, "another": None}}}


async def test_an_instance_lives_from_the_first_call_to_the_end_of_its_trajectory():
    tool = Notebook({})
    box = Toolbox([tool], LIMITS)
    async with box.session(row("note", create_kwargs={"owner": "ann", "more": 1})) as session:
        assert tool.log == []
        first = await session.call(asked("note", word="a"), agent_data="loop")
        assert first == ToolResult("ann a", 0.5, {"agent": "loop"})
        assert (await session.call(asked("note", word="b"))).text == "ann a b"
        assert tool.log == [("create", "ann", {"owner": "ann", "more": 1})]
        assert await session.calc_rewards() == {"note": 3.0}
        assert session.statistics["note"]["calls"] == 2
    assert tool.words == {}


async def test_a_hundred_trajectories_at_once_keep_their_states_apart():
    tool = Notebook({"num_workers": 7})
    box = Toolbox([tool], LIMITS)

    async def trajectory(number: int) -> tuple[str, dict[str, float]]:
        async with box.session(row("note", create_kwargs={"owner": f"t{number}"})) as session:
            calls = [session.call(asked("note", word=f"{number}.{turn}")) for turn in range(3)]
            await asyncio.gather(*calls)  # calls of one turn, side by side: still one instance
            return (await session.call(asked("note", word="end"))).text, await session.calc_rewards()

    for number, (text, rewards) in enumerate(await asyncio.gather(*map(trajectory, range(100)))):
        assert sorted(text.split()) == sorted([f"t{number}", f"{number}.0", f"{number}.1", f"{number}.2", "end"])
        assert rewards == {"note": 5.0}
    assert tool.words == {}
    assert len(tool.log) == 100


async def test_instances_are_released_after_errors_timeouts_and_cancellation():
    slow, note = Slow({}), Notebook({})
    box = Toolbox([slow, note], LIMITS)

    async def failing() -> None:
        async with box.session(NO_ROW) as session:
            await session.call(asked("note", word="a"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await failing()
    assert note.words == {}

    brief = Toolbox([slow], replace(LIMITS, timeout_s=0.05))
    async with brief.session(NO_ROW) as session:
        answer = await session.call(asked("slow"))
        assert answer.failure == "timeout"
        assert answer.text == "Error executing tool 'slow': no answer after 0.05 s"
        assert session.failures == {"timeout": 1}
    assert slow.words == {}

    async def trajectory() -> None:
        async with box.session(NO_ROW) as session:
            await session.call(asked("slow"))

    slow.begun.clear()
    task = asyncio.ensure_future(trajectory())
    await slow.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.words == {}


class Reluctant(Notebook):
    """Its creation takes long, and its release too."""

    def __init__(self) -> None:
        super().__init__({})
        self.go = asyncio.Event()
        self.releasing = asyncio.Event()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        await self.go.wait()
        self.words[instance_id] = []
        return instance_id

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.releasing.set()
        await asyncio.sleep(0.02)
        await super().release(instance_id)


async def test_a_creation_and_a_release_that_outlast_their_trajectory_are_not_lost():
    tool = Reluctant()
    box = Toolbox([tool], replace(LIMITS, timeout_s=1.0))

    async def trajectory() -> None:
        async with box.session(NO_ROW) as session:
            await session.call(asked("note", word="a"))

    task = asyncio.ensure_future(trajectory())
    await asyncio.sleep(0.01)
    task.cancel()  # while it is created
    await asyncio.sleep(0.01)
    tool.go.set()
    await tool.releasing.wait()
    task.cancel()  # while it is released
    with pytest.raises(asyncio.CancelledError):
        await task
    await box.close()
    assert tool.words == {}


@pytest.mark.parametrize(
    ("call", "failure", "text"),
    [
        (ToolCall("gone", "{}"), "unknown", "Unknown function 'gone'. Available tools: ['note']"),
        (ToolCall("note", "", "no JSON at all"), "malformed", "no JSON at all"),
        (
            ToolCall("note", '{"word": '),
            "malformed",
            "Invalid JSON in arguments for 'note': Expecting value: line 1 column 10 (char 9)",
        ),
        (
            ToolCall("note", "[1]"),
            "malformed",
            "Invalid JSON in arguments for 'note': expected an object of names and values, found list",
        ),
        (
            asked("note", word=3),
            "arguments",
            "Error executing tool 'note': argument 'word': 3 is not of type 'string'. "
            'Expected arguments: {"word": string}',
        ),
        (
            ToolCall("note", ""),
            "arguments",
            "Error executing tool 'note': 'word' is a required argument. Expected arguments: {\"word\": string}",
        ),
    ],
)
async def test_a_wrong_call_is_answered_in_words_the_model_can_act_on(call: ToolCall, failure: str, text: str):
    tool = Notebook({})
    async with Toolbox([tool], LIMITS).session(NO_ROW) as session:
        assert await session.call(call) == ToolResult(text, failure=failure)
        assert session.failures == {failure: 1}
    assert tool.log == []  # no state for calls that reach no tool


class Remote(Notebook):
    """A tool whose schema came from another machine."""

    schema_is_remote = True


def test_patterns_of_a_remote_schema_are_not_run_and_its_other_rules_are():
    word = {"type": "string", "pattern": "^(a+)+$", "maxLength": 60}  # takes exponential time
    properties = {"word": word, "pattern": {"type": "string", "const": "pattern"}}
    parameters = {"type": "object", "properties": properties, "patternProperties": {"^(b+)+$": False}, "required": []}
    function = {"name": "note", "description": "", "parameters": parameters}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    check = ArgumentCheck(Remote({}, schema))
    long = "a" * 50 + "!"
    assert check.parse(json.dumps({"word": long})) == {"word": long}
    for arguments, words in (({"word": 3}, "not of type 'string'"), ({"pattern": "x"}, "'pattern' was expected")):
        with pytest.raises(CallFailed) as failed:
            check.parse(json.dumps(arguments))
        assert words in failed.value.text


def remote_check(parameters: dict[str, Any]) -> ArgumentCheck:
    function = {"name": "note", "description": "", "parameters": {"type": "object", "required": [], **parameters}}
    return ArgumentCheck(
        Remote({}, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function}))
    )


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"properties": {}, "patternProperties": {"^x": {}}, "additionalProperties": False}, {"x1": 1}),
        ({"properties": {"word": {"not": {"pattern": "^b"}}}}, {"word": "a"}),
        ({"properties": {"word": {"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]}}}, {"word": "a"}),
        ({"properties": {"word": {"if": {"pattern": "^b"}, "then": False}}}, {"word": "a"}),
        (
            {
                "$defs": {"a": {"pattern": "^a"}, "b": {"pattern": "^b"}},
                "properties": {"word": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}},
            },
            {"word": "a"},
        ),
        ({"allOf": [{"patternProperties": {"^x": {}}}], "unevaluatedProperties": False}, {"x1": 1}),
        (
            {
                "properties": {
                    "a": {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "integer"}]},
                    "b": {"$ref": "#/properties/a/oneOf/1"},
                }
            },
            {"b": 1},
        ),
        (
            {"properties": {"words": {"contains": {"pattern": "^b"}, "unevaluatedItems": False}}},
            {"words": ["b"]},
        ),
    ],
)
def test_a_remote_schema_without_its_patterns_accepts_what_it_accepted(parameters: Any, arguments: dict[str, Any]):
    assert remote_check(parameters).parse(json.dumps(arguments)) == arguments


def test_a_reference_into_a_nullable_schema_does_not_fail_the_call():
    inner = {"type": "object", "nullable": True, "properties": {"x": {"type": "string"}}}
    check = remote_check({"properties": {"a": inner, "b": {"$ref": "#/properties/a/properties/x"}}})
    assert check.parse('{"b": "v"}') == {"b": "v"}


def test_parameters_may_have_the_names_of_schema_keys_and_keep_them_in_messages():
    properties = {name: {"type": "integer"} for name in ("nullable", "enum", "const", "property_id")}
    check = remote_check({"properties": properties, "required": ["property_id"]})
    for name in properties:
        with pytest.raises(CallFailed) as failed:
            check.parse(json.dumps({"property_id": 1, name: "text"}))
        assert f"argument '{name}': 'text' is not of type 'integer'" in failed.value.text
    with pytest.raises(CallFailed) as failed:
        check.parse("{}")
    assert "'property_id' is a required argument" in failed.value.text


@function_tool
def power(base: int, exponent: int | None = None) -> str:
    return str(base ** (2 if exponent is None else exponent))


async def test_arguments_that_a_function_does_not_take_are_refused_and_null_is_allowed_where_hinted():
    async with Toolbox([FunctionTool(power)], LIMITS).session(NO_ROW) as session:
        assert (await session.call(asked("power", base=3, exponent=None))).text == "9"
        assert (await session.call(asked("power", base=2.0, exponent=3))).text == "8"
        answer = await session.call(asked("power", base=3, exponent="2", basis=1))
    assert answer.failure == "arguments"
    assert "unknown argument 'basis'" in answer.text
    assert "argument 'exponent': '2' is not valid" in answer.text
    assert answer.text.endswith('{"base": integer, "exponent": integer (optional)}')


def answering(answer: Any) -> FunctionTool:
    def f() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return FunctionTool(f)


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("text", ToolResult("text")),
        ({"a": "ü"}, ToolResult('{"a": "ü"}')),
        ({"text": "t", "image": None}, ToolResult("t")),
        (ToolResponse(text="t"), ToolResult("t")),
        (None, ToolResult("")),
        (3, ToolResult("3")),
        ([1, 2], ToolResult("[1, 2]")),
        (("t", 1), ToolResult("t", 1.0)),
        (({"a": 1}, np.float32(0.5), {"m": 2}), ToolResult('{"a": 1}', 0.5, {"m": 2})),
        ((ToolResponse(text="t"), None, None), ToolResult("t")),
        (
            ("t", "much"),
            ToolResult("Error executing tool 'f': ValueError: its reward 'much' is not a number", failure="exception"),
        ),
        (KeyError("x"), ToolResult("Error executing tool 'f': KeyError: 'x'", failure="exception")),
        (ToolError("sold out"), ToolResult("Error executing tool 'f': sold out", failure="exception")),
    ],
)
async def test_tools_answer_in_any_of_the_allowed_shapes(answer: Any, result: ToolResult):
    async with Toolbox([answering(answer)], LIMITS).session(NO_ROW) as session:
        assert await session.call(asked("f")) == result


class Plain(BaseTool):
    """Every method an ordinary function, none with **kwargs."""

    def create(self, instance_id: str | None = None) -> str:
        return "mine"

    def execute(self, instance_id: str, parameters: dict[str, Any]) -> str:
        return f"{instance_id} {threading.current_thread().name}"

    def calc_reward(self, instance_id: str) -> float:
        return 2.0

    def release(self, instance_id: str) -> None:
        self.config["released"] = instance_id


async def test_a_tool_of_plain_functions_runs_in_threads():
    tool = Plain({}, schema("plain"))
    async with Toolbox([tool], LIMITS).session(row("plain", execute_kwargs={"unasked": 1})) as session:
        assert (await session.call(asked("plain"))).text == "mine verl-call"
        assert await session.calc_rewards() == {"plain": 2.0}
    assert tool.config["released"] == "mine"


class Broken(Notebook):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        raise OSError("no disk")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        raise OSError("no disk")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        raise OSError("no disk")


async def test_errors_of_creation_reward_and_release_cost_only_themselves(monkeypatch: pytest.MonkeyPatch):
    tool = Broken({})
    async with Toolbox([tool], LIMITS).session(NO_ROW) as session:
        for _ in range(2):
            answer = await session.call(asked("note", word="a"))
            assert answer.text == "Error executing tool 'note': OSError: no disk"
        monkeypatch.setattr(tool, "create", Notebook({}).create)
        answer = await session.call(asked("note", word="a"))
        assert await session.calc_rewards() == {}
    assert session.failures == {"exception": 3, "calc_reward": 1, "release": 1}


async def test_the_row_selects_tools_and_the_selection_must_exist():
    box = Toolbox([Notebook({}), Notebook({}, schema("second", word="string"))], LIMITS)
    assert [each["function"]["name"] for each in box.schemas()] == ["note", "second"]
    async with box.session({"extra_info": {"tool_selection": np.array(["second"], dtype=object)}}) as session:
        assert [each["function"]["name"] for each in session.schemas] == ["second"]
        assert (await session.call(asked("note", word="a"))).failure == "unknown"
    assert box.schemas([]) == []
    with pytest.raises(ValueError, match=r"(?s)tool_selection.*row 3"):
        box.session({"extra_info": {"index": 3, "tool_selection": ["third"]}})


async def test_settings_without_effect_are_told_once(caplog: pytest.LogCaptureFixture):
    box = Toolbox([Notebook({"timeout": 90})], LIMITS)
    for _ in range(2):
        box.session(row("nite", create_kwargs={"owner": "ann"}))
    timeout, unknown_tool = [record.getMessage() for record in caplog.records]
    for part in ("Tool note", "90 s", "5 s", "actor_rollout_ref.rollout.multi_turn.tool_timeout"):
        assert part in timeout
    assert "extra_info.tools_kwargs.nite" in unknown_tool


class Sick(Notebook):
    async def check(self) -> str | None:
        if self.config.get("quiet"):
            return "the disk is full"
        raise ConnectionError("nobody there")


async def test_the_health_check_tells_of_all_tools_that_cannot_work():
    tools = [Sick({"quiet": 1}, schema("a")), Notebook({}, schema("b")), Sick({}, schema("c"))]
    with pytest.raises(ConfigError) as caught:
        await Toolbox(tools, LIMITS).check()
    assert [(each.value, each.why) for each in caught.value.problems] == [
        ("a", "the disk is full"),
        ("c", "ConnectionError: nobody there"),
    ]


TOOL_FILE = """
from verl.tools.base_tool import BaseTool

class Mine(BaseTool):
    def execute(self, instance_id, parameters, **kwargs):
        return f"{self.config['greeting']}, {parameters['word']}"
"""
FUNCTION_FILE = """
from verl.tools.function_tool import function_tool

@function_tool
async def add(a: int, b: int = 1) -> str:
    '''Add.'''
    return str(a + b)

def helper(x): ...
"""


def multi_turn(**keys: Any) -> Any:
    given = {"rollout": {"mode": "async", "multi_turn": {"enable": True, **keys}}, "model": {"path": "model"}}
    whole = {"actor_rollout_ref": given, "data": {"train_files": "a.parquet", "val_files": "b.parquet"}}
    return load_config(whole, check_files=False).actor_rollout_ref.rollout.multi_turn


async def test_tools_of_files_work_where_the_files_are_not(tmp_path: Path):
    (tmp_path / "mine.py").write_text(TOOL_FILE)
    (tmp_path / "functions.py").write_text(FUNCTION_FILE)
    entry = {"class_name": f"{tmp_path}/mine.py:Mine", "config": {"greeting": "hello"}}
    (tmp_path / "tools.yaml").write_text(
        json.dumps({"tools": [{**entry, "tool_schema": schema("mine", word="string")}]})
    )
    paths = {"tool_config_path": "tools.yaml", "function_tool_path": "functions.py"}
    config = multi_turn(**{key: str(tmp_path / name) for key, name in paths.items()})
    files = pickle.dumps(read_tool_files(config))
    for file in tmp_path.iterdir():
        file.unlink()
    box = Toolbox.load(config, pickle.loads(files))
    async with box.session(NO_ROW) as session:
        assert (await session.call(asked("mine", word="you"))).text == "hello, you"
        assert (await session.call(asked("add", a=2))).text == "3"
    await box.close()


async def test_a_tool_that_is_first_called_while_rewards_are_computed_fails_none_of_them():
    class Caller(Notebook):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            await session.call(asked("slow"))
            return 1.0

    class Other(Notebook):
        def __init__(self) -> None:
            super().__init__({}, schema("slow"))

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "done"

    async with Toolbox([Caller({}), Other()], LIMITS).session(NO_ROW) as session:
        await session.call(asked("note", word="a"))
        assert await session.calc_rewards() == {"note": 1.0}
