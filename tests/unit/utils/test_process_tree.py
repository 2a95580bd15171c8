"""Processes: what their exit codes mean."""

from __future__ import annotations

import pytest

from verl.utils.process_tree import describe_exit


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (None, "has ended"),
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-11, "was killed by SIGSEGV"),
        (-43, "was killed by signal 43"),  # a real-time signal, which has no name
    ],
)
def test_an_exit_code_is_described_by_its_number_or_signal(code, meaning):
    assert describe_exit(code) == meaning
