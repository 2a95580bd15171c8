"""`verl view FOLDER…`, also `python -m verl.viewer`: options, errors, and the start of the server or the export."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import secrets
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

from verl.utils.http_server import add_server_options

DEFAULT_PORT = 8420
_MAX_BODY_MB = 1

logger = logging.getLogger("verl.viewer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal, or write the export; exit code 2 if a folder or an option is invalid."""
    options = _parser().parse_args(arguments)
    _keep_pandas_out()
    from verl.recording import RecordingError
    from verl.utils.logging_setup import setup_logging

    setup_logging()
    try:
        if options.export is not None:
            _export(options)
        else:
            _serve(options)
    except (RecordingError, ValueError, OSError) as error:
        sys.stderr.write(f"verl view: {error}\n")
        return 2
    return 0


class _NoPandas(MetaPathFinder):
    """Pretends that pandas is not installed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(f"{fullname} is not imported by the viewer", name=fullname)


def _keep_pandas_out() -> None:
    """Let pyarrow work without pandas, which it would import at its first conversion if it is installed.

    The viewer has no data frames, and the import takes a fifth of its start. Later calls of `to_pandas` still work.
    """
    import pyarrow as pa

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.scalar(0)
    finally:
        sys.meta_path.remove(finder)


def _serve(options: argparse.Namespace) -> None:
    from verl.utils.http_server.server import ConnectionLimits, bind_socket, create_server, run_event_loop
    from verl.viewer.run import ViewedRun
    from verl.viewer.server import create_viewer_app

    runs = [ViewedRun(folder) for folder in run_folders(options.folders)]
    with bind_socket(options.host, options.port) as bound:
        token = options.api_key
        if token is None and not ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback:
            token = secrets.token_urlsafe(16)
        path = "/" if token is None else f"/?token={token}"
        limits = ConnectionLimits(connections=options.max_connections, grace_seconds=1)
        name = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
        run_event_loop(create_server(create_viewer_app(runs, token), name, limits, path).serve([bound]))


def _export(options: argparse.Namespace) -> None:
    from verl.viewer.export import write_export
    from verl.viewer.run import ViewedRun

    size = write_export([ViewedRun(folder) for folder in run_folders(options.folders)], options.export)
    logger.info("written: %s (%.1f MB)", options.export, size / 1e6)


def run_folders(folders: Sequence[str]) -> list[str]:
    """Replace every folder that is not a run, but contains runs (`val_only`, a project's folder), by these runs."""
    from verl.recording import schema

    def is_run(folder: Path) -> bool:
        return any((folder / part / schema.RUN_FILE).is_file() for part in (schema.FOLDER, "."))

    runs: list[str] = []
    for folder in folders:
        path = Path(folder).expanduser()
        contained = (
            [] if is_run(path) or not path.is_dir() else sorted(child for child in path.iterdir() if is_run(child))
        )
        runs += [str(child) for child in contained] or [folder]
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl view", description="Show recorded runs in the browser.")
    parser.add_argument(
        "folders", metavar="FOLDER", nargs="+", help="folder of a run (trainer.default_local_dir), or of runs"
    )
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one self-contained HTML file, and exit")
    add_server_options(parser, DEFAULT_PORT, _MAX_BODY_MB)
    return parser


if __name__ == "__main__":
    sys.exit(main())
