"""Worker groups without Ray: the connection of rank 0 to another rank."""

from __future__ import annotations

import pickle
import socket
from multiprocessing.connection import Connection

import pytest

from verl.single_controller.local import _Peer


def test_a_call_whose_message_cannot_be_sent_fails_like_a_call_to_a_dead_process():
    ours, theirs = socket.socketpair()
    theirs.shutdown(socket.SHUT_RD)  # sending to it fails, while reading from it only waits
    with Connection(theirs.detach()) as process:
        process.send_bytes(pickle.dumps((1, "host")))
        peer = _Peer(Connection(ours.detach()))
        call = peer.call("method", [], {}, "control")
        with pytest.raises(EOFError):
            call.result(timeout=0)
        peer.close()
