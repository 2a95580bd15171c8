"""Runs inside the sandbox: executes a solution on tests, each in a process of its own, and reports the outcomes.

The driver receives no expected outputs, only the statements of assertion tests. A checker process reads and executes
these statements, while the solution runs in a candidate process, one per test, that shares only a channel for plain
data with the checker. This process forks both. It reads no statements of checked tests before the last candidate is
forked, so no candidate inherits any.

stdin: blocks of JSON, each preceded by its length in ten digits: first the solution and how it is run, then the blocks
of each test (`Test.blocks`). stdout: a line of JSON per test. `reward_score/code.py` combines this file with the
modules that it imports.
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

from verl.utils.reward_score.code_tests.candidate import defines, serve_candidate
from verl.utils.reward_score.code_tests.checker import CheckerSession, execute_test
from verl.utils.reward_score.code_tests.isolation import can_read, confine, keep_descriptors, kill_all, protect

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
_READ_SIZE = 1 << 16
_prelude: dict[str, Any] = {}
exec(PRELUDE, _prelude)  # at import: the process of every test inherits it
Outcome = dict[str, Any]


class InputLate(Exception):
    """A block of stdin was not there in time."""


def main() -> None:
    job = read_block()
    try:
        solution = compile(job["solution"], "solution.py", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        write_line({"status": "syntax", "error": f"{type(error).__name__}: {error}"})
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    protect()
    gc.freeze()
    checked_tests = CheckedTests(solution)
    end = time.monotonic() + job["budget"]
    for number, kind in enumerate(job["kinds"], 1):
        if time.monotonic() >= end:
            write_line({"status": "timeout"})
            continue
        with fresh_folder():
            try:
                if kind == "checked":
                    outcome = checked_tests.run(job["timeout"], end, last=number == len(job["kinds"]))
                else:
                    outcome = run_unchecked(solution, job["timeout"], end)
            except InputLate:  # the budget is over, or the time of the last test: no later block is read
                outcome = {"status": "timeout"}
        write_line(outcome)
        if outcome["status"] != "done" and job["stop_at_failure"]:
            return


@contextlib.contextmanager
def fresh_folder() -> Iterator[None]:
    """Run a test in a new working directory and delete it, so that the next test finds no files of this one."""
    before = os.getcwd()
    folder = tempfile.mkdtemp(dir=before)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def read_block(source: int = 0, end: float | None = None) -> Any:
    """Read the next block; raise InputLate if it is not complete at `end`."""
    return json.loads(read_exactly(source, int(read_exactly(source, 10, end)), end))


def await_input(source: int, end: float) -> None:
    """Wait until `source` has data, without reading it; raise InputLate at `end`."""
    while (seconds := end - time.monotonic()) > 0:
        if select.select([source], [], [], seconds)[0]:
            return
    raise InputLate


def read_exactly(source: int, count: int, end: float | None) -> bytes:
    """Read exactly `count` bytes: the next block must not be in the memory of a process that this one forks."""
    received = b""
    while len(received) < count:
        if end is not None:
            await_input(source, end)
        part = os.read(source, count - len(received))
        if not part:
            raise EOFError("the tests end early")
        received += part
    return received


def write_line(outcome: Outcome, target: int = 1) -> None:
    line = memoryview(json.dumps(outcome).encode() + b"\n")
    while line:
        line = line[os.write(target, line) :]


def fork(action: Callable[[], None]) -> int:
    """Fork a process that runs `action` and ends without exit handlers; return its pid."""
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


# ---------------------------------------------------------------- a checker and a candidate


class CheckedTests:
    """Runs tests of the kind "checked": a candidate process per test, and one checker process for all of them.

    A checker that does not finish a test is replaced. If no checker is running before the last test, this process
    executes that test itself.
    """

    def __init__(self, solution: CodeType) -> None:
        self._solution = solution
        self._path = installed_path()
        self._checker: int | None = None
        self._control: socket.socket  # sends tests to the checker, receives verdicts

    def run(self, timeout: float, end: float, last: bool) -> Outcome:
        """Run the next test in the working directory, for `timeout` seconds and until `end` at most. `last`: no other
        test follows."""
        if self._checker is None and last:
            await_input(0, end)
        elif not self._await_statements(end):
            return {"status": "timeout"}
        deadline = min(time.monotonic() + timeout, end)
        seconds = max(0.0, deadline - time.monotonic())
        ours, theirs = socket.socketpair()
        checker_pids = [os.getpid()] if self._checker is None else [os.getpid(), self._checker]
        candidate = fork(lambda: run_candidate(theirs.fileno(), checker_pids, self._solution, seconds))
        theirs.close()
        with ours:
            if self._checker is None:
                return execute_in_this_process(ours.fileno(), candidate, self._path, self._solution, deadline)
            with contextlib.suppress(OSError):  # the checker was killed: `read_verdict` finds no verdict
                request = json.dumps([os.getcwd(), deadline]).encode()
                socket.send_fds(self._control, [request], [ours.fileno()])
        verdict = read_verdict(self._control.fileno(), deadline)
        if verdict["status"] == "timeout" or verdict.pop("checker_ended", False):
            self._end_checker(candidate)
        else:
            kill_all([candidate], spared=[self._checker])
        return verdict

    def _start_checker(self) -> None:
        self._control, theirs = socket.socketpair()
        self._checker = fork(lambda: run_checker(theirs, self._path, self._solution))
        theirs.close()

    def _end_checker(self, *others: int) -> None:
        """Kill the checker and `others`."""
        assert self._checker is not None
        kill_all([*others, self._checker])
        self._control.close()
        self._checker = None

    def _await_statements(self, end: float) -> bool:
        """Let the checker read the next block, which may arrive late: outside of the test's time limit. A checker that
        was killed is replaced once: a block that none reads would be taken for that of the next test.

        False: it has not read the block at `end`.
        """
        for _ in range(2):
            if self._checker is None:
                self._start_checker()
            has_read = self._reads_statements(end)
            if not has_read:
                self._end_checker()
            if has_read or time.monotonic() >= end:
                return has_read
        raise RuntimeError("the statements of a test could not be read by two checker processes")

    def _reads_statements(self, end: float) -> bool:
        try:
            self._control.sendall(b"\n")
            answered = select.select([self._control], [], [], max(0.0, end - time.monotonic()))[0]
            return bool(answered) and self._control.recv(1) == b"\n"
        except OSError:  # the checker was killed
            return False


def read_verdict(control: int, deadline: float) -> Outcome:
    received = b""
    while not received.endswith(b"\n"):
        timeout = deadline - time.monotonic()
        chunk = os.read(control, _READ_SIZE) if timeout > 0 and select.select([control], [], [], timeout)[0] else b""
        if not chunk:
            break
        received += chunk
    if time.monotonic() > deadline:  # also for a verdict that arrived while this process was stopped
        return {"status": "timeout"}
    if not received.endswith(b"\n"):
        return {"status": "error", "error": "the checker ended without a verdict", "checker_ended": True}
    verdict: Outcome = json.loads(received)
    return verdict


def installed_path() -> list[str]:
    """Return the import path of a checker: without the working directory, where a candidate can write modules."""
    working_directory = os.path.realpath(os.curdir)
    return [path for path in sys.path if path and os.path.realpath(path) != working_directory]


def run_checker(control: socket.socket, path: list[str], solution: CodeType) -> None:
    """For every byte received over `control`, read the statements of a test from stdin and confirm that with a byte;
    then execute the test with the channel that is received."""
    blocks = os.dup(0)
    keep_descriptors([control.fileno(), blocks])
    sys.path[:] = path

    def report(outcome: Outcome) -> None:
        control.sendall(json.dumps(outcome).encode() + b"\n")

    while control.recv(1):
        test = read_block(blocks)
        control.sendall(b"\n")
        request, channels, _, _ = socket.recv_fds(control, _READ_SIZE, 1)
        if not request:
            return
        folder, deadline = json.loads(request)
        os.chdir(folder)
        report(execute_checked_test(channels[0], test, solution, deadline, report))
        os.close(channels[0])


def execute_in_this_process(
    channel: int, candidate: int, path: list[str], solution: CodeType, deadline: float
) -> Outcome:
    """Execute the last test in this process, without a checker process."""
    try:
        block = read_block(end=deadline)
    except InputLate:
        kill_all([candidate])
        raise
    results = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    sys.path[:] = path

    def report(outcome: Outcome) -> None:
        kill_all([candidate])
        outcome.pop("checker_ended", None)
        write_line(outcome if time.monotonic() <= deadline else {"status": "timeout"}, results)

    def on_deadline(*_: object) -> NoReturn:
        report({"status": "timeout"})
        os._exit(0)

    signal.signal(signal.SIGALRM, on_deadline)
    signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), 1e-6))
    outcome = execute_checked_test(channel, block, solution, deadline, report)
    signal.setitimer(signal.ITIMER_REAL, 0)
    kill_all([candidate])
    os.dup2(results, 1)
    return outcome if time.monotonic() <= deadline else {"status": "timeout"}


def execute_checked_test(
    channel: int, test: dict[str, Any], solution: CodeType, deadline: float, report: Callable[[Outcome], None]
) -> Outcome:
    """Execute one test. A candidate that breaks the protocol ends this process after `report`."""
    protected = False

    def end(outcome: Outcome) -> NoReturn:
        report({**outcome, "protected": protected, "checker_ended": True})
        os._exit(0)

    def not_plain() -> NoReturn:
        """Execute the test in the solution's process; `protected` is False, so its score is labelled as forgeable."""
        nonlocal protected
        protected = False
        end(run_alone(solution, {"kind": "assert", "max_bytes": 64}, deadline - time.monotonic(), deadline, test))

    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - the test may replace and close it
    session = CheckerSession(channel, lambda reason: end({"status": "error", "error": reason[:1000]}), not_plain)
    protected = session.hello()
    try:
        execute_test(session, test, _prelude)
    except BaseException as error:  # noqa: BLE001 - whatever a test raises, it has failed
        lines = traceback.format_exception_only(type(error), error)
        outcome = {"status": "error", "error": f"{type(error).__name__}: " + lines[-1][:1000]}
    else:
        outcome = {"status": "done", "report": test["token"]}
    return {**outcome, "protected": protected}


