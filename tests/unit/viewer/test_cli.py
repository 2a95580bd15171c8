"""`verl view`: errors before anything is served or written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.recordings import write_run
from verl.cli.main import main as verl
from verl.viewer.__main__ import main, run_folders


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("verl view: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is not a folder"),
        ({}, "has no recording"),
        ({"record/run.json": "{"}, "is not valid JSON"),
        ({"record/run.json": "[]"}, "is not a JSON object"),
        ({"record/run.json": json.dumps({"schema": 99})}, "Install a newer verl"),
        ({"record/run.json": "{}"}, "no valid `schema`"),
    ],
)
def test_other_folders_are_rejected(tmp_path, capsys, content, reason):
    folder = tmp_path / "run"
    for name, text in (content or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if content == {}:
        folder.mkdir()
    before = files(tmp_path)
    assert main([str(folder)]) == 2
    assert reason in one_sentence(capsys)
    assert files(tmp_path) == before


def test_a_used_port_is_rejected(tmp_path, capsys):
    write_run(tmp_path, 1)
    before = files(tmp_path)
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        assert main([str(tmp_path), "--port", str(used.getsockname()[1])]) == 2
    assert "Choose another" in one_sentence(capsys)
    assert files(tmp_path) == before


def test_an_export_that_cannot_be_written_is_rejected(tmp_path, capsys):
    write_run(tmp_path / "run", 1)
    assert verl(["view", str(tmp_path / "run"), "--export", str(tmp_path / "none" / "run.html")]) == 2
    assert "none" in one_sentence(capsys)


@pytest.mark.processes
def test_a_public_address_gets_a_token(tmp_path):
    write_run(tmp_path, 1)
    command = [sys.executable, "-m", "verl.viewer", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "VERL_API_KEY"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.terminate()
    assert "/?token=" in line


@pytest.mark.processes
def test_the_viewer_works_without_pandas_and_does_not_break_it(tmp_path):
    """Its import would take a fifth of the start."""
    pytest.importorskip("pandas")
    write_run(tmp_path / "run", 2)
    script = """
import sys
from verl.recording import read
from verl.viewer.__main__ import main
assert main([sys.argv[1], "--export", sys.argv[2]]) == 0
assert "pandas" not in sys.modules
assert len(read(sys.argv[1]).metrics.to_pandas()) == 2
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run"), str(tmp_path / "run.html")], check=True)


def test_a_folder_of_runs_is_replaced_by_the_runs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "record").mkdir(parents=True)
        (tmp_path / name / "record/run.json").write_text("{}")
    (tmp_path / "other").mkdir()
    assert run_folders([str(tmp_path)]) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert run_folders([str(tmp_path / "a"), "missing"]) == [str(tmp_path / "a"), "missing"]
    assert run_folders([str(tmp_path / "other")]) == [str(tmp_path / "other")]
