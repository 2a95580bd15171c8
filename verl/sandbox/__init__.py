"""Runs code that a model wrote, on this machine or on a SandboxFusion server, isolated from everything else.

`Sandbox` runs programs, each in its own process tree that is used once; `Session` is a Python process that keeps its
variables from cell to cell. `SandboxClient` makes the same calls to a server; `python -m verl.sandbox.server` is one.
`available()` returns what this host can isolate; `python -m verl.sandbox` prints it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.sandbox.client import SandboxClient, SandboxUnavailable
    from verl.sandbox.sandbox import Sandbox, Session, available
    from verl.sandbox.types import REQUIRE, Isolation, IsolationMissing, Limits, Result, Status

__all__ = [
    "REQUIRE",
    "Isolation",
    "IsolationMissing",
    "Limits",
    "Result",
    "Sandbox",
    "SandboxClient",
    "SandboxUnavailable",
    "Session",
    "Status",
    "available",
]
_MODULES = {
    "Sandbox": "sandbox",
    "available": "sandbox",
    "Session": "sandbox",
    "SandboxClient": "client",
    "SandboxUnavailable": "client",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the zygote imports this package, and every module it has imported slows its forks down."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"verl.sandbox.{_MODULES.get(name, 'types')}"), name)