def run_candidate(channel: int, checker_pids: list[int], solution: CodeType, seconds: float) -> None:
    keep_descriptors([channel])
    confine(seconds)
    names = fresh_names("solution")
    serve_candidate(channel, not can_read(checker_pids), solution, names)


def fresh_names(name: str) -> dict[str, Any]:
    """Create a module in `sys.modules`, where dataclasses look up the module of their class; return its names."""
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(_prelude)
    return module.__dict__


# ---------------------------------------------------------------- a candidate alone


def run_unchecked(solution: CodeType, timeout: float, end: float) -> Outcome:
    """Run the next test, for `timeout` seconds and until `end` at most. The wait for the start of its blocks does not
    count."""
    test = read_block(end=end)
    if test["kind"] == "assert":
        await_input(0, end)  # the statements
    return run_alone(solution, test, min(timeout, end - time.monotonic()), end)


def run_alone(
    solution: CodeType, test: dict[str, Any], seconds: float, end: float, statements: dict[str, Any] | None = None
) -> Outcome:
    """Run a program, one call, or statements that share an interpreter with the solution; return the outcome.

    `end`: when the statements must have been read, if they are the next block.
    """
    seconds = max(0.0, seconds)
    with contextlib.ExitStack() as files:
        stdin, output, errors, report = (files.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        ours, theirs = map(files.enter_context, socket.socketpair())
        stdin.write(test.get("stdin", "").encode())
        stdin.seek(0)
        start = time.monotonic()
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
            try:
                send_statements(ours, seconds, end, statements)
            except InputLate:
                kill_all([pid])
                raise
        status = wait(pid, start + seconds)
        kill_all([pid])
        outcome = {"status": status}
        if test["kind"] == "stdin":
            outcome["output"] = read_text(output, test["max_bytes"])
        else:
            outcome["report"] = read_text(report, test["max_bytes"])
        if status == "error":
            outcome["error"] = "\n".join(read_text(errors, 1 << 16).strip().splitlines()[-_LAST_LINES:])
        return outcome


def send_statements(loaded: socket.socket, seconds: float, end: float, statements: dict[str, Any] | None) -> None:
    """Send the statements and their token once the solution is loaded.

    None: they are the next block of stdin, which is read even if the solution is not loaded in time; until `end`.
    """
    ready = select.select([loaded], [], [], seconds)[0] and loaded.recv(1)
    block = json.dumps(statements or read_block(end=end)).encode()
    if ready:
        with contextlib.suppress(OSError):
            loaded.sendall(b"%10d" % len(block) + block)


def wait(pid: int, deadline: float) -> str:
    pause = 0.0005
    while time.monotonic() <= deadline:
        # WNOWAIT: the process stays a zombie, so that its pid cannot belong to another process when it is killed.
        done = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if done is not None:
            return "done" if done.si_code == os.CLD_EXITED and done.si_status == 0 else "error"
        time.sleep(pause)
        pause = min(0.01, 1.5 * pause)
    return "timeout"


def read_text(file: Any, max_bytes: int) -> str:
    file.seek(0)
    return str(file.read(max_bytes).decode(errors="replace"))


def child(solution: CodeType, test: dict[str, Any], parent: socket.socket, report: Any, _: object) -> NoReturn:
    """Execute one test and end this process: after a program normally (threads, exit handlers), otherwise at once."""
    is_program = test["kind"] == "stdin"
    names = fresh_names("__main__" if is_program else "solution")
    before = dict(names)
    status = 0
    try:
        exec(solution, names)
        if test["kind"] == "call":
            if test["name"] in names and not defines(solution, names, before, test["name"]):
                del names[test["name"]]
            value = find_function(names, test["name"])(*test["arguments"])
            report.write(json.dumps(value, default=to_json_value).encode())
        elif test["kind"] == "assert":
            parent.sendall(b"L")
            length = parent.recv(10, socket.MSG_WAITALL)
            statements = json.loads(parent.recv(int(length), socket.MSG_WAITALL))
            exec(compile(statements["source"], "test.py", "exec"), names)
            report.write(statements["token"].encode())
        report.flush()
    except BaseException as error:
        if is_program and isinstance(error, SystemExit):
            raise
        status = 1
        traceback.print_exc()
    if is_program:
        raise SystemExit(status)
    sys.stderr.flush()
    os._exit(status)


def find_function(names: dict[str, Any], name: str) -> Any:
    """The function of that name, or the method of the class `Solution`."""
    if name in names:
        return names[name]
    return getattr(names["Solution"](), name)


def to_json_value(value: Any) -> Any:
    """Convert types that JSON does not have: sets and other iterables to lists, other numbers to floats."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__iter__"):
        return list(value)
    return float(value)
