"""Errors of engines name fields; whoever knows where a user sets those (keys, options) spells them out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

__all__ = ["keys_under", "respelled"]

# Words that can only be a field: with an underscore, with a value, or as what the message is about. Quoted: data.
_FIELD = re.compile(r"(?<![\w.'-])(?:[a-z]+(?:_[a-z]+)+(?!\w)|[a-z]+(?==)|(?:^[a-z_]+)(?=[.:]))")


def respelled(message: str, names: Collection[str], spelling: Callable[[str], str]) -> str:
    """The message with the fields among `names` as `spelling` has them."""
    return _FIELD.sub(lambda found: spelling(found[0]) if found[0] in names else found[0], message)


@contextmanager
def keys_under(prefix: str, config: Any) -> Iterator[None]:
    """Errors raised within name fields of `config` (a dataclass) by their whole key."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        names = {field.name for field in fields(config)}
        if error.args and isinstance(error.args[0], str):
            error.args = (respelled(error.args[0], names, f"{prefix}.".__add__), *error.args[1:])
        raise
