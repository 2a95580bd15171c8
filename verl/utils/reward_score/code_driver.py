"""Runs inside the sandbox: tries a solution on tests, each in a process of its own, and tells what it did.

Self-contained: `code.py` sends this file as the program to run. What a right answer is, is not known here, so there is
nothing to find for a solution that looks around: outputs are compared outside, and an assertion that held is proven by
a token which its process gets when the solution has been loaded.

stdin: blocks of JSON, each behind its length in ten digits: first the solution and how it is run, then one block per
test, and for a test with assertions another with them and their token. stdout: a line of JSON per test, as it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

# What solutions of programming exercises take for granted.
PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, permutations, product
from math import ceil, comb, floor, gcd, inf, sqrt
from typing import *
"""
_LAST_LINES = 3


def main() -> None:
    exec(PRELUDE, {})  # imported once; every test's process has them
    results = os.dup(1)
    job = read_block()
    try:
        solution = compile(job["solution"], "solution.py", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        tell(results, {"status": "syntax", "error": f"{type(error).__name__}: {error}"})
        return
    end = time.monotonic() + job["budget"]
    for _ in range(job["tests"]):
        test = read_block()
        left = end - time.monotonic()
        outcome = {"status": "timeout"} if left <= 0 else run(solution, test, min(job["timeout"], left))
        if left <= 0 and test["kind"] == "assert":
            read_block()
        tell(results, outcome)
        if outcome["status"] != "done" and job["stop_at_failure"]:
            return


def read_block() -> Any:
    return json.loads(read_exactly(int(read_exactly(10))))


def read_exactly(count: int) -> bytes:
    """No byte more: what comes next must not be in the memory of the process that this one forks."""
    found = b""
    while len(found) < count:
        part = os.read(0, count - len(found))
        if not part:
            raise EOFError("the tests end early")
        found += part
    return found


def tell(descriptor: int, outcome: dict[str, Any]) -> None:
    line = memoryview(json.dumps(outcome).encode() + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


def run(solution: Any, test: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One test, in a forked process with its own stdin and stdout."""
    with contextlib.ExitStack() as files:
        given, output, errors, report = (files.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        ours, theirs = map(files.enter_context, socket.socketpair())
        given.write(test.get("stdin", "").encode())
        given.seek(0)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            ours.close()
            os.setpgid(0, 0)
            for file, descriptor in ((given, 0), (output, 1), (errors, 2)):
                os.dup2(file.fileno(), descriptor)
            child(solution, test, theirs, report)
        theirs.close()
        if test["kind"] == "assert":
            hand_over(ours, seconds)
        status = ended(pid, began + seconds)
        outcome = {"status": status, "seconds": round(time.monotonic() - began, 4)}
        if test["kind"] == "stdin":
            outcome["output"] = contents(output, test["most"])
        else:
            outcome["report"] = contents(report, test["most"])
        if status == "error":
            outcome["error"] = "\n".join(contents(errors, 1 << 16).strip().splitlines()[-_LAST_LINES:])
        return outcome


def hand_over(loaded: socket.socket, seconds: float) -> None:
    """The assertions and their token, once the solution is loaded; they are next, whether it is or not."""
    ready = select.select([loaded], [], [], seconds)[0] and loaded.recv(1)
    block = json.dumps(read_block()).encode()
    if ready:
        with contextlib.suppress(OSError):
            loaded.sendall(b"%10d" % len(block) + block)


def ended(pid: int, deadline: float) -> str:
    """How the process ended; one that does not is killed."""
    pause = 0.0005
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        late = not done and time.monotonic() > deadline
        if done or late:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # it may have left others behind
        if late:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "timeout"
        if done:
            return "done" if status == 0 else "error"
        time.sleep(pause)
        pause = min(0.01, 1.5 * pause)


def contents(file: Any, most: int) -> str:
    file.seek(0)
    return file.read(most).decode(errors="replace")


def child(solution: Any, test: dict[str, Any], parent: socket.socket, report: Any) -> NoReturn:
    """A program of its own ends as every program does, threads and exit functions included; a function just ends."""
    alone = test["kind"] == "stdin"
    names: dict[str, Any] = {"__name__": "__main__" if alone else "solution", "__builtins__": __builtins__}
    exec(PRELUDE, names)
    status = 0
    try:
        exec(solution, names)
        if test["kind"] == "call":
            value = function(names, test["name"])(*test["arguments"])
            report.write(json.dumps(value, default=plain).encode())
        elif test["kind"] == "assert":
            parent.sendall(b"L")
            length = parent.recv(10, socket.MSG_WAITALL)
            rest = json.loads(parent.recv(int(length), socket.MSG_WAITALL))
            exec(compile(rest["source"], "test.py", "exec"), names)
            report.write(rest["token"].encode())
        report.flush()
    except BaseException as error:
        if alone and isinstance(error, SystemExit):
            raise
        status = 1
        traceback.print_exc()
    if alone:
        raise SystemExit(status)
    sys.stderr.flush()
    os._exit(status)


def function(names: dict[str, Any], name: str) -> Any:
    """The function of that name, or the method of the class `Solution`."""
    if name in names:
        return names[name]
    return getattr(names["Solution"](), name)


def plain(value: Any) -> Any:
    """What JSON has no word for: sets and other sequences are lists, numbers of other kinds are numbers."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__iter__"):
        return list(value)
    return float(value)


if __name__ == "__main__":
    main()
