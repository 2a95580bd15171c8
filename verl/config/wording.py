"""Numbers in words, for plans and problems: counts of things, and the values next to one that does not work."""

from __future__ import annotations


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
