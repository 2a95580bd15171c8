"""SandboxFusionTool: the model runs a program in the sandbox and reads its output."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
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
_FENCED = re.compile(r"```[ \t]{0,8}\w{0,32}[ \t]{0,8}\n(.*)\n[ \t]{0,64}```", re.DOTALL)


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
        code, timeout = plain_code(parameters), self.limits.wall_s
        language = str(parameters.get("language") or self.config["default_language"])
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


def plain_code(parameters: dict[str, Any]) -> str:
    """The argument `code`, or only the content of a Markdown code block that begins or ends it: a program that contains
    a block, in a string, neither begins nor ends with a fence."""
    code = str(parameters["code"])
    text = code.strip()
    fenced = _FENCED.match(text, max(0, text.find("```")))
    return fenced.group(1) if fenced and (fenced.start() == 0 or fenced.end() == len(text)) else code


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
