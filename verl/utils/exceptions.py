"""Exceptions: pickling across processes, context, causes, and configuration keys in place of field names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any

# A field name in a message: a word with an underscore, a word before `=`, or a word before `.` or `:` at the beginning
# of the message. Quoted words are data.
_FIELD = re.compile(r"(?<![\w.'-])(?:[a-z]+(?:_[a-z]+)+(?!\w)|[a-z]+(?==)|(?:^[a-z_]+)(?=[.:]))")


class PicklableError(Exception):
    """Base of exceptions whose constructor takes other arguments than the message.

    By default, pickle would call the constructor with the message alone.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_constructor, (type(self), self.args), self.__dict__


def _without_constructor(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    return kind.__new__(kind, *args)


class RemoteTraceback(Exception):
    """The traceback of another process as text, used as the cause of an exception received from it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def annotate_error(error: BaseException, **context: Any) -> None:
    """Set attributes on an error before it is raised again; attributes that are already set are not changed."""
    for name, value in context.items():
        if getattr(error, name, None) is None:
            with suppress(AttributeError):  # a class with __slots__
                setattr(error, name, value)


def cause_chain(error: BaseException) -> list[BaseException]:
    """Return the error followed by the errors it was raised from, the root cause last."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not earlier for earlier in chain):
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def rename_fields(message: str, names: Collection[str], rename: Callable[[str], str]) -> str:
    """Replace the field names of `names` in an error message by `rename(name)`."""
    return _FIELD.sub(lambda match: rename(match[0]) if match[0] in names else match[0], message)


@contextmanager
def fields_as_keys(prefix: str, config: Any) -> Iterator[None]:
    """Replace fields of `config` (a dataclass) by their full keys in the messages of errors raised inside.

    Code that receives only `config` names the field (`max_model_len`) in its errors, because it does not know the key
    (`actor_rollout_ref.rollout.max_model_len`).
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        names = {field.name for field in fields(config)}
        if error.args and isinstance(error.args[0], str):
            error.args = (rename_fields(error.args[0], names, f"{prefix}.".__add__), *error.args[1:])
        raise
