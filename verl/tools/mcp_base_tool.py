"""MCPBaseTool: a tool of an MCP server. The toolbox makes one for every selected tool of an entry's servers."""

from __future__ import annotations

import json
from typing import Any

from verl.tools.base_tool import BaseTool, ToolError
from verl.tools.mcp_servers import McpServer
from verl.tools.schemas import ToolResponse
from verl.utils.concurrency import wait_with_timeout


class MCPBaseTool(BaseTool):
    """Passes calls on. All trajectories of a loop worker talk to the same server, over one connection.

    `config`: `timeout` seconds for one call, `rate_limit` calls per second, `num_workers` at a time.
    """

    schema_is_remote = True
    server: McpServer | None = None
    """Set by the toolbox."""

    async def check(self) -> str | None:
        await self._connected().ping()
        return None

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        calling = self._connected().call(self.name, parameters)
        answer = await (
            wait_with_timeout(float(self.config["timeout"]), calling) if "timeout" in self.config else calling
        )
        text = self.text_of(answer)
        if answer.get("isError"):
            raise ToolError(text)
        return ToolResponse(text=text), None, self.metrics_of(answer)

    def text_of(self, answer: dict[str, Any]) -> str:
        """What the model reads of an answer (`content`, `structuredContent`, …). Override it for another form."""
        parts = [_part(part) for part in answer.get("content") or []]
        if not parts and answer.get("structuredContent") is not None:
            return json.dumps(answer["structuredContent"], ensure_ascii=False)
        return "\n".join(parts)

    def metrics_of(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Numbers to record with the call."""
        return {}

    def _connected(self) -> McpServer:
        if self.server is None:
            raise ToolError(f"{self.name} has no server: MCP tools are made by a tool file with an mcp entry")
        return self.server


def _part(part: dict[str, Any]) -> str:
    """One piece of content; what is not text is named."""
    if part.get("type") == "text":
        return str(part["text"])
    resource = part.get("resource") or part
    if "text" in resource:
        return str(resource["text"])
    return f"[{part.get('type')} {resource.get('mimeType') or resource.get('uri') or ''}]".replace(" ]", "]")
