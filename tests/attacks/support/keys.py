"""Keys of the servers under attack."""

from __future__ import annotations

__all__ = ["API_KEY", "bearer"]

API_KEY = "attack-key"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
