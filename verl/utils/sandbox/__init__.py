"""Runs code that a model wrote, on this machine, without root, Docker or a cloud, and lets nothing of it out.

`Sandbox` runs programs, each in a process tree of its own that is used once; `Session` is a Python that remembers.
`available()` says what this host can isolate; `python -m verl.utils.sandbox` prints it.
"""

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
