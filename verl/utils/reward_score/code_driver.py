"""Runs inside the sandbox: executes a solution on tests, each in a process of its own, and reports the outcomes.

Expected outputs are not known here. Statements to execute (assertions) are: they are read and executed by a judge
process, one per test, while the solution runs in a candidate process that shares only a channel for plain data with it.
This process forks both and never reads a judge's test, so no candidate has any of it in its memory.

stdin: blocks of JSON, each behind its length in ten digits: first the solution and how it is run, then one block per
test. stdout: a line of JSON per test. `code_bundle` sends this file with the modules that it imports.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, NoReturn

from verl.utils.reward_score.code_candidate import defines, serve_candidate
from verl.utils.reward_score.code_isolation import can_read, confine, keep_descriptors, kill_all, protect
from verl.utils.reward_score.code_judge import Judge, execute_test

# Names that solutions of programming exercises use without importing them.
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
_MAX_VERDICT = 1 << 16
_prelude: dict[str, Any] = {}
Outcome = dict[str, Any]


def main() -> None:
    exec(PRELUDE, _prelude)  # imported once, inherited by every test's process
    job = read_block()
    try:
        solution = compile(job["solution"], "solution.py", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        write_line({"status": "syntax", "error": f"{type(error).__name__}: {error}"})
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    protect()
    gc.freeze()
    judge_path = installed_path()
    end = time.monotonic() + job["budget"]
    for kind in job["kinds"]:
        left = min(job["timeout"], end - time.monotonic())
        if left <= 0:
            write_line({"status": "timeout"})
            continue
        with fresh_folder():
            if kind == "judged":
                outcome = run_judged(solution, judge_path, left)
            else:
                outcome = run_alone(solution, read_block(), left)
        write_line(outcome)
        if outcome["status"] != "done" and job["stop_at_failure"]:
            return


@contextlib.contextmanager
def fresh_folder() -> Iterator[None]:
    """A working directory of one test: the next one finds no files of it."""
    before = os.getcwd()
    folder = tempfile.mkdtemp(dir=before)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def read_block() -> Any:
    return json.loads(read_exactly(int(read_exactly(10))))


def read_exactly(count: int) -> bytes:
    """Read no byte more: the next block must not be in the memory of a process that this one forks."""
    received = b""
    while len(received) < count:
        part = os.read(0, count - len(received))
        if not part:
            raise EOFError("the tests end early")
        received += part
    return received


def write_line(outcome: Outcome) -> None:
    line = memoryview(json.dumps(outcome).encode() + b"\n")
    while line:
        line = line[os.write(1, line) :]


def fork(action: Callable[[], None]) -> int:
    """The process number of a fork that runs `action` and ends without exit functions."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException:  # noqa: BLE001 - this process ends here; the reason is on its stderr
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


# ---------------------------------------------------------------- a judge and a candidate


def run_judged(solution: CodeType, path: list[str], seconds: float) -> Outcome:
    """One test: the judge reads it from stdin and reports the verdict over a pipe of its own."""
    deadline = time.monotonic() + seconds
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    judge = fork(lambda: be_judge(ours.fileno(), writing, path, solution, deadline))
    os.close(writing)
    driver = os.getpid()
    candidate = fork(lambda: be_candidate(theirs.fileno(), [driver, judge], solution, seconds))
    ours.close()
    theirs.close()
    try:
        verdict = read_verdict(reading, deadline)
    finally:
        os.close(reading)
        kill_all([judge, candidate])
    return verdict


def read_verdict(reading: int, deadline: float) -> Outcome:
    received = b""
    while (left := deadline - time.monotonic()) > 0 and len(received) < _MAX_VERDICT:
        if not select.select([reading], [], [], left)[0]:
            break
        part = os.read(reading, _MAX_VERDICT)
        if not part:
            break
        received += part
    if time.monotonic() > deadline:  # also for a verdict that arrived while this process was stopped
        return {"status": "timeout"}
    if not received.endswith(b"\n"):
        return {"status": "error", "error": "the judge ended without a verdict"}
    verdict: Outcome = json.loads(received)
    return verdict


def installed_path() -> list[str]:
    """Where a judge imports from: not from the working directory, where a candidate can write modules."""
    here = os.path.realpath(os.curdir)
    return [path for path in sys.path if path and os.path.realpath(path) != here]


