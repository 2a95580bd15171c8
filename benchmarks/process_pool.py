"""Process pools with time limits: ours (verl/utils/process_pool) compared with pebble and loky.

    python benchmarks/process_pool.py [--calls 4000] [--pools ours pebble loky] [--json results.jsonl]

Needs the packages of the selected pools. Each pool has two workers and is in a process that has torch and Ray loaded,
like a trainer. pebble runs on multiprocessing's fork server, its fastest start method that does not fork this process;
loky has no time limits, so a hanging call requires killing the executor with all its calls and starting another. Rows
with "lost" count other calls without a result; rows about processes wait up to eight seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import _pool_tasks as tasks
from _report import report

WORKERS = 2
EXIT_TIMEOUT_S = 8.0


class Pool(Protocol):
    """Common interface of the pools; `limit` None: no time limit."""

    def submit(self, function: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Future[Any]: ...
    def close(self) -> None: ...


class Ours:
    def __init__(self) -> None:
        from verl.utils.process_pool import ProcessPool

        self._pool = ProcessPool(WORKERS)
        self.close = self._pool.close

    def submit(self, function: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Future[Any]:
        return self._pool.submit(function, *arguments, timeout=limit or 1000.0)


class Pebble:
    def __init__(self) -> None:
        import pebble

        self._pool = pebble.ProcessPool(max_workers=WORKERS, context=multiprocessing.get_context("forkserver"))

    def submit(self, function: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Future[Any]:
        return self._pool.schedule(function, args=arguments, timeout=limit)

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()


class Loky:
    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        from loky import ProcessPoolExecutor

        self._pool = ProcessPoolExecutor(max_workers=WORKERS)

    def submit(self, function: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Future[Any]:
        if self._pool._flags.broken or self._pool._flags.shutdown:
            self._start()
        future = self._pool.submit(function, *arguments)
        if limit is not None:
            with contextlib.suppress(Exception):
                future.result(timeout=limit)
            if not future.done():
                self._pool.shutdown(kill_workers=True)
        return future

    def close(self) -> None:
        self._pool.shutdown(kill_workers=True)


POOLS: dict[str, Callable[[], Pool]] = {"ours": Ours, "pebble": Pebble, "loky": Loky}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=4000, help="small rewards for the throughput")
    parser.add_argument("--pools", nargs="+", default=list(POOLS), choices=list(POOLS))
    parser.add_argument("--json", default=None, help="append the JSON line to this file")
    parser.add_argument("--hang-as", choices=list(POOLS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hang_as:
        hang(POOLS[args.hang_as]())
        return
    import ray  # noqa: F401
    import torch

    torch.ones(64, 64) @ torch.ones(64, 64)  # starts its threads
    results = {name: measure_pool(name, args.calls) for name in args.pools}
    rows = [{"measured": key, **{name: results[name][key] for name in results}} for key in next(iter(results.values()))]
    report(f"process pools, {WORKERS} workers", rows, args.json)


def measure_pool(name: str, calls: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    began = time.perf_counter()
    pool = POOLS[name]()
    pool.submit(tasks.reward, "#### 1", "1").result()
    results["start to the first result, s"] = round(time.perf_counter() - began, 2)
    results["small rewards per second"] = throughput(pool, calls)
    results["latency of a call, ms"] = latency(pool)
    results["private memory of a worker, MB"] = round(pool.submit(tasks.memory_mb).result(), 1)
    read, write = os.pipe()
    os.set_inheritable(write, True)
    results["inherited from the caller's process"] = pool.submit(tasks.inherited_state, write).result()
    os.close(read)
    os.close(write)
    for title, function in (
        ("sleeps", time.sleep),
        ("computes", tasks.compute_forever),
        ("holds the GIL", tasks.hold_the_gil),
    ):
        results |= hanging(pool, title, function)
    results["20 sleeping calls with a limit of 1 s: all ended after, s"] = concurrent_timeouts(pool, name)
    for title, function in (("os._exit", exit_process), ("a crash", tasks.crash)):
        results[f"calls lost of 40 by {title} of another call"] = lost_calls(POOLS[name](), function)
    results["child process of a killed call"] = child_state(pool, hang=True)
    results["child process of a finished call, after close"] = child_state(pool, hang=False)
    results["processes left when the caller is killed"] = orphans(name)
    return results


def exit_process() -> None:
    tasks.exit_process(3)


def throughput(pool: Pool, calls: int) -> int:
    text = "Natalia sold 48 clips in April, and half as many in May. " * 6 + "#### 72"
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        futures = [pool.submit(tasks.reward, text, "72") for _ in range(calls)]
        assert all(future.result() == 1.0 for future in futures)
        best = max(best, calls / (time.perf_counter() - began))
    return round(best)


def latency(pool: Pool) -> float:
    seconds = []
    for _ in range(200):
        began = time.perf_counter()
        pool.submit(tasks.reward, "#### 1", "1").result()
        seconds.append(time.perf_counter() - began)
    return round(1000 * statistics.median(seconds), 2)


def hanging(pool: Pool, title: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Delay from the time limit of a call (0.5 s) to its error, and to a result of the replacement worker."""
    arguments = (1000,) if function is time.sleep else ()
    began = time.perf_counter()
    call = pool.submit(function, *arguments, limit=0.5)
    second_call = pool.submit(time.sleep, 0.0)  # occupies the second worker
    error = call.exception(timeout=60)
    stopped = time.perf_counter() - began - 0.5
    second_call.exception(timeout=60)
    results = [pool.submit(tasks.reward, "#### 1", "1") for _ in range(WORKERS)]
    is_pool_usable = all(result.exception(timeout=60) is None for result in results)
    replaced = time.perf_counter() - began - 0.5
    state = "killed" if error is not None and is_pool_usable else "NOT killed"
    key = f"call that {title}: killed, worker replaced after, ms"
    return {key: f"{state} {1000 * stopped:.0f}, {1000 * replaced:.0f}"}


