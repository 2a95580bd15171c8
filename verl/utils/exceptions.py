"""Exceptions that go from process to process: rebuilt as they stood, whatever their constructors take."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


class Travels(Exception):
    """For an exception with a constructor of its own. Pickle would call that with the message alone."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_constructor, (type(self), self.args), self.__dict__


def _without_constructor(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    return kind.__new__(kind, *args)


class RemoteTraceback(Exception):
    """The traceback of another process, as text; the cause of the exception that came from there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def note(error: BaseException, **facts: Any) -> None:
    """Write what is known where an error passes by onto it as attributes; what was written nearer its source stays."""
    for name, value in facts.items():
        if getattr(error, name, None) is None:
            with suppress(AttributeError):  # a class with slots has no room
                setattr(error, name, value)


def causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, the first cause last."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not known for known in found):
        found.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return found
