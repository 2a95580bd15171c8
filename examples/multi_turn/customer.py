"""A simulated user: a customer who states the number when asked; repeating a stated number costs reward."""

from __future__ import annotations

from typing import Any

from verl.interactions.base import BaseInteraction


class Customer(BaseInteraction):
    """`interaction_kwargs` of a row: {name: customer, number: …, stated: whether the order states the number}."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], number: str = "", stated: bool = False, **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """An answer ends the conversation; any other message counts as a question."""
        if "####" in messages[-1]["content"]:
            return True, "", 0.0, {}
        return False, reply(number, stated), self.config["needless"] if stated else 0.0, {}


def reply(number: str, stated: bool) -> str:
    return f"As I said , {number} ." if stated else f"{number} , please ."
