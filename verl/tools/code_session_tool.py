"""CodeSessionTool: a Python interpreter per trajectory that keeps its variables between calls, like a notebook."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from verl.sandbox import Session
from verl.sandbox.code_runner import CodeSettings, configured
from verl.tools.sandbox_fusion_tools import SandboxFusionTool, code_schema, result_text
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

# Part of the response to the model.
_LOST = "The interpreter was restarted; all variables are lost."


class CodeSessionTool(SandboxFusionTool):
    """Runs code like `SandboxFusionTool`, but always in the local sandbox and with one interpreter per trajectory.

    The interpreter starts with the first call and ends with the trajectory. If a call kills it, for example by the time
    limit, its response states that all variables are lost, and the next call starts a new interpreter.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        if self.config["sandbox_fusion_url"]:
            raise ValueError(
                "sandbox_fusion_url: not supported by CodeSessionTool, because the server API has no sessions."
                " Remove the key."
            )
        self._sessions: dict[str, Session] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    @property
    def settings(self) -> CodeSettings:
        return replace(configured(), url=None)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return code_schema(
            "Runs Python code and returns what it prints and the value of its last line. Variables are remembered."
        )

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id, **kwargs)
        self._locks[instance_id] = asyncio.Lock()
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, None]:
        async with self._locks[instance_id]:  # calls of one turn run concurrently
            return await super().execute(instance_id, parameters, **kwargs)

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> str:
        """Run `code` in the interpreter of the trajectory, for at most `timeout` seconds; return its output."""
        session = self._sessions.get(instance_id)
        if session is None:
            session = self._sessions[instance_id] = self.settings.sandbox().session(self.limits)
        text = result_text(session.execute(code, wall_s=float(timeout)), self.limits)
        # `release` may have run during this call, which then has to close the session itself.
        released = instance_id not in self._locks
        if released or not session.alive:
            self._sessions.pop(instance_id, session).close()
            text = f"{text}\n{_LOST}"
        return text

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._locks.pop(instance_id, None)
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            session.close()
