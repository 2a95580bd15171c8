"""Runs of a matrix's elements come apart into rectangles, none twice and none left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl.models.core.flat_ranges import rectangles


@given(st.integers(1, 7), st.integers(0, 60), st.integers(0, 60))
def test_rectangles_are_the_run_in_order(width: int, one: int, other: int) -> None:
    start, stop = sorted((one, other))
    found = [
        row * width + column for part in rectangles(width, start, stop) for row in part.rows for column in part.columns
    ]
    assert found == list(range(start, stop))
    assert len(list(rectangles(width, start, stop))) <= 3
