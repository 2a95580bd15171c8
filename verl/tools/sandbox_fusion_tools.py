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
_TAGGED_FENCE = re.compile(r"^```\w{1,32}[ \t]{0,8}\n", re.MULTILINE)
# Text that ends with a complete line and has no triple quotes, between which a program could have a fence.
_PROSE = re.compile(r"(?:(?!\"\"\"|''')[\s\S])*\n[ \t]{0,64}")
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

    Programs have fences in strings and comments, too: valid Python is returned unchanged; otherwise the block must
    begin or end the text, or have the tag of Python, on a line of its own outside of a string.
    """
    is_python, text = language.lower() in _PYTHON, code.strip()
    opening = _OPENING_FENCE.search(text)
    if opening is None or (is_python and _is_python(code)):
        return code
    before, rest = text[: opening.start()], text[opening.end() :]
    closing = _closing_fence(rest, is_python)
    content = rest if closing is None else rest[: closing.start()].removesuffix("\n")
    if not before or (closing is not None and closing.end() == len(rest)):
        return content
    follows_prose = is_python and opening.group(1) in _PYTHON and _PROSE.fullmatch(before) is not None
    return content if follows_prose and (closing is None or _is_python(content)) else code


def _closing_fence(rest: str, is_python: bool) -> re.Match[str] | None:
    """The end of a block: the first fence that makes it valid Python, or, if none does, the first one. In another
    language the last one before another block. None: the text was cut off before it."""
    if is_python:
        closings = list(islice(_CLOSING_FENCE.finditer(rest), 1 + _MAX_PARSED // (len(rest) + 1)))
        valid = (closing for closing in closings if _is_python(rest[: closing.start()]))
        return next(valid, closings[0] if closings else None)
    closings = list(_CLOSING_FENCE.finditer(rest))
    following = _TAGGED_FENCE.search(rest)  # another block, or, if no fence closes this one before it, a nested one
    before = [closing for closing in closings if following is None or closing.start() < following.start()]
    candidates = before or closings
    return candidates[-1] if candidates else None


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
