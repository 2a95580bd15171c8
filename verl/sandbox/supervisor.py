"""The supervisor of a run: enforces its limits, kills all of its processes, and reports the result.

A run has three processes. The supervisor (this module) creates the namespaces and is invisible to the program. The
init is the first process of the program's process namespace: if it ends, the kernel kills all others in the namespace.
The program is the init's child (`program.py`). A run is one program, or a session whose process executes *cells* of
code one after the other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from verl.sandbox import filesystem, streams
from verl.sandbox.cgroup import RunCgroup
from verl.sandbox.program import FINISHED, MEMORY, STARTED, Confinement, kill_descendants, run_and_exit, run_init
from verl.sandbox.run_files import make_executable, read_inside
from verl.sandbox.streams import Pipes, ProgramOutput
from verl.sandbox.usage import DiskUsage, MemoryUsage, RunProcesses

# Interval of the checks of limits; it becomes longer if a check takes long.
_CHECK_SECONDS = 0.025
_IDLE_CHECK_SECONDS = 0.2  # between two cells of a session
# Time limit for reading output that is still in the pipes of an ended program.
_DRAIN_SECONDS = 0.5
# Time limit for a cell to end after SIGINT.
_INTERRUPT_SECONDS = 1.0
# Processes that the kernel also counts for RLIMIT_NPROC: supervisor and init.
_OWN_PROCESSES = 2


class Cancelled(Exception):
    """The client has closed its connection."""


def supervise(client: socket.socket, confinement: Confinement, cgroup: RunCgroup | None = None) -> None:
    """Serve the one job that arrives on `client`, the client's connection. This process is in the run's namespaces.

    `cgroup`: entered by the init; the supervisor stays outside, so that it survives if the kernel kills the run.
    """
    supervisor_end, init_end = socket.socketpair()
    # The init, in the same mount namespace, mounts its own /proc over the host's: only this descriptor leads there.
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY) if os.path.isdir("/proc/self") else None
    init = os.fork()
    if init == 0:
        supervisor_end.close()
        client.close()
        run_and_exit(lambda: run_init(init_end, confinement, cgroup))
    init_end.close()
    supervisor = SandboxSupervisor(client, supervisor_end, init, RunProcesses(proc), confinement, cgroup)
    try:
        supervisor.serve()
    except (EOFError, ConnectionError, Cancelled):
        pass  # no client to report to
    finally:
        supervisor.kill_run()


class SandboxSupervisor:
    """The state of a run in the supervisor's process."""

    def __init__(
        self,
        client: socket.socket,
        run: socket.socket,
        init: int,
        processes: RunProcesses,
        confinement: Confinement,
        cgroup: RunCgroup | None,
    ) -> None:
        self._client = client
        """Connection to the client."""
        self._run = run
        """Connection to the init and the program process, which reads its job there."""
        self._init: int | None = init
        """Process id of the init; None: the run was killed."""
        self._confinement = confinement
        self._processes = processes
        self._cgroup = cgroup

    def serve(self) -> None:
        """Receive the job of the client, run it, and send the result."""
        _warm_up()
        job, blobs, _ = streams.receive(self._client)
        self._limits = job["limits"]
        self._output = ProgramOutput(self._limits["output_bytes"])
        self._start_accounting()
        if job["session"]:
            self._serve_session()
        else:
            self._serve_run(job, blobs)

    def _start_accounting(self) -> None:
        """Prepare the measurement of memory and disk, and set the limits that the kernel enforces."""
        limits, confinement = self._limits, self._confinement
        self._disk: DiskUsage | None = None
        files_in_memory_mb = 0
        if not confinement.namespaces:
            self._disk = DiskUsage(confinement.folder, limits["file_mb"])
        else:
            files_in_memory_mb = limits["file_mb"]
            if limits["file_mb"] != filesystem.DEFAULT_FILE_MB:
                filesystem.resize_private_folders(limits["file_mb"])
        self._memory = MemoryUsage(self._processes, limits["memory_mb"], confinement.seccomp, confinement.namespaces)
        if self._cgroup is not None:  # its memory limit also covers files in memory
            self._cgroup.limit((limits["memory_mb"] + files_in_memory_mb) << 20, limits["processes"] + 1)

    # -- one program ---------------------------------------------------------------------------------------------

    def _serve_run(self, job: dict[str, Any], blobs: list[bytes]) -> None:
        """Compile the program if necessary, run it, and send the result. `blobs`: stdin and the contents of files."""
        stdin, *files = blobs
        compiled: dict[str, Any] | None = None
        compiler_output: list[bytes] = []
        outcome: dict[str, Any] = {"status": "finished", "return_code": None, "seconds": 0.0}
        output = [b"", b""]
        if job["compile"]:
            compiled, compiler_output = self._run_step(job["compile"], job, files, b"", self._limits["compile_s"])
            outcome["status"] = compiled["status"]
            files = []
        if compiled is None or compiled["return_code"] == 0:
            start = [part.format(memory=self._limits["memory_mb"]) for part in job["start"]]
            if compiled is not None and self._confinement.can_access_user_files:
                make_executable(self._confinement.folder, start[0])  # the filter ignores the chmod of the linker
            outcome, output = self._run_step(start, job, files, stdin, self._limits["wall_s"])
        fetched, truncated = self._fetch(job["fetch"])  # every process that could change a file has ended
        if truncated and outcome["status"] == "finished":
            outcome["status"] = "output"
        header = {**outcome, "compile": compiled, "files": list(fetched)}
        streams.send(self._client, header, [*output, *compiler_output, *fetched.values()])

    def _run_step(
        self, start: Sequence[str], job: dict[str, Any], files: list[bytes], stdin: bytes, wall_s: float
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Run the compiler or the program.

        Returns the outcome (status, return code and seconds) and [stdout, stderr].
        """
        self._output = ProgramOutput(self._limits["output_bytes"])
        start_time = time.monotonic()
        channel, program_end = socket.socketpair()
        with channel, Pipes(stdin, self._output) as pipes:
            self._send_job({"start": start, "script": job["script"]}, job["names"], files, pipes, program_end)
            # A Python program reports its end on the channel. Waiting for its exit takes longer, and is necessary only
            # if files are fetched.
            awaited = [self._run] if start or job["fetch"] else [channel, self._run]
            problem, message = self.wait_for_message(pipes, awaited, start_time + wall_s)
            if message == {"report": b""}:  # the channel was closed without a report: wait for the exit
                problem, message = self.wait_for_message(pipes, [self._run], start_time + wall_s)
            seconds = time.monotonic() - start_time
            if message is not None and "refused" in message:
                refusal = f"this run could not be isolated: {message['refused']}"
                return {"status": "refused", "return_code": None, "seconds": 0.0}, [b"", refusal.encode()]
            code, drain_seconds = -int(signal.SIGKILL), _DRAIN_SECONDS
            if message is None:
                self.kill_run()
            elif "report" in message:
                code, drain_seconds = message["report"][0], 0.0
            else:
                code = message["code"]
            pipes.drain(time.monotonic() + drain_seconds)
        status, note = self._program_status(problem, code)
        outcome = {"status": status, "return_code": code, "seconds": seconds}
        return outcome, [bytes(self._output.stdout), bytes(self._output.stderr) + note]

    def _send_job(
        self, job: dict[str, Any], names: list[str], files: list[bytes], pipes: Pipes, channel: socket.socket
    ) -> None:
        """Send a job to the waiting program process, with its limits and its ends of the pipes and of the channel.

        `names`, `files`: names and contents of its files. `channel`: the program reports its end there with one byte.
        The executed code can write there, too, so only this byte is read.
        """
        limits = {
            "cpu_s": self._limits["cpu_s"],
            "memory_bytes": self._limits["memory_mb"] << 20,
            "file_bytes": self._limits["file_mb"] << 20,
            "processes": self._limits["processes"] + _OWN_PROCESSES + self._other_processes_of_user(),
        }
        header = {**job, "files": names if files else [], "limits": limits}
        with channel, contextlib.suppress(ConnectionError):  # the init has reported the reason already
            streams.send(self._run, header, files, [*pipes.program_ends, channel.fileno()])
        pipes.close_program_ends()

    def _other_processes_of_user(self) -> int:
        """Return the number of processes and threads outside of this run that the kernel counts for RLIMIT_NPROC."""
        if self._confinement.counts_own_processes or self._cgroup is not None:  # a cgroup has its own limit
            return 0
        return self._processes.threads_of_user()

    def _program_status(self, problem: str | None, code: int) -> tuple[str, bytes]:
        """Return the status of a program, and a note to append to its stderr.

        `problem`: why the program was killed, see `wait_for_message`; None: it ended by itself. `code`: its return
        code.
        """
        if problem == "timeout" or code == -signal.SIGXCPU:
            return "timeout", b""
        if problem is not None:
            note = f"\n[sandbox] killed: {problem}\n".encode()
            return ("memory" if problem == self._memory_problem() else "error"), note
        if code:
            last_line = bytes(self._output.stderr[-400:]).rstrip().rpartition(b"\n")[2]
            out_of_memory = last_line.startswith(b"MemoryError") or b"std::bad_alloc" in last_line
            return ("memory" if out_of_memory else "error"), b""
        return ("output" if self._output.truncated else "finished"), b""

    # -- a session -----------------------------------------------------------------------------------------------

    def _serve_session(self) -> None:
        """Run the cells that the client sends, until it disconnects or the session has to be killed."""
        cells, program_end = socket.socketpair()
        cells.settimeout(_INTERRUPT_SECONDS)  # a session that does not read its next cell is broken
        problem: str | None = None
        with Pipes(b"", self._output) as pipes:
            self._send_job({"start": [], "script": None}, [], [], pipes, program_end)
            while self._init is not None and problem is None:
                # Limits hold between cells, too: a cell may have left processes running.
                problem, message = self.wait_for_message(pipes, [self._client, self._run], None)
                if message is not None and "cell" in message:
                    streams.send(self._client, *self._serve_cell(message, cells, pipes))
                elif message is not None and "interrupt" not in message:  # late interrupts are ignored
                    problem = message.get("refused", "the session's process ended between two cells")
            if problem is not None:  # is the result of the next cell
                self.kill_run()
                while "cell" not in streams.receive(self._client)[0]:
                    pass
                streams.send(self._client, *self._cell_result(problem, b"", 0.0))

    def _serve_cell(
        self, cell: dict[str, Any], cells: socket.socket, pipes: Pipes
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Run one cell; return header and output for the client. A cell that does not end in time is interrupted."""
        self._output = pipes.output = ProgramOutput(self._limits["output_bytes"])
        start_time = time.monotonic()
        with contextlib.suppress(OSError):
            streams.send(cells, {}, [cell["cell"].encode(errors="surrogatepass")])
        problem, report = self._wait_for_cell(pipes, cells, start_time + cell["wall_s"])
        seconds = time.monotonic() - start_time
        if not report:
            self.kill_run()
        pipes.drain(time.monotonic() + (0.0 if report else _DRAIN_SECONDS))
        return self._cell_result(problem, report, seconds)

    def _wait_for_cell(self, pipes: Pipes, cells: socket.socket, deadline: float) -> tuple[str | None, bytes]:
        """Wait for the end of a cell; interrupt it at the deadline or when the client requests it. Returns the problem
        and the byte that the cell reported; empty: the session must be killed.

        An interrupt waits for the start of the cell: before it, the program could lose the signal.
        """
        problem: str | None = None
        has_started = False
        while True:
            event, message = self.wait_for_message(pipes, [cells, self._run], deadline)
            if message is not None:
                report = message.get("report", b"")
                if report != STARTED or has_started:
                    return problem, report
                has_started = True
                if problem is not None:
                    self._interrupt()
            elif event in ("timeout", "interrupted") and problem is None:
                problem, deadline = event, time.monotonic() + _INTERRUPT_SECONDS
                if has_started:
                    self._interrupt()
            elif event == "timeout":
                return f"{problem}, and it did not stop", b""
            elif event != "interrupted":
                return event if problem is None else f"{problem}, {event}", b""

    def _cell_result(self, problem: str | None, report: bytes, seconds: float) -> tuple[dict[str, Any], list[bytes]]:
        """Return header and output for the client. `report`: the byte that the cell reported; empty: the session was
        killed."""
        reason = problem or "the session's process ended"
        note = b"" if report else f"\n[sandbox] {reason}; the session is lost\n".encode()
        if problem is not None and "timeout" in problem:
            status = "timeout"
        elif report == MEMORY or (problem is not None and self._memory_problem() in problem):
            status = "memory"
        elif problem is not None or report != FINISHED:
            status = "error"
        else:
            status = "output" if self._output.truncated else "finished"
        code = 0 if status in ("finished", "output") else 1 if report else -signal.SIGKILL
        header = {"status": status, "return_code": code, "seconds": seconds, "compile": None, "files": []}
        output = [bytes(self._output.stdout), bytes(self._output.stderr) + note]
        return {**header, "alive": bool(report)}, output

    def _interrupt(self) -> None:
        """Send SIGINT to the program, as Ctrl-C does."""
        self._processes.signal(self._processes.children(self._init or 0), signal.SIGINT)

    # -- limits --------------------------------------------------------------------------------------------------

    def wait_for_message(
        self, pipes: Pipes, awaited: Sequence[socket.socket], deadline: float | None
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Transfer output and check limits until one of `awaited` has a message.

        Returns (None, message), or (problem, None) if a limit or the deadline is exceeded, the client interrupts, or
        the init has ended. Raises Cancelled if the client has disconnected.

        A message is ignored if the kernel has killed a process because of the memory limit: in cgroup v1 it kills one
        process, and the others may end successfully.
        """
        check_at = time.monotonic() + _CHECK_SECONDS
        while True:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return "timeout", None
            if now >= check_at:
                problem = self._exceeded_limit()
                if problem is not None:
                    return problem, None
                check_at = time.monotonic() + (self._check_interval() if deadline is not None else _IDLE_CHECK_SECONDS)
            timeout = min(check_at, deadline if deadline is not None else check_at) - now
            ready = pipes.transfer([self._client, *awaited], max(timeout, 0.0))
            if ready and self._out_of_memory():
                return self._memory_problem(), None
            for connection in awaited:
                if connection in ready:
                    try:
                        trusted = connection in (self._client, self._run)
                        if not trusted:
                            return None, {"report": connection.recv(1)}
                        return None, streams.receive(connection)[0]
                    except (EOFError, ConnectionError):
                        if connection is self._client:
                            raise Cancelled from None
                        return "the run's init process was killed", None
            if self._client in ready:
                try:
                    streams.receive(self._client)
                except (EOFError, ConnectionError):
                    raise Cancelled from None
                return "interrupted", None

    def _exceeded_limit(self) -> str | None:
        """Return the limit that the run exceeds, of those that the kernel does not enforce itself; None: it exceeds
        none."""
        if self._out_of_memory():
            return self._memory_problem()
        if self._init is None or (self._cgroup is not None and self._disk is None):
            return None
        limits = self._limits
        with self._processes.stopped_if_slow(self._init) as check_time:
            pids = self._descendants()
            if len(pids) > limits["processes"] + 1:
                return f"more than {limits['processes']} processes"
            # Called even with a cgroup: it also finds the deleted files that the disk check needs.
            exceeds_memory = self._memory.exceeds_limit(pids, check_time)
            if exceeds_memory and self._cgroup is None:
                return self._memory_problem()
            if self._disk is not None:
                deleted = self._memory.descriptors.deleted
                if self._disk.exceeds_limit(deleted, self._memory.deleted_mappings, check_time):
                    return f"more than {limits['file_mb']} MB, or too many or too deep files, in its directory"
        return None

    def _out_of_memory(self) -> bool:
        return self._cgroup is not None and self._cgroup.out_of_memory()

    def _memory_problem(self) -> str:
        return f"more than {self._limits['memory_mb']} MB of memory"

    def _check_interval(self) -> float:
        """Seconds until the next check of the limits."""
        if self._cgroup is not None and self._disk is None:
            return _CHECK_SECONDS
        return min(self._memory.pause, self._disk.pause if self._disk is not None else _CHECK_SECONDS)

    def _descendants(self) -> list[int]:
        return self._processes.descendants(self._init) if self._init is not None else []

    # -- end -----------------------------------------------------------------------------------------------------

    def kill_run(self) -> None:
        """Kill the init, and with it its process namespace; without a namespace, all descendants of this process."""
        if self._init is None:
            return
        pids = self._descendants()
        os.kill(self._init, signal.SIGKILL)
        os.waitpid(self._init, 0)
        self._init = None
        if not self._confinement.namespaces:
            self._processes.signal(pids, signal.SIGKILL)
            kill_descendants()

    def _fetch(self, names: list[str]) -> tuple[dict[str, bytes], bool]:
        """Return the contents of regular files in the run's directory, and whether some were truncated."""
        remaining = self._limits["output_bytes"]
        contents: dict[str, bytes] = {}
        truncated = False
        for name in dict.fromkeys(names):
            content = read_inside(self._confinement.folder, name, remaining + 1)
            if content is not None:
                truncated |= len(content) > remaining
                contents[name] = content[:remaining]
                remaining -= len(contents[name])
        return contents, truncated


def _warm_up() -> None:
    """Execute the code of a job once. This process is a fork: the memory pages that the code writes are copied now,
    before the job is timed."""
    sender, receiver = socket.socketpair()
    with sender, receiver, Pipes(b"x", ProgramOutput(1)) as pipes:
        streams.send(sender, {"limits": {"wall_s": 1.0}, "names": [], "compile": None}, [b""])
        pipes.transfer([receiver], 0.0)
        pipes.drain(0.0)
        streams.receive(receiver)