def concurrent_timeouts(pool: Pool, name: str) -> float | str:
    if name == "loky":
        return "no limits"
    began = time.perf_counter()
    for call in [pool.submit(time.sleep, 1000, limit=1.0) for _ in range(20)]:
        assert call.exception(timeout=100) is not None
    return round(time.perf_counter() - began, 1)


def lost_calls(pool: Pool, function: Callable[..., Any]) -> int:
    pool.submit(tasks.reward, "#### 1", "1").result()
    calls = []
    for i in range(40):
        with contextlib.suppress(Exception):  # a broken executor rejects further calls
            calls.append(pool.submit(function) if i == 20 else pool.submit(time.sleep, 0.02))
    failed = sum(call.exception(timeout=60) is not None for i, call in enumerate(calls) if i != 20)
    pool.close()
    return failed + 40 - len(calls)


def child_state(pool: Pool, hang: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "pid")
        pool.submit(tasks.start_child, file, hang, limit=1.5 if hang else None).exception(timeout=60)
        with open(file) as text:
            pid = int(text.read())
    if not hang:
        pool.close()
    return state_of_processes([pid])


def orphans(name: str) -> str:
    command = [sys.executable, __file__, "--hang-as", name]
    caller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    pids = [int(pid) for pid in caller.stdout.readline().split()]
    caller.kill()
    caller.wait()
    return state_of_processes(pids)


def hang(pool: Pool) -> None:
    """The program that `orphans` kills: a busy pool; prints the pids of its processes."""
    from verl.utils.process_tree import with_descendants

    pool.submit(tasks.reward, "#### 1", "1").result()
    for _ in range(WORKERS):
        pool.submit(tasks.compute_forever)
    time.sleep(1.0)
    sys.stdout.write(" ".join(map(str, with_descendants(os.getpid())[1:])) + "\n")
    sys.stdout.flush()
    time.sleep(1000)


def state_of_processes(pids: list[int]) -> str:
    end = time.monotonic() + EXIT_TIMEOUT_S
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return f"{len(left)} of {len(pids)} alive" if left else "none alive"


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()
