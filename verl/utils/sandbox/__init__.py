"""Runs code that a model wrote, on this machine, without root, Docker or a cloud, and lets nothing of it out.

`Sandbox` runs programs, each in a process tree of its own that is used once; `Session` is a Python that remembers.
`available()` says what this host can isolate; `python -m verl.utils.sandbox` prints it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.utils.sandbox.outcome import REQUIRE, Isolation, IsolationMissing, Limits, Result, Status
    from verl.utils.sandbox.runner import Sandbox, Session, available

__all__ = [
    "REQUIRE",
    "Isolation",
    "IsolationMissing",
    "Limits",
    "Result",
    "Sandbox",
    "Session",
    "Status",
    "available",
]


def __getattr__(name: str) -> Any:
    """Import on first use: the zygote imports this package, and every module it has imported slows its forks down."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.utils.sandbox import outcome, runner

    return getattr(runner if name in ("Sandbox", "Session", "available") else outcome, name)
