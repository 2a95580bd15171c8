"""Tools of real MCP servers: listed, called, killed in the middle and found again, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.mcp_server import TOKEN
from tests.unit.agent.test_toolbox import asked, multi_turn
from verl.agent.toolbox import Toolbox, read_tool_files
from verl.config.problems import ConfigError
from verl.tools.mcp_base_tool import McpServer
from verl.utils.network import accepts_connections

pytestmark = pytest.mark.processes
SERVER = str(Path(__file__).parents[2] / "support" / "mcp_server.py")
STDIO = {"command": sys.executable, "args": [SERVER, "stdio"], "env": {"PYTHONPATH": os.environ["PYTHONPATH"]}}


def tool_file(folder: Path, servers: dict[str, Any], **keys: Any) -> Any:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    mcp = {"mcp_servers_config_path": "servers.json", **keys.pop("mcp", {})}
    entry = {"class_name": "verl.tools.mcp_search_tool.MCPSearchTool", "config": {"type": "mcp", **keys}, "mcp": mcp}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    return multi_turn(tool_config_path=str(folder / "tools.yaml"), tool_timeout=20.0)


@asynccontextmanager
async def loaded(config: Any) -> AsyncIterator[Toolbox]:
    box = await asyncio.to_thread(Toolbox.load, config)
    try:
        yield box
    finally:
        await box.close()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class HttpServer:
    """The server in a process of its own, on a port that stays the same when it is started again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.notes = folder / "notes"
        self.start()

    def start(self) -> None:
        command = [sys.executable, SERVER, str(self.port)]
        self.process = subprocess.Popen(command, env={**os.environ, "NOTES": str(self.notes)})
        while not accepts_connections("127.0.0.1", self.port):
            assert self.process.poll() is None, "the MCP server ended"
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def http(tmp_path: Path) -> Iterator[HttpServer]:
    server = HttpServer(tmp_path)
    yield server
    server.kill()


async def test_tools_over_stdio_are_listed_called_and_survive_their_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def late(work):
        await asyncio.sleep(1)
        await work

    begun = McpServer.start_task
    monkeypatch.setattr(McpServer, "start_task", lambda server, work: begun(server, late(work)))
    config = tool_file(
        tmp_path, {"local": STDIO}, mcp={"tool_selected_list": ["add", "process", "slow", "broken", "search"]}
    )
    async with loaded(config) as box:
        await box.check()
        assert box.names == ["add", "process", "slow", "broken", "search"]
        assert box.schemas(["add"])[0]["function"]["description"] == "Add two numbers."
        async with box.session({}) as session:
            assert (await session.call(asked("add", a=2))).text == "3"
            assert (await session.call(asked("add", a="x"))).failure == "arguments"
            answer = await session.call(asked("broken"))
            assert answer.failure == "exception"
            assert "out of order" in answer.text
            found = await session.call(asked("search", query="verl"))
            assert found.text == "Doc 1(Title: About verl) It is so.\nDoc 2(Title: http://x) Or not."
            assert found.metrics == {"total_results": 2}
            process = int((await session.call(asked("process"))).text)
            calling = asyncio.ensure_future(session.call(asked("slow")))
            await asyncio.sleep(0.3)
            os.kill(process, signal.SIGKILL)
            answer = await calling
            assert answer.failure == "exception"
            assert answer.text.startswith("Error executing tool 'slow': MCP server local (")
            again = int((await session.call(asked("process"))).text)
            assert again != process
    with pytest.raises(ProcessLookupError):  # closing ends the process
        os.kill(again, 0)


async def test_tools_over_http_reconnect_and_the_token_goes_into_the_header_only(
    tmp_path: Path, http: HttpServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("MCP_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)
    config = tool_file(tmp_path, {"remote": {"url": http.url, "auth_token": "$MCP_TOKEN"}}, timeout=10)
    said = [repr(read_tool_files(config))]
    async with loaded(config) as box, box.session({}) as session:
        texts = await asyncio.gather(*(session.call(asked("add", a=number)) for number in range(20)))
        assert [answer.text for answer in texts] == [str(number + 1) for number in range(20)]
        calling = asyncio.ensure_future(session.call(asked("slow")))
        await asyncio.sleep(0.3)
        http.kill()
        lost = await calling
        gone = await session.call(asked("add", a=1))
        assert [lost.failure, gone.failure] == ["exception", "exception"]
        http.start()
        assert (await session.call(asked("add", a=1))).text == "2"
    said += [lost.text, gone.text, caplog.text, http.notes.read_text()]
    assert "/mcp" in http.notes.read_text()
    assert not [text for text in said if TOKEN in text]


def test_the_selected_tools_must_be_a_list(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        Toolbox.load(tool_file(tmp_path, {"local": STDIO}, mcp={"tool_selected_list": "add"}))
    assert ["is not a list" in str(problem) for problem in caught.value.problems] == [True]


async def test_servers_that_do_not_answer_and_tools_that_are_missing_are_told_all_at_once(
    tmp_path: Path, http: HttpServer
):
    servers = {
        "wrong": {"url": http.url, "auth_token": "shut-sesame"},
        "none": {"url": f"http://user:secret@127.0.0.1:{free_port()}/mcp?key=secret"},
        "absent": {"command": "no-such-program-of-ours"},
        "right": {"url": http.url, "auth_token": TOKEN},
    }
    with pytest.raises(ConfigError) as caught:
        await asyncio.to_thread(Toolbox.load, tool_file(tmp_path, servers, mcp={"tool_selected_list": ["multiply"]}))
    assert len(caught.value.problems) == 4
    assert "tool_selected_list = multiply: no server has such a tool. Available: add, broken" in str(caught.value)
    assert "sesame" not in str(caught.value)
    assert "secret" not in str(caught.value)
