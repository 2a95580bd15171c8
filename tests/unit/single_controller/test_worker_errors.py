"""WorkerCallError: the error of one rank, with different errors of other ranks, one of which may be the cause."""

from __future__ import annotations

import pickle

import pytest

from verl.single_controller.base.worker_group import Failure, WorkerCallError

LOST = Failure.from_exception(ConnectionError("closed by a peer"))


def summary(*others: Exception) -> str:
    failures = {rank: Failure.from_exception(error) for rank, error in enumerate(others, 1)}
    return WorkerCallError(LOST, "rollout", 0, "host", "receive", failures).summary


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ((), ""),
        ((ConnectionError("closed by a peer"),) * 2, "; 2 other rank(s) failed too"),
        (
            (ConnectionError("closed by a peer"), MemoryError("a\nb"), MemoryError("a\nb"), ValueError("c")),
            "; 4 other rank(s) failed too (rank 2: MemoryError: a; rank 4: ValueError: c)",
        ),
    ],
)
def test_different_errors_of_other_ranks_are_named_once(others, text):
    assert summary(*others) == "worker raised ConnectionError: closed by a peer" + text


def test_few_of_many_errors_are_named_and_none_is_long():
    text = summary(*(ValueError(f"{rank}" * 1000) for rank in range(1, 9)))
    assert text.count("ValueError") == 3
    assert len(text) < 800


def test_the_error_and_its_cause_can_be_pickled():
    error = WorkerCallError(LOST, "rollout", 0, "host", "receive", {1: Failure.from_exception(KeyError("x"))})
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    assert isinstance(copied.__cause__, ConnectionError)
