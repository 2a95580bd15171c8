"""The old name of `verl.sandbox`, also as a command (`python -m verl.utils.sandbox`)."""

from verl.sandbox import REQUIRE, Isolation, IsolationMissing, Limits, Result, Sandbox, Session, Status, available
from verl.sandbox.__main__ import main

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

if __name__ == "__main__":
    main()
