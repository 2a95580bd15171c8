"""Python stacks of the threads of this process, and of other local processes, even of one that holds the GIL.

After `enable_stack_dumps`, `faulthandler` writes the stacks of all threads into an in-memory file when a real-time
signal arrives, without the interpreter. `stacks_of` sends the signal and reads the file through /proc.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import sys
import sysconfig
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_FILE = "verl-stacks"
_MAX_FRAMES = 60
_PACKAGE = str(Path(__file__).parents[1])
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_dump_file: int | None = None


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str
    origin: str = "installed"
    """user, verl (this package) or installed."""

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


Stack = tuple[Frame, ...]
"""Innermost first."""


def own_stacks(thread: int | None = None) -> dict[int, Stack]:
    """Stacks of the threads of this process by thread identity; with `thread`, only of that one."""
    return {number: _walk(frame) for number, frame in sys._current_frames().items() if thread in (None, number)}


def enable_stack_dumps() -> None:
    """Let processes of this user read the stacks with `stacks_of`. No effect where the system does not support it."""
    global _dump_file
    number = _signal()
    if _dump_file is None and number is not None and hasattr(os, "memfd_create"):
        _dump_file = os.memfd_create(_FILE, os.MFD_CLOEXEC)
        faulthandler.register(number, file=_dump_file, all_threads=True, chain=False)


def stacks_of(pid: int, timeout: float = 2.0) -> dict[int, Stack]:
    """Stacks of the threads of a process by thread identity; empty if it has no dump file or does not respond."""
    file = _find_dump_file(pid)
    if file is None or not _catches(pid):
        return {}
    try:
        with open(file, "rb") as dump:
            before = dump.seek(0, os.SEEK_END)
            os.kill(pid, _signal() or 0)
            text, deadline = b"", time.monotonic() + timeout
            while time.monotonic() < deadline:
                time.sleep(0.05)
                dump.seek(before)
                more = dump.read()
                if more and more == text:
                    break
                text = more
    except OSError:
        return {}
    return parse_dump(text.decode(errors="replace"))


def parse_dump(text: str) -> dict[int, Stack]:
    """Parse the output of faulthandler: stacks by thread identity."""
    stacks: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            frames = stacks.setdefault(int(thread[1], 16), [])
        elif (place := _FRAME.match(line)) is not None:
            frames.append(Frame(place[1], int(place[2]), place[3], origin_of(place[1])))
    return {thread: tuple(frames) for thread, frames in stacks.items()}


def users_frame(stack: Stack) -> Frame | None:
    """The user's function that a thread is executing; None if that function has called this package."""
    own = next((frame for frame in stack if frame.origin != "installed"), None)
    return own if own is not None and own.origin == "user" else None


def show(stack: Stack, indent: str = "    ") -> str:
    """One line per frame, innermost first."""
    return "\n".join(f"{indent}{frame}" for frame in stack) or f"{indent}(no Python code)"


@functools.cache
def origin_of(file: str) -> str:
    """Origin of a source file: verl (this package), user, or installed."""
    if file.startswith(_PACKAGE + os.sep):
        return "verl"
    places = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    installed = file.startswith(("<", *places)) or "/site-packages/" in file or "/dist-packages/" in file
    return "installed" if installed or any(map(_has_packages, Path(file).parents)) else "user"


@functools.cache
def _has_packages(folder: Path) -> bool:
    """Whether packages are installed in a folder (`pip install --target`, an unpacked bundle on PYTHONPATH)."""
    return next(folder.glob("*.dist-info"), None) is not None


def _walk(frame: FrameType | None) -> Stack:
    frames: list[Frame] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        frames.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name, origin_of(code.co_filename)))
        frame = frame.f_back
    return tuple(frames)


def _signal() -> int | None:
    """A real-time signal: schedulers and users send SIGUSR1 and SIGUSR2."""
    first = getattr(signal, "SIGRTMIN", None)
    return None if first is None else first + 9


def _find_dump_file(pid: int) -> str | None:
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            place = f"/proc/{pid}/fd/{name}"
            if os.readlink(place).startswith(f"/memfd:{_FILE}"):
                return place
    except OSError:
        return None
    return None


def _catches(pid: int) -> bool:
    """Whether the process handles the signal: without a handler the signal would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> ((_signal() or 1) - 1) & 1)
