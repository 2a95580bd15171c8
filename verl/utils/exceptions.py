"""Exceptions that go from process to process: rebuilt as they stood, whatever their constructors take."""

from __future__ import annotations

from typing import Any


class Travels(Exception):
    """For an exception with a constructor of its own. Pickle would call that with the message alone."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_constructor, (type(self), self.args), self.__dict__


def _without_constructor(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    return kind.__new__(kind, *args)
