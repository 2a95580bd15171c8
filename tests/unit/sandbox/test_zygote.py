"""The loop of the zygote."""

from __future__ import annotations

import os
import socket

from verl.sandbox import zygote


def test_stopped_runs_are_killed_also_while_new_ones_arrive(monkeypatch):
    monkeypatch.setattr(zygote, "CHECK_INTERVAL_S", 0.0)
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    loop = object.__new__(zygote._Zygote)
    loop._control, loop._parent, loop._child_ended = theirs, os.getppid(), reading
    checks = []
    loop._start = os.close
    loop._kill_stopped = lambda: checks.append(None)
    loop._kill_all = lambda: None
    with ours, theirs:
        for _ in range(3):
            socket.send_fds(ours, [b"r"], [writing])
        ours.shutdown(socket.SHUT_WR)
        loop.serve()
    os.close(reading)
    os.close(writing)
    assert len(checks) == 3
