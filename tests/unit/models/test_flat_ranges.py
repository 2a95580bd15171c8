"""Ranges of a matrix in row-major order are split into rectangles, each element exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl.models.megatron_core import matrix_rectangles


@given(st.integers(1, 7), st.integers(0, 60), st.integers(0, 60))
def test_rectangles_are_the_run_in_order(width: int, one: int, other: int) -> None:
    start, stop = sorted((one, other))
    found = [
        row * width + column
        for part in matrix_rectangles(width, start, stop)
        for row in part.rows
        for column in part.columns
    ]
    assert found == list(range(start, stop))
    assert len(list(matrix_rectangles(width, start, stop))) <= 3