def be_judge(channel: int, writing: int, path: list[str], solution: CodeType, deadline: float) -> None:
    block = read_block()
    keep_descriptors([channel, writing])
    sys.path[:] = path
    protected = False

    def report(outcome: Outcome) -> NoReturn:
        os.write(writing, json.dumps({**outcome, "protected": protected}).encode()[: _MAX_VERDICT - 1] + b"\n")
        os._exit(0)

    def not_plain() -> NoReturn:
        """Execute the test beside the solution. `protected` says so: its score is labelled as forgeable."""
        nonlocal protected
        protected = False
        report(run_alone(solution, {"kind": "assert", "most": 64}, deadline - time.monotonic(), block))

    judge = Judge(channel, lambda reason: report({"status": "error", "error": reason[:1000]}), not_plain)
    protected = judge.hello()
    try:
        execute_test(judge, block, _prelude)
    except BaseException as error:  # noqa: BLE001 - whatever a test raises, it has failed
        lines = traceback.format_exception_only(type(error), error)
        report({"status": "error", "error": f"{type(error).__name__}: " + lines[-1][:1000]})
    report({"status": "done", "report": block["token"]})


def be_candidate(channel: int, judges: list[int], solution: CodeType, seconds: float) -> None:
    keep_descriptors([channel])
    confine(seconds)
    names = fresh_names("solution")
    serve_candidate(channel, not can_read(judges), solution, names)


def fresh_names(name: str) -> dict[str, Any]:
    """The names of a module that classes of the solution find under `sys.modules`, as dataclasses have to."""
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(_prelude)
    return module.__dict__


# ---------------------------------------------------------------- a candidate alone


def run_alone(
    solution: CodeType, test: dict[str, Any], seconds: float, statements: dict[str, Any] | None = None
) -> Outcome:
    """A whole program, one call, or statements that have to share an interpreter with the solution."""
    with contextlib.ExitStack() as files:
        stdin, output, errors, report = (files.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        ours, theirs = map(files.enter_context, socket.socketpair())
        stdin.write(test.get("stdin", "").encode())
        stdin.seek(0)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            inherited = files.pop_all()  # closed below, not by this stack when the program ends
            for file, descriptor in ((stdin, 0), (output, 1), (errors, 2)):
                os.dup2(file.fileno(), descriptor)
            keep_descriptors([0, 1, 2, theirs.fileno(), report.fileno()])
            confine(seconds)
            child(solution, test, theirs, report, inherited)
        theirs.close()
        if test["kind"] == "assert":
            send_statements(ours, seconds, statements)
        status = wait(pid, began + seconds)
        kill_all([pid])
        outcome = {"status": status}
        if test["kind"] == "stdin":
            outcome["output"] = contents(output, test["most"])
        else:
            outcome["report"] = contents(report, test["most"])
        if status == "error":
            outcome["error"] = "\n".join(contents(errors, 1 << 16).strip().splitlines()[-_LAST_LINES:])
        return outcome


def send_statements(loaded: socket.socket, seconds: float, statements: dict[str, Any] | None) -> None:
    """Send the statements and their token once the solution is loaded; the block has to be read in any case."""
    ready = select.select([loaded], [], [], seconds)[0] and loaded.recv(1)
    block = json.dumps(statements or read_block()).encode()
    if ready:
        with contextlib.suppress(OSError):
            loaded.sendall(b"%10d" % len(block) + block)


def wait(pid: int, deadline: float) -> str:
    pause = 0.0005
    while time.monotonic() <= deadline:
        # The process stays a zombie, so that its number cannot belong to another one when it is killed.
        done = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if done is not None:
            return "done" if done.si_code == os.CLD_EXITED and done.si_status == 0 else "error"
        time.sleep(pause)
        pause = min(0.01, 1.5 * pause)
    return "timeout"


def contents(file: Any, most: int) -> str:
    file.seek(0)
    return str(file.read(most).decode(errors="replace"))


def child(solution: CodeType, test: dict[str, Any], parent: socket.socket, report: Any, _: object) -> NoReturn:
    """A program ends as every program does, threads and exit functions included; a function ends at once."""
    alone = test["kind"] == "stdin"
    names = fresh_names("__main__" if alone else "solution")
    before = dict(names)
    status = 0
    try:
        exec(solution, names)
        if test["kind"] == "call":
            if test["name"] in names and not defines(solution, names, before, test["name"]):
                del names[test["name"]]
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
    """Types that JSON does not have: sets and other sequences become lists, other numbers floats."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__iter__"):
        return list(value)
    return float(value)
