"""A simulated user: a customer who says how many they want when asked, and is not amused to say it twice."""

from __future__ import annotations

from typing import Any

from verl.interactions.base import BaseInteraction


class Customer(BaseInteraction):
    """`interaction_kwargs: {name: customer, number: …, said: …}` of a row: how many, and whether the order says so."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], number: str = "", said: bool = False, **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """An answer ends the conversation; anything else is taken for a question."""
        if "####" in messages[-1]["content"]:
            return True, "", 0.0, {}
        return False, reply(number, said), self.config["needless"] if said else 0.0, {}


def reply(number: str, said: bool) -> str:
    return f"As I said , {number} ." if said else f"{number} , please ."
