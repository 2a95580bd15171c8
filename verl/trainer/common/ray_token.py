"""The Ray auth token of a run with `trainer.node_rank`: node 0 creates it, every other node needs the same one.

Ray reads RAY_AUTH_TOKEN, then the file RAY_AUTH_TOKEN_PATH, then ~/.ray/auth_token. The token is never logged: a client
that knows it can run any code on the cluster.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from verl.trainer.recovery.ray_monitor import RayUnavailableError

logger = logging.getLogger(__name__)

_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_PATH = "RAY_AUTH_TOKEN_PATH"
_CHECK_S = 60.0
_GROUP_AND_OTHERS = 0o077


def token_file() -> Path:
    """Return the file that Ray reads the token from if RAY_AUTH_TOKEN is not set."""
    return Path(os.environ.get(_PATH) or Path.home() / ".ray" / "auth_token")


def has_token() -> bool:
    """Return whether this process can authenticate, or token authentication is switched off (RAY_AUTH_MODE)."""
    return not _is_enabled() or bool(os.environ.get(_TOKEN, "").strip()) or _is_filled(token_file())


def create_token() -> None:
    """On node 0: write a random token to `token_file()`, readable by this account only, unless there is a token."""
    path = token_file()
    if not has_token():
        try:
            write_token(path, secrets.token_hex(32))
        except OSError as error:
            raise RayUnavailableError(
                f"no Ray auth token is set, and {path} cannot be written: {error.strerror or error}",
                f"Set {_TOKEN} to the same secret on all nodes, or {_PATH} to a file that can be written.",
            ) from error
        logger.info(
            "Created a Ray auth token in %s (mode 0600). The other nodes need the same token: use a shared home folder,"
            " copy the file to the same place on every node, or set %s or %s there. See docs/guides/large_models.md.",
            *(path, _PATH, _TOKEN),
        )
    elif _is_enabled() and not os.environ.get(_TOKEN) and _is_readable_by_others(path):
        _restrict(path)


def missing_token() -> tuple[str, str]:
    """Return cause and remedy for a node without a token."""
    cause = f"this node has no Ray auth token: {_TOKEN} is not set and {token_file()} does not exist or is empty"
    return cause, _copy_remedy()


def check_token(address: str) -> None:
    """Raise RayUnavailableError if the head at `address` rejects the token of this node."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--skip-version-check"]
    try:
        check = subprocess.run([*command, f"--address={address}"], capture_output=True, text=True, timeout=_CHECK_S)
    except subprocess.TimeoutExpired:
        return  # not a token problem; joining the head reports it
    if "AuthenticationError" in check.stderr:
        raise RayUnavailableError(*rejected_token(address))


def rejected_token(address: str) -> tuple[str, str]:
    """Return cause and remedy if the cluster at `address` rejects this process."""
    if not has_token():
        cause, remedy = missing_token()
        return f"the head at {address} requires a token: {cause}", remedy
    source = f"the environment variable {_TOKEN}" if os.environ.get(_TOKEN) else str(token_file())
    mode = "" if _is_enabled() else f" ({_MODE}={os.environ[_MODE]} here, token on node 0)"
    return f"the head at {address} rejects the Ray auth token from {source}{mode}", _copy_remedy()


def enable_token() -> None:
    """Switch token authentication on for Ray processes started from here, unless the user has set RAY_AUTH_MODE."""
    os.environ.setdefault(_MODE, "token")


def _copy_remedy() -> str:
    return (
        f"Copy the token file of node 0 (~/.ray/auth_token, or its {_PATH}) to {token_file()} with mode 0600, or set"
        f" {_TOKEN} to the same value on all nodes. See docs/guides/large_models.md."
    )


def _is_enabled() -> bool:
    return os.environ.get(_MODE, "token").lower() == "token"


def _is_filled(path: Path) -> bool:
    return path.is_file() and bool(path.read_text().strip())


def _is_readable_by_others(path: Path) -> bool:
    return bool(path.stat().st_mode & _GROUP_AND_OTHERS)


def _restrict(path: Path) -> None:
    """Set mode 0600 on Ray's default file, which `ray.init` writes with 0644; for any other file, only log a warning.

    A file that RAY_AUTH_TOKEN_PATH names may be shared with a group on purpose.
    """
    if not os.environ.get(_PATH) and path.stat().st_uid == os.getuid():
        with suppress(OSError):  # reported below
            path.chmod(0o600)
            if not _is_readable_by_others(path):
                return logger.info("Set the mode of %s to 0600: other accounts could read it.", path)
    logger.warning("%s is readable by other accounts, which can use this Ray cluster: run chmod 600 %s", path, path)


def write_token(path: Path, token: str) -> None:
    """Write the token atomically with mode 0600; of two concurrent writers, the first one wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".auth_token-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
        if path.exists() and not _is_filled(path):
            path.unlink()
        _publish(temporary, path, token)
    except FileExistsError:
        return  # another process of this account created it meanwhile
    finally:
        os.unlink(temporary)


def _publish(temporary: str, path: Path, token: str) -> None:
    """Create `path` with the content of the temporary file, which is `token`; FileExistsError if `path` exists."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links (FUSE, SMB)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(token)
