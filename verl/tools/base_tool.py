"""BaseTool: base class of tools, with per-trajectory state."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class ToolError(Exception):
    """Raise this in a tool for an error whose message the model should read unchanged."""


class BaseTool:
    """A tool, created from `class_name`, `config` and, optionally, `tool_schema` of an entry in a tool file.

    One object serves all trajectories of a process: keep the state of a trajectory by `instance_id`. The loop calls
    `create` at the trajectory's first call, `execute` for every call (those of one turn run concurrently), and
    `calc_reward` and `release` at its end, `release` also after errors. Methods may be `async` or plain; plain ones run
    in threads.
    """

    refuses_unknown_arguments = False
    """Whether arguments that are not in the schema are an error of the model."""
    schema_is_remote = False
    """Whether the schema comes from a server: its regular expressions are not evaluated, because they may be slow."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        schema: Any = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        if schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema. Set tool_schema in the tool file, or define "
                "get_openai_tool_schema()."
            )
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(schema)
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The tool's schema. Override it instead of writing `tool_schema` in the tool file."""
        return getattr(self, "tool_schema", None)

    async def check(self) -> str | None:
        """Called once before the run. Return (or raise) a description of the problem if the tool cannot work."""
        return None

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start a trajectory. `kwargs`: `create_kwargs`, a dict from the row; items that are named parameters of this
        method are also passed separately."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        """Run one call; return (response, reward, metrics), or only a response: a text, a dict or a ToolResponse.

        `kwargs`: `agent_data` and the row's `execute_kwargs`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the trajectory for this tool, computed at its end. If not overridden: no reward."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release the state of a trajectory."""
