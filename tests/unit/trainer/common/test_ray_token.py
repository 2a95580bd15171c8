"""The Ray auth token of a run with `trainer.node_rank`: created on node 0, required and checked on the others."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from verl.config import PPOConfig, load_config
from verl.trainer.common import ray_token
from verl.trainer.common.nodes import serve_as_node, start_head, stop_head
from verl.trainer.common.ray_cluster import start_ray
from verl.trainer.common.ray_token import check_token, create_token, has_token, token_file
from verl.trainer.recovery.ray_monitor import RayUnavailableError

TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
# How a Ray head answers a client of HTTP/2: with an empty settings frame.
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Of an account that never used Ray."""
    for name in TOKEN_VARIABLES:
        monkeypatch.setenv(name, "")  # restored afterwards, also what the code under test sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def answering() -> Iterator[int]:
    """The port of a server that answers as a Ray head does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    client = server.accept()[0]
                except OSError:  # closed
                    return
                with client:
                    client.sendall(SETTINGS)

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def config(rank: int, port: int, within: float = 0.5) -> PPOConfig:
    values = {
        "data": {"train_files": "openai/gsm8k"},
        "actor_rollout_ref": {"model": {"path": "a/b"}},
        "trainer": {"nnodes": 2, "node_rank": rank, "master_addr": "127.0.0.1", "master_port": port},
        "ray_init": {"num_cpus": 1},
    }
    return load_config(values, [f"trainer.nodes_within={within}"], check_files=False)


def test_a_new_token_is_secret_and_never_logged(home, caplog):
    with caplog.at_level(logging.INFO):
        create_token()
    token = (home / ".ray" / "auth_token").read_text()
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert (home / ".ray").stat().st_mode & 0o777 == 0o700
    assert str(home / ".ray" / "auth_token") in caplog.text
    assert token not in caplog.text
    assert [path.name for path in (home / ".ray").iterdir()] == ["auth_token"]
    assert has_token()
    create_token()
    assert (home / ".ray" / "auth_token").read_text() == token, "an existing token is kept"


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_TOKEN", "5" * 64), ("RAY_AUTH_MODE", "disabled")], ids=["variable", "disabled"]
)
def test_no_file_is_written_where_none_is_needed(home, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    create_token()
    assert has_token()
    assert not home.exists()


def test_the_path_of_the_environment_is_used(home, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "shared" / "token"))
    create_token()
    assert token_file() == tmp_path / "shared" / "token"
    assert token_file().stat().st_mode & 0o777 == 0o600
    assert not home.exists()


def test_an_empty_file_is_no_token(home):
    (home / ".ray").mkdir(parents=True)
    token_file().write_text("\n")
    assert not has_token()
    create_token()
    assert has_token()


def test_concurrent_jobs_of_one_account_agree_on_a_token():
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: (create_token(), token_file().read_text())[1], range(64)))
    assert len(tokens) == 1


def test_the_mode_of_rays_own_token_is_corrected_without_a_warning(home, caplog):
    """`ray.init` writes it with mode 0644."""
    (home / ".ray").mkdir(parents=True)
    token_file().write_text("5" * 64)
    token_file().chmod(0o644)
    with caplog.at_level(logging.INFO):
        create_token()
    assert token_file().stat().st_mode & 0o777 == 0o600
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize("why", ["another owner", "a path of the user's", "a file system without modes"])
def test_a_token_that_others_can_read_is_reported(home, tmp_path, caplog, monkeypatch, why):
    (home / ".ray").mkdir(parents=True)
    if why == "a path of the user's":
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "shared"))
    token_file().write_text("5" * 64)
    token_file().chmod(0o640)
    if why == "another owner":
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
    elif why == "a file system without modes":
        monkeypatch.setattr(Path, "chmod", lambda path, mode: None)
    create_token()
    assert token_file().stat().st_mode & 0o777 == 0o640
    assert f"chmod 600 {token_file()}" in caplog.text


def no_links(source: str, target: Path) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_home_folder_without_hard_links_gets_a_token(home, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)
    create_token()
    assert re.fullmatch(r"[0-9a-f]{64}", token_file().read_text())
    assert token_file().stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (home / ".ray").iterdir()] == ["auth_token"]


def test_without_hard_links_an_existing_token_is_kept(home, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)
    (home / ".ray").mkdir(parents=True)
    token_file().write_text("5" * 64)
    ray_token.write_token(token_file(), "6" * 64)  # another process has created it since it was looked for
    assert token_file().read_text() == "5" * 64


@pytest.mark.parametrize("token", ["", "5" * 64], ids=["missing", "wrong"])
@pytest.mark.parametrize("error", [ray.exceptions.AuthenticationError, ConnectionError])
def test_joining_a_cluster_that_rejects_the_token_names_the_remedy(answering, monkeypatch, token, error):
    """Ray raises AuthenticationError or, if the head has rejected the token, ConnectionError."""

    def init(**options: Any) -> None:
        raise error("invalid token")

    health_check = subprocess.CompletedProcess([], 1, stdout="", stderr="ray.exceptions.AuthenticationError: …")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: health_check)

    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{answering}")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(RayUnavailableError) as caught:
        start_ray()
    assert f"127.0.0.1:{answering} {'rejects the' if token else 'requires a'}" in str(caught.value)
    assert "docs/guides/large_models.md" in str(caught.value)


def test_a_folder_that_cannot_be_written_is_named(home):
    home.write_text("not a folder")
    with pytest.raises(RayUnavailableError) as caught:
        create_token()
    assert str(token_file()) in str(caught.value)
    assert "RAY_AUTH_TOKEN_PATH" in str(caught.value)


def test_a_node_without_a_token_names_the_file_and_the_variables(answering):
    with pytest.raises(RayUnavailableError) as caught:
        serve_as_node(config(1, answering))
    message = str(caught.value)
    assert str(token_file()) in message
    assert "RAY_AUTH_TOKEN" in message
    assert "docs/guides/large_models.md" in message


@pytest.mark.processes
@pytest.mark.slow
def test_a_head_starts_for_an_account_without_a_token_and_rejects_another_one(home, port, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # short: Ray's sockets have at most 107 characters
        monkeypatch.setenv("RAY_TMPDIR", folder)
        check_a_head(port, monkeypatch)


def check_a_head(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head = start_head(config(0, port))
    assert head is not None
    try:
        address = f"127.0.0.1:{port}"
        check_token(address)
        own = token_file().read_text()
        monkeypatch.setenv("RAY_AUTH_TOKEN", "5" * 64)
        with pytest.raises(RayUnavailableError, match=r"RAY_AUTH_TOKEN") as caught:
            serve_as_node(config(1, port))
        assert own not in str(caught.value)
    finally:
        stop_head(dataclasses.replace(head, nodes=1))
