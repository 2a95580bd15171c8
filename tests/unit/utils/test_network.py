"""The network of this machine: the interface of an address."""

from __future__ import annotations

import socket
import sys

import pytest

from verl.utils.network import accepts_connections, address_towards, interface_of


@pytest.mark.skipif(sys.platform != "linux", reason="names of interfaces are the system's own")
def test_an_address_has_an_interface_or_none():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # for documents only, RFC 5737
    assert interface_of("fe80::1") is None
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"


def test_a_port_answers_while_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert accepts_connections("127.0.0.1", port)
    assert not accepts_connections("127.0.0.1", port)
