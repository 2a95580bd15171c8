"""Tool files: every problem of every file is told at once, with its place, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agent.test_toolbox import multi_turn, schema
from verl.agent.toolbox import Toolbox, read_tool_files
from verl.config.problems import ConfigError

GSM8K = "verl.tools.gsm8k_tool.Gsm8kTool"


def written(folder: Path, *entries: Any, top: str = "tools") -> Any:
    path = folder / "tools.yaml"
    path.write_text(json.dumps({top: entries}))
    return multi_turn(tool_config_path=str(path))


def told(caught: pytest.ExceptionInfo[ConfigError], folder: Path) -> list[str]:
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def test_problems_of_reading_are_told_all_at_once(tmp_path: Path):
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "both.json").write_text('{"mcpServers": {"s": {"url": "u", "command": "c", "auth_token": "hush"}}}')
    mcp = {"class_name": "verl.tools.mcp_base_tool.MCPBaseTool", "config": {"type": "mcp"}}
    config = written(
        tmp_path,
        {"config": {}},
        {"class_name": GSM8K, "confg": {"a": 1}},
        {"class_name": "Nowhere", "config": [1]},
        {"class_name": f"{tmp_path}/none.py:Tool"},
        {"class_name": GSM8K, "tool_schema": {"function": {"name": "f", "parameters": {"type": "list"}}}},
        {"class_name": GSM8K, "config": {"type": "remote"}},
        mcp,
        {**mcp, "mcp": {"mcp_servers_config_path": "none.json"}},
        {**mcp, "mcp": {"mcp_servers_config_path": "empty.json", "selected": []}},
        {**mcp, "mcp": {"mcp_servers_config_path": "both.json"}},
    )
    with pytest.raises(ConfigError) as caught:
        read_tool_files(config)
    found = told(caught, tmp_path)
    for place, why in [
        ("tools.yaml: tools[0].class_name = null", "it is missing. Write pkg.module.Class, or file.py:Class"),
        ("tools.yaml: tools[1].confg", "unknown key. Known: class_name, config, tool_schema, mcp"),
        ("tools.yaml: tools[2].config", "it is no mapping"),
        ("tools.yaml: tools[2].class_name = Nowhere", "it names no object"),
        ("tools.yaml: tools[3].class_name = none.py:Tool", "there is no such file"),
        ("tools.yaml: tools[4].tool_schema", "parameters.type: 'list'"),
        ("tools.yaml: tools[5].config.type = remote", "Use native or mcp"),
        ("tools.yaml: tools[6].mcp.mcp_servers_config_path = null", "it is missing"),
        ("tools.yaml: tools[7].mcp.mcp_servers_config_path = none.json", "No such file"),
        ("tools.yaml: tools[8].mcp.selected", "unknown key"),
        ("tools.yaml: tools[8].mcp.mcp_servers_config_path = empty.json", "it lists no servers"),
        ("both.json: mcpServers.s", "it needs either url or command"),
    ]:
        assert [line for line in found if line.startswith(place) and why in line], (place, why, found)
    assert len(found) == 12
    assert "hush" not in "".join(found)


TOOLS = """
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import function_tool

class Fragile(BaseTool):
    def __init__(self, config, tool_schema):
        raise KeyError("size")

class NoTool: ...
"""


def test_what_does_not_import_is_told_where_the_files_are_read(tmp_path: Path):
    (tmp_path / "mine.py").write_text(TOOLS)
    config = written(
        tmp_path,
        {"class_name": f"{tmp_path}/mine.py:NoTool"},
        {"class_name": f"{tmp_path}/mine.py:Absent"},
        {"class_name": "no_such_package.Tool"},
    )
    config.function_tool_path = str(tmp_path / "mine.py")
    with pytest.raises(ConfigError) as caught:
        read_tool_files(config)
    found = "\n".join(told(caught, tmp_path))
    for words in [
        "tools[0].class_name = mine.py:NoTool: it is no BaseTool",
        "tools[1].class_name = mine.py:Absent: mine.py: it does not define 'Absent'. It defines: Fragile, NoTool",
        "tools[2].class_name = no_such_package.Tool: no_such_package: cannot import it",
        "function_tool_path = mine.py: it has no tools",
    ]:
        assert words in found
    assert len(caught.value.problems) == 4


def test_problems_of_making_are_told_all_at_once(tmp_path: Path):
    (tmp_path / "mine.py").write_text(TOOLS)
    config = written(
        tmp_path, {"class_name": GSM8K}, {"class_name": GSM8K}, {"class_name": f"{tmp_path}/mine.py:Fragile"}
    )
    with pytest.raises(ConfigError) as caught:
        Toolbox.load(config)
    found = told(caught, tmp_path)
    assert len(found) == 2
    assert "tools[2].class_name = mine.py:Fragile: its constructor raised KeyError: 'size'" in found[0]
    assert "tools[1] = calc_gsm8k_reward: tools.yaml: tools[0] has the same name" in found[1]

    bad_schema = schema("bad")
    bad_schema["function"]["parameters"]["properties"] = {"a": {"type": "str"}}
    config = written(
        tmp_path,
        {"class_name": GSM8K, "tool_schema": bad_schema},
        {"class_name": GSM8K, "config": {"rate_limit": 0}},
        {"class_name": GSM8K, "config": {"num_workers": "many"}, "tool_schema": schema("other")},
    )
    with pytest.raises(ConfigError) as caught:
        Toolbox.load(config)
    words = ["parameters.properties.a.type: 'str'", "rate_limit: 0 is", "num_workers: 'many' is not a number above 0"]
    for line, expected in zip(told(caught, tmp_path), words, strict=True):
        assert expected in line


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tools: {a: 1}", "no list 'tools' of mappings"),
        ("- a", "no list 'tools' of mappings"),
        ("tools: [", "line 1, column 9 is not valid YAML"),
        ("tools: [{class_name: x.Y, config: {a: '${oc.env:NO_SUCH_VARIABLE_OF_OURS}'}}]", "NO_SUCH_VARIABLE_OF_OURS"),
    ],
)
def test_a_file_that_is_no_tool_file_is_refused(tmp_path: Path, text: str, why: str):
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"multi_turn.tool_config_path = .*tools.yaml") as caught:
        read_tool_files(multi_turn(tool_config_path=str(tmp_path / "tools.yaml")))
    assert why in str(caught.value)


def test_a_file_of_simulated_users_is_checked_alike_and_together_with_the_tools(tmp_path: Path):
    config = written(tmp_path, {"class_name": "no_such_package.Tool"})
    path = tmp_path / "users.yaml"
    users = [{"name": "a"}, {"name": "b", "class_name": "x", "cfg": {}}, {"class_name": GSM8K}]
    path.write_text(json.dumps({"interaction": users}))
    config.interaction_config_path = str(path)
    with pytest.raises(ConfigError) as caught:
        read_tool_files(config)
    assert [line.partition(" = ")[0] for line in told(caught, tmp_path)] == [
        "users.yaml: interaction[0].class_name",
        "users.yaml: interaction[1].cfg",
        "users.yaml: interaction[1].class_name",
        "tools.yaml: tools[0].class_name",
        "users.yaml: interaction[2].class_name",
    ]
