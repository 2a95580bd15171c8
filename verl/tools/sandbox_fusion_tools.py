"""SandboxFusionTool: the model runs a program in the sandbox and reads what it printed."""

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
# Bounded white space: two runs of it beside each other are matched in a time that is quadratic in their length.
_FENCED = re.compile(r"```[ \t]{0,8}\w{0,32}[ \t]{0,8}\n(.*?)(?:\n[ \t]{0,64}```|\Z)", re.DOTALL)


class SandboxFusionTool(BaseTool):
    """Keys of its `config`: `sandbox_fusion_url` (absent: that of the run, else the local sandbox), `default_timeout`
    (seconds), `default_language`, `memory_limit_mb`; `num_workers` programs run at a time.

    A subclass may run code in its own way: `execute_code` is all that does it here, and may be async.
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
        """Run a program; what the model is told of it."""
        limits = replace(self.limits, wall_s=float(timeout))
        return in_words(self.settings.runner().run(code, language, limits=limits), limits)


def code_schema(description: str) -> OpenAIFunctionToolSchema:
    """That of a tool whose one argument is `code`."""
    code = {"type": "string", "description": "The code to run."}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    function = {"name": "code_interpreter", "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def plain_code(parameters: dict[str, Any]) -> str:
    """The argument `code`, out of the fence that models put around it."""
    code = str(parameters["code"])
    fenced = _FENCED.search(code)
    return fenced.group(1) if fenced else code


def in_words(result: Result, limits: Limits) -> str:
    """What the model reads: what was printed, and on a failure what was said of it."""
    if result.status == "refused":
        raise ToolError(result.stderr)
    said = {
        "timeout": f"The code was stopped: it ran longer than {limits.wall_s:g} seconds.",
        "memory": f"The code was stopped: it needed more than {limits.memory_mb} MB of memory.",
        "output": "The output was too long and is cut.",
    }.get(result.status, "")
    parts = [result.stdout, "" if result.status == "finished" else result.stderr, said]
    text = "\n".join(part.rstrip("\n") for part in parts if part.strip())
    return text or "The code ran and printed nothing."
