"""The base of all HTTP servers: `app` (requests: limits, authentication, errors) and `server` (connections).

The servers' command-line options are in this file, which imports neither module, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

DEFAULT_CONNECTIONS = 1024


def add_server_options(parser: argparse.ArgumentParser, port: int, max_body_mb: int) -> None:
    """Add the command-line options that all servers have; underscores and dashes in their names are equivalent."""

    def add(name: str, **options: Any) -> None:
        parser.add_argument(*dict.fromkeys((name, "--" + name[2:].replace("-", "_"))), **options)

    add("--host", default="127.0.0.1", help="address to serve on (default: %(default)s, this machine only)")
    add("--port", type=int, default=port, help="port (default: %(default)s; 0: any free port)")
    key = os.environ.get("VERL_API_KEY") or None
    key_help = "key that clients must send as `Authorization: Bearer` or `x-api-key` (default: $VERL_API_KEY)"
    add("--api-key", default=key, help=key_help)
    body_help = "maximum size of a request body in MiB (default: %(default)s)"
    add("--max-body-mb", type=positive, default=max_body_mb, help=body_help)
    connections_help = "maximum number of open connections (default: %(default)s)"
    add("--max-connections", type=positive, default=DEFAULT_CONNECTIONS, help=connections_help)


def positive(text: str) -> int:
    """Parse an option that must be an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
