"""Counting: the call's counter gets what the loops inside it tick, from any thread; nothing is counted outside."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import hypothesis.strategies as st
from hypothesis import given

from verl.utils.progress import Progress, count_futures, expect, record_progress, tick


def test_loops_are_counted_by_the_call_around_them_and_by_the_inner_one_first():
    outer, inner = Progress(), Progress()
    with record_progress(outer):
        expect(5)
        tick(2)
        with record_progress(inner):
            expect(3)
            expect(3)
            tick()
        tick()
    assert outer.read() == (3, 5)
    assert inner.read() == (1, 6)


def test_outside_of_a_counted_call_nothing_is_counted_and_nothing_fails():
    progress = Progress()
    with record_progress(progress):
        thread = threading.Thread(target=lambda: (expect(4), tick(4)))  # a thread of its own is another call
        thread.start()
        thread.join()
    expect(1)
    tick()
    assert count_futures(iter([]), 0) == []
    assert progress.read() == (0, 0)


def test_a_future_counts_where_it_was_submitted_whoever_finishes_it():
    progress, futures = Progress(), [Future() for _ in range(64)]
    with record_progress(progress):
        assert count_futures(iter(futures), 64) == futures
    assert progress.read() == (0, 64)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda future: future.set_result(None), futures[:40]))
    assert progress.read() == (40, 64)
    futures[40].set_exception(ValueError("failed is done, too"))
    assert progress.read() == (41, 64)


def test_a_future_that_is_done_at_once_counts_before_the_next_is_made():
    seen, progress = [], Progress()

    def scored():
        for _ in range(3):
            seen.append(progress.read())
            future: Future[None] = Future()
            future.set_result(None)
            yield future

    with record_progress(progress):
        count_futures(scored(), 3)
    assert seen == [(0, 3), (1, 3), (2, 3)]


@given(rows=st.integers(1, 60), fillers=st.integers(0, 60), epochs=st.integers(1, 4))
def test_rows_that_only_fill_up_are_not_counted(rows, fillers, epochs):
    progress = Progress(share=rows / (rows + fillers))
    progress.expect((rows + fillers) * epochs)
    before = 0
    for _ in range((rows + fillers) * epochs):
        progress.tick()
        assert before <= progress.read()[0] <= before + 1
        before = progress.read()[0]
    assert progress.read() == (rows * epochs, rows * epochs)
