"""The process pool: values and errors of calls come back, limits hold, nothing of this process goes there.

What calls do to their processes, and what that costs others: `tests/unit/workers/reward_manager/test_scorer.py`.
Workers import this file for the functions in it: it imports nothing heavy.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
from functools import partial

import psutil
import pytest

from verl.utils.process_pool import (
    CannotSend,
    InitializerError,
    PoolClosed,
    ProcessDied,
    ProcessPool,
    TaskTimeout,
    gather_results,
)
from verl.utils.process_pool.processes import ForkServer
from verl.utils.process_tree import why_not_running
from verl.utils.progress import Progress, record_progress

_loaded: list[str] = []


def load(*what):
    _loaded.extend(what)


def loaded():
    return list(_loaded)


def add(a, b):
    return a + b


def fail(text):
    raise KeyError(text)


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def fail_oddly():
    raise Odd(1, 2)


def exit_with(code):
    os._exit(code)


def hold_the_gil():
    ctypes.PyDLL(None).usleep(1000_000_000)


def describe(body):
    return type(body).__name__, len(body), os.getpid()


def keep(size):
    _loaded.append("x" * size)
    return os.getpid()


def wait_for(file):
    while file and not os.path.exists(file):
        time.sleep(0.01)


def surroundings(descriptor):
    try:
        os.fstat(descriptor)
        reachable = True
    except OSError:
        reachable = False
    return {"torch" in sys.modules, "ray" in sys.modules, threading.active_count() > 1, reachable}


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(2) as made:
        yield made


def test_values_and_exceptions_come_back_to_whom_they_belong(pool):
    futures = [pool.submit(add, i, 1) for i in range(100)]
    missing, odd, died = pool.submit(fail, "what"), pool.submit(fail_oddly), pool.submit(exit_with, 3)
    assert [future.result() for future in futures] == list(range(1, 101))
    with pytest.raises(KeyError, match="what") as raised:
        missing.result()
    assert "in fail" in str(raised.value.__cause__), "the traceback over there"
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):  # it cannot be made again from its pickle
        odd.result()
    with pytest.raises(ProcessDied, match="exit code 3"):
        died.result()


def test_what_cannot_be_imported_there_travels_by_content(pool):
    offset = 40
    assert pool.submit(lambda x: x + offset, 2).result() == 42
    with pytest.raises(CannotSend, match=r"_thread\.lock"):
        pool.submit(add, threading.Lock(), 1).result()
    with pytest.raises(CannotSend, match=r"_thread\.lock"):
        pool.submit(threading.Lock).result()


@pytest.mark.parametrize(("function", "arguments"), [(time.sleep, (1000,)), (hold_the_gil, ())])
def test_each_call_has_its_own_time_limit_whatever_it_does_with_the_interpreter(pool, function, arguments):
    began = time.monotonic()
    hanging = pool.submit(function, *arguments, timeout=0.3)
    slow = pool.submit(time.sleep, 0.6)
    with pytest.raises(TaskTimeout, match=r"0\.3 s"):
        hanging.result()
    assert slow.result() is None
    assert time.monotonic() - began >= 0.6


def test_many_results_are_in_order_and_hold_the_exceptions(pool):
    results = gather_results(partial(pool.enqueue, add, [(1, 2), (1, "2"), (3, 4)]), 3)
    assert [results[0], type(results[1]), results[2]] == [3, TypeError, 7]


@pytest.mark.parametrize(("units", "before", "total"), [(None, 3, 4), ([5, 1, 2, 3], 9, 11), ([5, 1, 0, 3], 9, 9)])
def test_results_count_as_progress_while_others_are_waited_for(pool, tmp_path, units, before, total):
    progress, file, results = Progress(), tmp_path / "go on", []
    calls = [(None,), (None,), (str(file),), (None,)]

    def run():
        with record_progress(progress):
            results.extend(gather_results(partial(pool.enqueue, wait_for, calls), len(calls), units))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        give_up = time.monotonic() + 120
        while progress.read() != (before, total) and time.monotonic() < give_up:
            time.sleep(0.01)
        assert progress.read() == (before, total)
    finally:
        file.touch()
        thread.join()
    assert progress.read() == (total, total)
    assert results == [None] * 4


def test_the_initializer_runs_once_and_every_worker_has_what_it_loads():
    with ProcessPool(1, initializer=lambda: load("file", str(os.getpid()))) as pool:
        first = pool.submit(loaded).result()
        pool.submit(exit_with, 0).exception()
        assert pool.submit(loaded).result() == first
    assert first[0] == "file"
    assert first[1] != str(os.getpid())


def test_an_initializer_that_fails_is_an_error_of_the_first_call_that_names_the_cause():
    def needs():
        import no_such_module  # noqa: F401

    with ProcessPool(1, initializer=needs) as pool, pytest.raises(InitializerError, match="no_such_module"):
        pool.submit(add, 1, 2)


def kill_own_process():
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_socket_of_a_fork_server_that_is_killed_during_its_start_is_closed():
    before = psutil.Process().num_fds()
    with pytest.raises(EOFError, match="SIGKILL") as caught:
        ForkServer(kill_own_process, None, None)
    assert psutil.Process().num_fds() == before, f"{caught} keeps the local variables"


def test_a_fork_server_whose_start_is_interrupted_is_killed_and_reaped(monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ForkServer, "_check_not_stopped", interrupt)
    before = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt) as caught:
        ForkServer(partial(time.sleep, 1000), None, None)
    assert psutil.Process().children() == before, f"{caught} keeps the local variables"


def test_a_fork_server_that_ends_while_it_is_closed_is_reaped(monkeypatch):
    server = ForkServer(None, None, None)
    killpg = os.killpg

    def late(pid, number):
        killpg(pid, number)
        raise ProcessLookupError

    os.kill(server._process.pid, signal.SIGSTOP)
    while why_not_running(server._process.pid) != "stopped":
        time.sleep(0.01)
    monkeypatch.setattr(os, "killpg", late)
    server.close()
    assert server._process.returncode == -signal.SIGKILL


def test_the_error_of_a_lost_process_can_be_pickled():
    error = pickle.loads(pickle.dumps(ProcessDied("was killed by SIGKILL", external=True)))
    assert (str(error), error.external) == ("lost its process, which was killed by SIGKILL", True)


def test_nothing_of_this_process_goes_into_the_workers(pool):
    import ray  # noqa: F401
    import torch  # noqa: F401

    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    try:
        assert pool.submit(surroundings, theirs).result() == {False}
        with ProcessPool(1) as started_now:
            assert started_now.submit(surroundings, theirs).result() == {False}
    finally:
        os.close(ours)
        os.close(theirs)


def test_calls_that_a_closed_pool_owed_are_errors():
    pool = ProcessPool(1)
    owed = pool.submit(time.sleep, 1000)
    pool.close()
    with pytest.raises(PoolClosed, match="closed"):
        owed.result()


@pytest.mark.parametrize("body", [b"small", b"x" * 3_000_000, bytearray(b"y" * 3_000_000)])
def test_a_buffer_arrives_as_bytes(body):
    with ProcessPool(1) as pool:
        assert pool.submit(describe, pickle.PickleBuffer(body)).result()[:2] == ("bytes", len(body))
        assert len(pool.submit(add, b"z" * 3_000_000, b"!").result()) == 3_000_001


def test_a_worker_that_keeps_memory_is_replaced():
    with ProcessPool(1, max_growth=8 << 20) as pool:
        pool.submit(keep, 1000).result()  # imports this file, which may be much memory already
        first = pool.submit(keep, 1000).result()
        assert pool.submit(keep, 32 << 20).result() == first, "small calls keep the process"
        assert pool.submit(keep, 1000).result() != first


def test_all_workers_are_forked_before_calls_need_them():
    with ProcessPool(3, prefork=True) as pool:
        pool.submit(add, 1, 2).result()
        give_up = time.monotonic() + 10
        while len(pool.workers) < 3 and time.monotonic() < give_up:
            time.sleep(0.01)
        assert len(pool.workers) == 3
