"""Words for plans and problems: counts, the values next to one that does not work, and probable spelling mistakes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHORT_NAME = 5  # characters


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def near_values(values: list[int], wanted: int) -> str:
    """The values next to `wanted`, in words: `64 or 128`."""
    below = [value for value in values if value <= wanted][-1:]
    above = [value for value in values if value > wanted][:1]
    return " or ".join(str(value) for value in below + above)


def count(number: int, thing: str) -> str:
    """`1 rank`, `2 ranks`, `2 batches`."""
    plural = "es" if thing.endswith("batch") else "s"
    return f"{number} {thing}" + ("" if number == 1 else plural)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is probably a misspelling of; None if none is close enough.

    In a short name one letter changes the meaning (`dpo`, `gdpo`): its first letter must be the same.
    """
    names = [other for other in known if len(name) > _SHORT_NAME or other[:1].lower() == name[:1].lower()]
    near = difflib.get_close_matches(name, names, n=1)
    return near[0] if near else None
