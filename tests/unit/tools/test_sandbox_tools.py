"""Tools that run code: what the model reads, in the local sandbox and on a server; sessions that remember and end."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest

from verl.agent.tool_session import CallLimits
from verl.agent.toolbox import Toolbox
from verl.config import ConfigError
from verl.sandbox import REQUIRE, Isolation, available, code_runner
from verl.sandbox.code_runner import CodeSettings
from verl.tools.code_session_tool import CodeSessionTool
from verl.tools.sandbox_fusion_tools import SandboxFusionTool, plain_code
from verl.utils.process_tree import with_descendants
from verl.utils.tool_calls import ToolCall

LIMITS = CallLimits(30.0, 2000, "middle")


@pytest.fixture(autouse=True)
def this_host():
    """As much isolation as there is here."""
    before = code_runner.configured()
    code_runner.configure(CodeSettings(require=min(("files", available().level), key=REQUIRE.index)))
    yield
    code_runner.configure(before)


def toolbox(*tools):
    return Toolbox(tools, LIMITS)


def call(code, **arguments):
    return ToolCall("code_interpreter", json.dumps({"code": code, **arguments}))


async def said(session, code):
    return (await session.call(call(code))).text


README = 'text = """\n```\nx = 1\n```\n"""\nprint(text)'
TAGGED = "prompt = '''Write:\n```python\nprint(1)\n```\n'''\nmain(prompt)"
BROKEN = "print(1"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (README, README),
        (f"```python\n{README}\n```", README),
        (f"Here:\n```py\n{README}\n```\nIt prints `text`.", README),
        ("```\nprint(1)\n```\nThen:\n```\nprint(2)\n```", "print(1)"),
        ("Run this:\n```python\nprint(1)\n```\nIt prints 1.", "print(1)"),
        ("```python\nprint(1)\nprint(2)", "print(1)\nprint(2)"),
        (f"```python\n{BROKEN}\n```\nand\n```python\nprint(2)\n```", BROKEN),
        (f"Broken:\n```python\n{BROKEN}", BROKEN),
        ("# ```\nprint(1)\n# ```\n", "# ```\nprint(1)\n# ```\n"),
        ("no code at all", "no code at all"),
        (f"{README}(", f"{README}("),  # the model must see the syntax error
        (f"!pip install x\n{README}", f"!pip install x\n{README}"),
        (f"{README[:20]}", f"{README[:20]}"),
        ("Here:\n```\nprint(1)\n```", "print(1)"),
        (f"!pip install x\n{TAGGED}", f"!pip install x\n{TAGGED}"),
        (f"{TAGGED}(", f"{TAGGED}("),
        (f"{TAGGED[:30]}", f"{TAGGED[:30]}"),
    ],
)
def test_a_code_block_is_taken_out_of_its_text_but_not_out_of_a_program(code, expected):
    assert plain_code(code) == expected


BASH = "cat > README.md <<'EOF'\n```\nmake\n```\nEOF\nls"


NESTED = BASH.replace("```\nmake", "```make\nmake")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (BASH, BASH),
        (f"```bash\n{BASH}\n```", BASH),
        (f"```bash\n{NESTED}\n```", NESTED),
        ("Run:\n```bash\nls\n```", "ls"),
        ("```bash\nls", "ls"),
        ("```bash\nls\n```\nthen\n```bash\npwd\n```", "ls"),
        ("/**\n * ```js\n * f()\n * ```\n */\nf()", "/**\n * ```js\n * f()\n * ```\n */\nf()"),
    ],
)
def test_programs_in_other_languages_keep_their_fences(code, expected):
    assert plain_code(code, "bash") == expected


def test_the_name_of_a_language_is_case_insensitive():
    assert plain_code(README, "Python") == README


def test_a_code_block_with_many_closing_fences_is_not_parsed_for_each(monkeypatch):
    parse, parsed = ast.parse, []
    monkeypatch.setattr(ast, "parse", lambda text: (parsed.append(len(text)), parse(text))[1])
    program = "x = 1\n" * 20_000 + "("
    assert plain_code(f"```\n{program}\n" + "```\n" * 1000) == program
    assert sum(parsed) < 5 * len(program)


async def test_the_model_reads_what_its_program_printed_and_how_it_failed():
    box = toolbox(SandboxFusionTool({"default_timeout": 2, "memory_limit_mb": 200}))
    await box.check()
    assert [schema["function"]["name"] for schema in box.schemas()] == ["code_interpreter"]
    async with box.session({}) as session:
        assert await said(session, "print(6 * 7)") == "42"
        assert await said(session, "Here:\n```python\nprint(1)\nprint(2)\n```") == "1\n2"
        assert await said(session, 'print("""\n```\nx\n```\n""")') == "\n```\nx\n```"
        assert await said(session, "x = 1") == "The code ran and printed nothing."
        failed = await said(session, "print('so far')\n1 / 0")
        assert failed.startswith("so far\nTraceback")
        assert failed.endswith("ZeroDivisionError: division by zero")
        endless = await said(session, "print('begun', flush=True)\nwhile True: pass")
        assert endless == "begun\nThe code was stopped: it ran longer than 2 seconds."
        assert "MemoryError" in await said(session, "x = bytearray(10**9)")
        assert session.failures.total() == 0, "a program that fails is no failure of the tool"
        cobol = await session.call(call("", language="cobol"))
        assert "language 'cobol' is not one of" in cobol.text


@pytest.mark.slow
async def test_a_dead_server_costs_its_own_call_and_is_told_at_start():
    box = toolbox(SandboxFusionTool({"sandbox_fusion_url": "http://127.0.0.1:1"}))
    with pytest.raises(ConfigError, match=r"= code_interpreter: .*http://127\.0\.0\.1:1\b.*verl\.sandbox\.server"):
        await box.check()
    async with box.session({}) as session:
        result = await session.call(call("print(1)"))
    assert result.failure == "exception"
    assert "did not run the code" in result.text


async def test_too_little_isolation_is_told_at_start(monkeypatch):
    monkeypatch.setattr(code_runner, "available", lambda: Isolation(missing=("no user namespaces",)))
    code_runner.configure(CodeSettings(require="full"))
    with pytest.raises(ConfigError, match=r"(?s)sandbox\.require=full.*'none'"):
        await toolbox(SandboxFusionTool({})).check()


async def test_execute_code_can_be_overridden_also_by_a_coroutine():
    class Mine(SandboxFusionTool):
        def execute_code(self, instance_id, code, timeout=30, language="python"):
            return f"{code} {timeout:g} {language}"

    class Later(SandboxFusionTool):
        async def execute_code(self, instance_id, code, timeout=30, language="python"):
            return "later"

    for kind, text in ((Mine, "a 30 python"), (Later, "later")):
        async with toolbox(kind({})).session({}) as session:
            assert await said(session, "a") == text


async def test_a_session_remembers_for_its_trajectory_alone():
    box = toolbox(CodeSessionTool({"default_timeout": 5}))
    async with box.session({}) as one, box.session({}) as other:
        assert await said(one, "x = 5") == "The code ran and printed nothing."
        assert await said(one, "x + 1") == "6"
        assert "NameError" in await said(other, "x")
        both = await asyncio.gather(said(one, "x += 1; x"), said(one, "x += 1; x"))
        assert sorted(both) == ["6", "7"], "calls of one turn come one after the other"


async def test_a_session_that_died_is_replaced_and_the_model_told():
    async with toolbox(CodeSessionTool({})).session({}) as session:
        assert await said(session, "x = 1\nx") == "1"
        died = await said(session, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert died.endswith("The interpreter was restarted; all variables are lost.")
        assert await said(session, "'x' in globals()") == "False"


def asleep():
    """Descendants of this process that sleep for the number of seconds that only the test below knows."""
    found = []
    for pid in with_descendants(os.getpid()):
        with contextlib.suppress(OSError):
            found += [pid] if b"1234.5" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


async def eventually(is_so):
    for _ in range(100):
        if is_so():
            return True
        await asyncio.sleep(0.1)
    return False


async def test_sessions_end_with_their_trajectories_also_when_those_fail():
    box = toolbox(CodeSessionTool({}))

    async def fail():
        async with box.session({}) as session:
            await said(session, "import subprocess; p = subprocess.Popen(['sleep', '1234.5'])")
            assert await eventually(asleep)  # it may still be starting: its arguments are the last to be seen
            raise RuntimeError("of the loop")

    with pytest.raises(RuntimeError, match="of the loop"):
        await fail()
    await box.close()
    assert await eventually(lambda: not asleep())


def test_a_session_is_not_for_servers():
    with pytest.raises(ValueError, match=r"^sandbox_fusion_url: "):
        CodeSessionTool({"sandbox_fusion_url": "http://127.0.0.1:8080"})
