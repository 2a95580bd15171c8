"""Outside a run, one for each: isolates it, watches time, memory and output, ends all of it, and tells how it went.

Three processes make a run. The keeper (here) holds the namespaces and is out of the program's sight; the init is the
first process of the program's own numbering, so that all others end with it (`init.py`); the program is `program.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import time
from collections.abc import Sequence
from typing import Any

from verl.sandbox import room, wire
from verl.sandbox.cgroup import RunCgroup
from verl.sandbox.disk_usage import DiskUsage
from verl.sandbox.family import Family
from verl.sandbox.init import as_process, be_init, kill_descendants
from verl.sandbox.memory_usage import MemoryUsage
from verl.sandbox.pipes import Output, Pipes
from verl.sandbox.program import FINISHED, MEMORY, Confinement

_LOOK_SECONDS = 0.025
_IDLE_LOOK_SECONDS = 0.2  # of a session between two cells
_LAST_WORDS_SECONDS = 0.5
_INTERRUPT_SECONDS = 1.0
_OWN_PROCESSES = 2  # keeper and init count, too


class Cancelled(Exception):
    """The one who asked is gone, or wants no answer any more."""


def keep(link: socket.socket, confinement: Confinement, cgroup: RunCgroup | None = None) -> None:
    """Serve the one job that comes over `link`; this process has entered its namespaces already.

    `cgroup`: the init enters it; this process stays outside, where it outlives what the kernel kills.
    """
    ours, theirs = socket.socketpair()
    # The init, in the same mount namespace, will hide the host's processes behind its own: only this leads there then.
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY) if os.path.isdir("/proc/self") else None
    init = os.fork()
    if init == 0:
        ours.close()
        link.close()
        as_process(lambda: be_init(theirs, confinement, cgroup))
    theirs.close()
    keeper = _Keeper(link, ours, init, Family(proc), confinement, cgroup)
    try:
        keeper.serve()
    except (EOFError, ConnectionError, Cancelled):
        pass  # nobody to tell
    finally:
        keeper.end_all()


class _Keeper:
    def __init__(
        self,
        link: socket.socket,
        program: socket.socket,
        init: int,
        family: Family,
        confinement: Confinement,
        cgroup: RunCgroup | None,
    ) -> None:
        self._link = link
        self._program = program
        self._init: int | None = init
        self._confinement = confinement
        self._family = family
        self._cgroup = cgroup

    def serve(self) -> None:
        _rehearse()
        job, blobs, _ = wire.receive(self._link)
        self._limits = job["limits"]
        self._output = Output(self._limits["output_bytes"])
        self._start_accounting()
        if job["session"]:
            self._serve_session(job)
        else:
            self._serve_run(job, blobs)

    def _start_accounting(self) -> None:
        limits, confinement = self._limits, self._confinement
        self._disk: DiskUsage | None = None
        in_memory = 0
        if not confinement.namespaces:
            self._disk = DiskUsage(confinement.folder, limits["file_mb"])
        else:
            in_memory = limits["file_mb"]
            if limits["file_mb"] != room.FILE_MB:
                room.resize(limits["file_mb"])
        self._memory = MemoryUsage(self._family, limits["memory_mb"], confinement.seccomp, confinement.namespaces)
        if self._cgroup is not None:  # which counts files in memory, too
            self._cgroup.limit((limits["memory_mb"] + in_memory) << 20, limits["processes"] + 1)

    # -- one program ---------------------------------------------------------------------------------------------

    def _serve_run(self, job: dict[str, Any], blobs: list[bytes]) -> None:
        stdin, *files = blobs
        compiled: dict[str, Any] | None = None
        compiled_streams: list[bytes] = []
        outcome: dict[str, Any]
        outcome, streams = {"status": "finished", "return_code": None, "seconds": 0.0}, [b"", b""]
        if job["compile"]:
            compiled, compiled_streams = self._step(job["compile"], job, files, b"", self._limits["compile_s"])
            outcome["status"] = compiled["status"]
            files = []
        if compiled is None or compiled["return_code"] == 0:
            start = [part.format(memory=self._limits["memory_mb"]) for part in job["start"]]
            if compiled is not None and self._confinement.among_users_files:
                _make_executable(self._confinement.folder, start[0])  # the linker may not
            outcome, streams = self._step(start, job, files, stdin, self._limits["wall_s"])
        fetched, cut = self._fetch(job["fetch"])  # all that could still change a file has ended
        if cut and outcome["status"] == "finished":
            outcome["status"] = "output"
        header = {**outcome, "compile": compiled, "files": list(fetched)}
        wire.send(self._link, header, [*streams, *compiled_streams, *fetched.values()])

    def _step(
        self, start: Sequence[str], job: dict[str, Any], files: list[bytes], stdin: bytes, wall_s: float
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Start a program and follow it to its end: how that was, stdout and stderr."""
        self._output = Output(self._limits["output_bytes"])
        began = time.monotonic()
        channel, theirs = socket.socketpair()
        with channel, Pipes(stdin, self._output) as pipes:
            self._send_job({"start": start, "script": job["script"]}, job["names"], files, pipes, theirs)
            # A Python program says itself that it is through: it need not be waited for if nothing is to be fetched.
            awaited = [self._program] if start or job["fetch"] else [channel, self._program]
            problem, message = self._follow(pipes, awaited, began + wall_s)
            if message == {"how": b""}:  # it did not say so, but ended, or closed what it does not know
                problem, message = self._follow(pipes, [self._program], began + wall_s)
            seconds = time.monotonic() - began
            if message is not None and "refused" in message:
                refusal = f"this run could not be isolated: {message['refused']}"
                return {"status": "refused", "return_code": None, "seconds": 0.0}, [b"", refusal.encode()]
            code, patience = -int(signal.SIGKILL), _LAST_WORDS_SECONDS
            if message is None:
                self.end_all()
            elif "how" in message:
                code, patience = message["how"][0], 0.0
            else:
                code = message["code"]
            pipes.drain(time.monotonic() + patience)
        status, words = self._verdict(problem, code)
        outcome = {"status": status, "return_code": code, "seconds": seconds}
        return outcome, [bytes(self._output.stdout), bytes(self._output.stderr) + words]

    def _send_job(
        self, job: dict[str, Any], names: list[str], files: list[bytes], pipes: Pipes, channel: socket.socket
    ) -> None:
        """`channel`: over which the program says how it went; its own code can, too, so only letters are believed."""
        limits = {
            "cpu_s": self._limits["cpu_s"],
            "memory_bytes": self._limits["memory_mb"] << 20,
            "file_bytes": self._limits["file_mb"] << 20,
            "processes": self._limits["processes"] + _OWN_PROCESSES + self._others_of_user(),
        }
        header = {**job, "files": names if files else [], "limits": limits}
        with channel, contextlib.suppress(ConnectionError):  # what is wrong has been said already
            wire.send(self._program, header, files, [*pipes.theirs, channel.fileno()])
        pipes.close_theirs()

    def _others_of_user(self) -> int:
        """Processes and threads that the kernel counts against the program's limit though they are not its own."""
        if self._confinement.own_user or self._cgroup is not None:  # whose own limit counts this run only
            return 0
        return self._family.threads_of_user()

    def _verdict(self, problem: str | None, code: int) -> tuple[str, bytes]:
        """The status, and what is added to stderr."""
        if problem is None and code and self._out_of_memory():
            problem = self._memory_problem()
        if problem == "timeout" or code == -signal.SIGXCPU:
            return "timeout", b""
        if problem is not None:
            return ("memory" if "memory" in problem else "error"), f"\n[sandbox] killed: {problem}\n".encode()
        if code:
            last = bytes(self._output.stderr[-400:]).rstrip().rpartition(b"\n")[2]
            out_of_memory = last.startswith(b"MemoryError") or b"std::bad_alloc" in last
            return ("memory" if out_of_memory else "error"), b""
        return ("output" if self._output.cut else "finished"), b""

    # -- a session -----------------------------------------------------------------------------------------------

    def _serve_session(self, job: dict[str, Any]) -> None:
        cells, theirs = socket.socketpair()
        cells.settimeout(_INTERRUPT_SECONDS)  # one that does not take its next cell is broken
        problem: str | None = None
        with Pipes(b"", self._output) as pipes:
            self._send_job({"start": [], "script": None}, [], [], pipes, theirs)
            while self._init is not None and problem is None:
                # Between cells, too: what a cell left running is watched.
                problem, message = self._follow(pipes, [self._link, self._program], None)
                if message is not None and "cell" in message:
                    wire.send(self._link, *self._serve_cell(message, cells, pipes))
                elif message is not None and "interrupt" not in message:  # that came too late, for a cell that is over
                    problem = message.get("refused", "it ended between two cells")
            if problem is not None:
                self.end_all()
                while "cell" not in wire.receive(self._link)[0]:
                    pass
                wire.send(self._link, *self._cell_result(problem, b"", 0.0))

    def _serve_cell(
        self, cell: dict[str, Any], cells: socket.socket, pipes: Pipes
    ) -> tuple[dict[str, Any], list[bytes]]:
        self._output = pipes.output = Output(self._limits["output_bytes"])
        began = time.monotonic()
        with contextlib.suppress(OSError):
            wire.send(cells, {}, [cell["cell"].encode(errors="surrogatepass")])
        awaited = [cells, self._program]
        problem, message = self._follow(pipes, awaited, began + cell["wall_s"])
        if problem in ("timeout", "interrupted"):
            self._interrupt()
            again, message = self._follow(pipes, awaited, time.monotonic() + _INTERRUPT_SECONDS)
            problem = problem if again is None else f"{problem}, and it did not stop"
        seconds = time.monotonic() - began
        how = message["how"] if message is not None and "how" in message else b""
        if not how:
            self.end_all()
        pipes.drain(time.monotonic() + (0.0 if how else _LAST_WORDS_SECONDS))
        return self._cell_result(problem, how, seconds)

    def _cell_result(self, problem: str | None, how: bytes, seconds: float) -> tuple[dict[str, Any], list[bytes]]:
        """`how`: the letter of a cell after which the session goes on."""
        words = b"" if how else f"\n[sandbox] {problem or 'its process ended'}; the session is lost\n".encode()
        if problem is not None and "timeout" in problem:
            status = "timeout"
        elif how == MEMORY or (problem is not None and "memory" in problem):
            status = "memory"
        elif problem is not None or how != FINISHED:
            status = "error"
        else:
            status = "output" if self._output.cut else "finished"
        code = 0 if status in ("finished", "output") else 1 if how else -signal.SIGKILL
        header = {"status": status, "return_code": code, "seconds": seconds, "compile": None, "files": []}
        streams = [bytes(self._output.stdout), bytes(self._output.stderr) + words]
        return {**header, "alive": bool(how)}, streams

    def _interrupt(self) -> None:
        """As Ctrl-C would."""
        for child in self._family.children(self._init or 0):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGINT)

    # -- watching ------------------------------------------------------------------------------------------------

    def _follow(
        self, pipes: Pipes, awaited: Sequence[socket.socket], deadline: float | None
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Carry data until one of `awaited` says something: (None, that), or (what is wrong, None)."""
        look_at = time.monotonic() + _LOOK_SECONDS
        while True:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return "timeout", None
            if now >= look_at:
                problem = self._problem()
                if problem is not None:
                    return problem, None
                look_at = time.monotonic() + (self._pause() if deadline is not None else _IDLE_LOOK_SECONDS)
            patience = min(look_at, deadline if deadline is not None else look_at) - now
            ready = pipes.carry([self._link, *awaited], max(patience, 0.0))
            for link in awaited:
                if link in ready:
                    try:
                        trusted = link in (self._link, self._program)
                        return None, wire.receive(link)[0] if trusted else {"how": link.recv(1)}
                    except (EOFError, ConnectionError):
                        if link is self._link:
                            raise Cancelled from None
                        return self._memory_problem() if self._out_of_memory() else "its init was killed", None
            if self._link in ready:
                try:
                    wire.receive(self._link)
                except (EOFError, ConnectionError):
                    raise Cancelled from None
                return "interrupted", None

    def _problem(self) -> str | None:
        """The limit that the run exceeds, of those that no system call enforces."""
        if self._out_of_memory():
            return self._memory_problem()
        if self._init is None or (self._cgroup is not None and self._disk is None):
            return None
        limits = self._limits
        with self._family.stopped_if_slow(self._init) as check_time:
            members = self._members()
            if len(members) > limits["processes"] + 1:
                return f"more than {limits['processes']} processes"
            over = self._memory.over(members, check_time)
            if over and self._cgroup is None:
                return self._memory_problem()
            if self._disk is not None:
                files = self._memory.descriptors.deleted
                if self._disk.over(files, self._memory.deleted_mappings, check_time):
                    return f"more than {limits['file_mb']} MB, or too many or too deep files, in its directory"
        return None

    def _out_of_memory(self) -> bool:
        return self._cgroup is not None and self._cgroup.out_of_memory()

    def _memory_problem(self) -> str:
        return f"more than {self._limits['memory_mb']} MB of memory"

    def _pause(self) -> float:
        """Seconds until the next look."""
        if self._cgroup is not None and self._disk is None:
            return _LOOK_SECONDS
        return min(self._memory.pause, self._disk.pause if self._disk is not None else _LOOK_SECONDS)

    def _members(self) -> list[int]:
        return self._family.members(self._init) if self._init is not None else []

    # -- the end -------------------------------------------------------------------------------------------------

    def end_all(self) -> None:
        """Kill the init, with which all of its namespace ends; where there is none, all that descends from here."""
        if self._init is None:
            return
        members = self._members()
        os.kill(self._init, signal.SIGKILL)
        os.waitpid(self._init, 0)
        self._init = None
        if not self._confinement.namespaces:
            for member in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member, signal.SIGKILL)
            kill_descendants()

    def _fetch(self, names: list[str]) -> tuple[dict[str, bytes], bool]:
        """Plain files of the run's directory; whether some had to be cut."""
        left = self._limits["output_bytes"]
        found: dict[str, bytes] = {}
        cut = False
        for name in dict.fromkeys(names):
            content = _read_inside(self._confinement.folder, name, left + 1)
            if content is not None:
                cut |= len(content) > left
                found[name] = content[:left]
                left -= len(found[name])
        return found, cut


def _rehearse() -> None:
    """As the program does."""
    ours, theirs = socket.socketpair()
    with ours, theirs, Pipes(b"x", Output(1)) as pipes:
        wire.send(ours, {"limits": {"wall_s": 1.0}, "names": [], "compile": None}, [b""])
        pipes.carry([theirs], 0.0)
        pipes.drain(0.0)
        wire.receive(theirs)


def _read_inside(folder: str, name: str, most: int) -> bytes | None:
    """Up to `most` bytes; None: not there, not a plain file, or behind a link."""
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # a program may remove its directory
        return None
    try:
        *folders, last = os.path.normpath(name).split("/")
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inner
        file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
        with open(file, "rb") as content:
            return content.read(most) if stat.S_ISREG(os.fstat(file).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(place)


def _make_executable(folder: str, name: str) -> None:
    """A plain file of the folder, if it is there."""
    with contextlib.suppress(OSError):
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            file = os.open(os.path.basename(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
            try:
                found = os.fstat(file)
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:  # no other file's second name
                    os.fchmod(file, 0o700)
            finally:
                os.close(file)
        finally:
            os.close(place)
