"""WorkerCallError: the error of one rank, with different errors of other ranks, one of which may be the cause."""

from __future__ import annotations

import pickle

import pytest

from verl.single_controller.base.worker_group import Failure, WorkerCallError

LOST = Failure.from_exception(ConnectionError("closed by a peer"))


def call_error(*others: Exception) -> WorkerCallError:
    errors = [
        WorkerCallError(Failure.from_exception(error), "rollout", rank, "host", "receive")
        for rank, error in enumerate(others, 1)
    ]
    return WorkerCallError(LOST, "rollout", 0, "host", "receive", errors)


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
    assert call_error(*others).summary == "worker raised ConnectionError: closed by a peer" + text


def test_few_of_many_errors_are_named_and_none_is_long():
    text = call_error(*(ValueError(f"{rank}" * 1000) for rank in range(1, 9))).summary
    assert text.count("ValueError") == 3
    assert len(text) < 800


def test_the_error_and_its_cause_can_be_pickled():
    error = call_error(KeyError("x"))
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    assert isinstance(copied.__cause__, ConnectionError)
    assert isinstance(copied.others[0].__cause__, KeyError)
