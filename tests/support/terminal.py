"""A program on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios


def run_on_terminal(program: str, columns: int) -> str:
    """Run a Python program whose stdout and stderr are a terminal of this width; return everything that it wrote."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    text = b""
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:  # the program has ended
            break
        if not part:
            break
        text += part
    os.close(reader)
    assert process.wait() == 0, text
    return text.decode()
