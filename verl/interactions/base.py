"""BaseInteraction: base class of simulated users, which reply to the model."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """One object serves all trajectories of a process: keep the state of a trajectory by `instance_id`.

    Methods may be `async` or plain; plain ones run in threads.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config["name"] if "name" in config else type(self).__name__

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start a trajectory; return its id. `kwargs`: the row's `extra_info.interaction_kwargs`."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """The reply to the conversation so far: (whether the conversation ends, text, score of the turn, extra)."""
        raise NotImplementedError(f"{type(self).__name__} does not define generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Score of the whole trajectory, in addition to those of its turns. If not overridden: no score."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Release the state of a trajectory."""
