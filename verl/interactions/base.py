"""BaseInteraction: a simulated user who answers the model. Subclass it for your own."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """One object serves all trajectories of a process: what belongs to one of them is kept by `instance_id`.

    Methods may be plain functions, which then run in threads.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config["name"] if "name" in config else type(self).__name__

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a trajectory. `kwargs` are the row's `extra_info.interaction_kwargs`."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """What the user says to the chat so far: (whether it ends here, text, score of the turn, anything else)."""
        raise NotImplementedError(f"{type(self).__name__} does not define generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """What the trajectory earned as a whole, besides its turns. Not defined: no score."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget a trajectory."""
