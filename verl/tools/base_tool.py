"""BaseTool: what a model may call, with a state for each trajectory. Subclass it for your own."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class ToolError(Exception):
    """Raise it in a tool for a failure the model should read in exactly these words."""


class BaseTool:
    """A tool of a tool file: `class_name`, `config` and, optionally, `tool_schema` of its entry make it.

    One object serves all trajectories of a process, so what belongs to one of them is kept by `instance_id`: `create`
    at the trajectory's first call, `execute` for every call (several of one turn run side by side), `calc_reward` and
    `release` at its end, `release` also after failures. Methods may be plain functions, which then run in threads.
    """

    refuses_unknown_arguments = False
    """Whether an argument that the schema does not name is the model's mistake."""
    schema_is_remote = False
    """Whether another machine wrote the schema: its regular expressions are then not run here."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        schema: Any = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        if schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema. Give tool_schema in the tool file, or define "
                "get_openai_tool_schema()."
            )
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(schema)
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The tool's name and parameters. A tool that defines it needs no `tool_schema` in the tool file."""
        return getattr(self, "tool_schema", None)

    async def check(self) -> str | None:
        """Asked once before the run: what keeps the tool from working (returned or raised), or None."""
        return None

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a trajectory. `kwargs` hold the row's `create_kwargs`, whole and those that are named here."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        """Answer one call: (response, reward, metrics); a text, a dict or a ToolResponse alone will do.

        `kwargs` hold `agent_data` and the row's `execute_kwargs`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """What the trajectory earned with this tool, asked once at its end. Not defined: no reward."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget a trajectory."""
