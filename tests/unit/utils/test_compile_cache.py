"""The folder of compiled kernels: private, checked, bounded, shared by processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.single_controller.ray.actors import RayRankHost
from verl.utils import compile_cache
from verl.utils.compile_cache import open_compile_cache

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE", str(tmp_path))
    monkeypatch.setenv(INDUCTOR, "")
    monkeypatch.setenv(TRITON, "")
    monkeypatch.setattr(compile_cache, "locks", {})
    return tmp_path / "compiled"


def open_again(monkeypatch, **arguments) -> Path:
    """As a later process does."""
    for lock in compile_cache.locks.values():
        lock.close()
    compile_cache.locks.clear()
    monkeypatch.setenv(INDUCTOR, "")
    monkeypatch.setenv(TRITON, "")
    folder = open_compile_cache(**arguments)
    assert folder is not None
    return folder


def write(folder: Path, name: str, size: int = 10) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def test_both_caches_are_in_a_private_folder_named_by_versions(root):
    folder = open_compile_cache()
    assert folder is not None
    assert folder.parent == root
    assert root.stat().st_mode & 0o777 == 0o700
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == (str(folder / "inductor"), str(folder / "triton"))


def test_a_folder_that_the_user_has_set_is_kept(root, monkeypatch):
    monkeypatch.setenv(TRITON, "/of/the/user")
    folder = open_compile_cache()
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == (str(folder / "inductor"), "/of/the/user")


def test_only_the_default_of_torch_is_replaced(root, monkeypatch):
    """Importing the compiler sets the variable to it, also for the processes that this one starts."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(INDUCTOR, default_cache_dir() + "_experiment")
    open_compile_cache()
    assert os.environ[INDUCTOR] == default_cache_dir() + "_experiment"
    monkeypatch.setenv(INDUCTOR, default_cache_dir())
    assert open_compile_cache() is not None
    assert Path(os.environ[INDUCTOR]).is_relative_to(root)


def test_a_folder_that_others_can_write_to_is_not_used(root, caplog):
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    assert open_compile_cache() is None
    assert "chmod 700" in caplog.text
    assert os.environ[INDUCTOR] == ""


def test_a_cache_that_is_a_file_is_not_used(root):
    root.write_text("")
    assert open_compile_cache() is None


@pytest.mark.parametrize("name", ["triton/AB/kernel.cubin", "inductor/ab/cab.py"])
def test_a_damaged_file_removes_the_folder(root, monkeypatch, caplog, name):
    folder = open_compile_cache()
    damaged, other = write(folder, name), write(folder, "triton/CD/kernel.json")
    assert open_again(monkeypatch) == folder
    assert damaged.exists()
    damaged.write_bytes(b"x" * 9)
    open_again(monkeypatch)
    assert not damaged.exists()
    assert not other.exists()
    assert f"{damaged} is damaged" in caplog.text


@pytest.mark.parametrize("name", ["inductor/fxgraph/ab/key/value", "inductor/aotautograd/key/entry", "x.best_config"])
def test_files_that_inductor_rewrites_and_checks_may_change(root, monkeypatch, name):
    path = write(open_compile_cache(), name)
    open_again(monkeypatch)
    path.write_bytes(b"new")
    open_again(monkeypatch)
    assert path.exists()


def test_a_damaged_manifest_keeps_the_files(root, monkeypatch):
    folder = open_compile_cache()
    path = write(folder, "triton/AB/kernel.cubin")
    (folder / "manifest.json").write_text("{")
    open_again(monkeypatch)
    assert path.exists()


def test_the_least_recently_used_versions_are_removed_above_the_limit(root, monkeypatch):
    for age, name in ((30, "oldest"), (20, "older"), (10, "old")):
        write(root / name, "triton/AB/kernel.cubin", 100)
        (root / f"{name}.lock").touch()
        os.utime(root / f"{name}.lock", (1e9 - age, 1e9 - age))
    root.chmod(0o700)
    open_compile_cache(max_bytes=250)
    assert sorted(path.name for path in root.iterdir() if path.is_dir() and any(path.rglob("*.cubin"))) == [
        "old",
        "older",
    ]


def test_the_own_folder_is_emptied_above_the_limit(root, monkeypatch):
    path = write(open_compile_cache(), "triton/AB/kernel.cubin", 1000)
    open_again(monkeypatch, max_bytes=500)
    assert not path.exists()


HOLDER = """
import sys
from verl.utils.compile_cache import open_compile_cache
print(open_compile_cache(), flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_by_another_process_is_neither_checked_nor_removed(root, monkeypatch):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        folder = Path(holder.stdout.readline().strip())
        path = write(folder, "triton/AB/kernel.cubin", 1000)
        assert open_again(monkeypatch, max_bytes=500) == folder
        assert path.exists()
        holder.stdin.close()
    open_again(monkeypatch, max_bytes=500)
    assert not path.exists()


COMPILES = """
import torch
from verl.utils.compile_cache import open_compile_cache
open_compile_cache()
x = torch.linspace(0, 1, 64)
result = torch.compile(lambda x: torch.sin(x) * 3 + x)(x)
torch.testing.assert_close(result, torch.sin(x) * 3 + x)
print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_damaged_entries_of_inductor_only_cost_a_compilation(root):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def hits() -> int:
        done = subprocess.run([sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return int(done.stdout.splitlines()[-1])

    assert hits() == 0
    assert hits() == 1  # also lists the files of the first process
    files = [path for path in root.glob("*/inductor/**/*") if path.is_file() and path.suffix != ".lock"]
    assert {path.suffix for path in files} >= {".so", ".py"}
    assert any("fxgraph" in path.parts for path in files)
    for path in files:
        path.write_bytes(path.read_bytes()[:20])
    assert hits() == 0
    assert hits() == 1


PRELOADS = """
import os, sys
from verl.single_controller.ray.actors import RayRankHost
RayRankHost().preload([], compiles=True)
print("torch._inductor.compile_fx" in sys.modules, os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


def test_ranks_import_the_compiler_early_and_with_this_cache(root, monkeypatch):
    imported = []
    monkeypatch.setattr("importlib.import_module", lambda name: imported.append((name, os.environ[INDUCTOR])))
    RayRankHost().preload(["json"], compiles=True)
    assert [name for name, _ in imported] == ["json", "torch._inductor.compile_fx"]
    assert all(Path(folder).is_relative_to(root) for _, folder in imported)


@pytest.mark.slow
def test_importing_the_compiler_keeps_this_cache(tmp_path):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["VERL_CACHE"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", PRELOADS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded, folder = done.stdout.split()
    assert loaded == "True"
    assert Path(folder).is_relative_to(tmp_path / "compiled")
