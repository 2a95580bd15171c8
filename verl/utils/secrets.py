"""Mask secrets in configurations that are stored or sent for people to read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["MASK", "mask_secrets"]

MASK = "[secret]"
# Names of secrets. `token` alone is not one of them: most keys with this word count tokens.
_SECRET = re.compile(
    r"(^|_)(api_?key|secret|password|passwd|credentials?|(auth|access|api|bearer)_token|alert_url)$", re.I
)


def mask_secrets(value: Any) -> Any:
    """Return nested dicts and lists in which the values of keys like `api_key` are replaced by `[secret]`."""
    if isinstance(value, Mapping):
        return {
            key: MASK if item and isinstance(key, str) and _SECRET.search(key) else mask_secrets(item)
            for key, item in value.items()
        }
    return [mask_secrets(item) for item in value] if isinstance(value, list | tuple) else value
