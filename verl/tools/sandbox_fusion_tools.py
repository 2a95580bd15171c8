"""SandboxFusionTool: the model runs a program in the sandbox and reads its output."""

from __future__ import annotations

import ast
import asyncio
import re
from dataclasses import replace
from itertools import islice
from typing import Any

from verl.sandbox import Limits, Result
from verl.sandbox.code_runner import CodeSettings, configured
from verl.tools.base_tool import BaseTool, ToolError
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.concurrency import call_user_function

_DEFAULTS = {
    "sandbox_fusion_url": None,
    "default_timeout": 30,
    "default_language": "python",
    "memory_limit_mb": 1024,
    "num_workers": 10,
}
# White space is bounded: adjacent unbounded repetitions of it would take quadratic time.
_OPENING_FENCE = re.compile(r"```[ \t]{0,8}(\w{0,32})[ \t]{0,8}\n")
_CLOSING_FENCE = re.compile(r"^[ \t]{0,64}```(?!\w)", re.MULTILINE)
_PYTHON = ("python", "python3", "py")
# Characters that are parsed to find the end of a block. A text may have closing fences on every line.
_MAX_PARSED = 200_000


class SandboxFusionTool(BaseTool):
    """Keys of `config`: `sandbox_fusion_url` (default: `sandbox_fusion.url` of the run, or the local sandbox),
    `default_timeout` (seconds), `default_language`, `memory_limit_mb`, `num_workers` (concurrent programs).

    Subclasses may override `execute_code`, also as an async method.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__({**_DEFAULTS, **config}, tool_schema)
        self.limits = Limits(
            wall_s=float(self.config["default_timeout"]), memory_mb=int(self.config["memory_limit_mb"])
        )

    @property
    def settings(self) -> CodeSettings:
        return replace(configured(), url=self.config["sandbox_fusion_url"] or configured().url)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return code_schema("Runs a Python program and returns what it prints. Print every result you need.")

    async def check(self) -> str | None:
        try:
            await asyncio.to_thread(self.settings.check)
        except ValueError as error:
            return str(error)
        return None

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, None]:
        timeout = self.limits.wall_s
        language = str(parameters.get("language") or self.config["default_language"])
        code = await asyncio.to_thread(plain_code, str(parameters["code"]), language)  # parsing takes time
        text = await call_user_function(self.execute_code, instance_id, code, timeout, language)
        return ToolResponse(text=str(text)), None, None

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> str:
        """Run a program; return the text that the model reads."""
        limits = replace(self.limits, wall_s=float(timeout))
        return result_text(self.settings.runner().run(code, language, limits=limits), limits)


def code_schema(description: str) -> OpenAIFunctionToolSchema:
    """The schema of a tool with one argument, `code`."""
    code = {"type": "string", "description": "The code to run."}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    function = {"name": "code_interpreter", "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def plain_code(code: str, language: str = "python") -> str:
    """The code of a tool call, or, if it is a text with a Markdown code block, only the content of the first block.

    The block must begin or end the text, because programs have fences in strings and comments; a block of Python in the
    middle must have the tag of Python and be valid. Code that is valid Python is returned unchanged. A block of Python
    ends at the first closing fence that makes it valid, or, if none does, at the first one.
    """
    text, is_python = code.strip(), language in _PYTHON
    opening = _OPENING_FENCE.search(text)
    if opening is None or (is_python and _is_python(code)):
        return code
    rest, begins, has_tag = text[opening.end() :], opening.start() == 0, opening.group(1) in _PYTHON
    closings = list(islice(_CLOSING_FENCE.finditer(rest), 1 + _MAX_PARSED // len(text) if is_python else None))
    if not closings:  # the response was cut off
        return rest if begins or (is_python and has_tag) else code
    contents = [rest[: closing.start()].removesuffix("\n") for closing in (closings if is_python else closings[-1:])]
    number = next((number for number, content in enumerate(contents) if is_python and _is_python(content)), None)
    chosen = contents[number or 0]
    ends = (closings[number or 0] if is_python else closings[-1]).end() == len(rest)
    in_the_middle = is_python and has_tag and number is not None
    return chosen if begins or ends or in_the_middle else code


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def result_text(result: Result, limits: Limits) -> str:
    """The text that the model reads: the output and, after a failure, its description."""
    if result.status == "refused":
        raise ToolError(result.stderr)
    reason = {
        "timeout": f"The code was stopped: it ran longer than {limits.wall_s:g} seconds.",
        "memory": f"The code was stopped: it needed more than {limits.memory_mb} MB of memory.",
        "output": "The output was too long and is cut.",
    }.get(result.status, "")
    parts = [result.stdout, "" if result.status == "finished" else result.stderr, reason]
    text = "\n".join(part.rstrip("\n") for part in parts if part.strip())
    return text or "The code ran and printed nothing."
