"""The wheel contains every file of an installation without the checkout, and only the package verl."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.commands import ROOT

pytest.importorskip("setuptools")


@pytest.mark.slow
@pytest.mark.processes
def test_the_wheel_runs_without_the_checkout(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "verl", source / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "verl/py.typed" in names
    for folder, pattern in (("verl/trainer/config", "**/*.yaml"), ("verl/cli/starter", "*.*")):
        expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob(pattern)}
        assert expected <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"verl"}

    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    # The packages of this environment, but not the checkout.
    program = f"import sys; sys.path.insert(0, {str(site)!r}); from verl.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program]
    done = subprocess.run([*command, "init", "mine"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "mine/run.sh").is_file(), done.stdout
    done = subprocess.run(
        [*command, "train", "--help", "data"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "train_batch_size = 512" in done.stdout
