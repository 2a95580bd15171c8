"""What a run's folder uses on disk, whatever its program does to hide it; and its removal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from pathlib import Path
from types import MappingProxyType

import pytest

from verl.sandbox.filesystem import MAX_FILES
from verl.sandbox.usage import DiskUsage
from verl.sandbox.zygote import remove_folder as remove


def over(folder: Path, open_files: Mapping[int, int] = MappingProxyType({}), mapped: Set[int] = frozenset()) -> bool:
    return DiskUsage(str(folder), 2).exceeds_limit(open_files, mapped, lambda: None)


def fill(place: Path, megabytes: int) -> None:
    place.write_bytes(os.urandom(1 << 20) * megabytes)


def test_plain_and_sparse_files(tmp_path: Path) -> None:
    fill(tmp_path / "a", 2)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    assert not over(tmp_path)
    fill(tmp_path / "b", 2)
    assert over(tmp_path)


def test_hard_links_count_once(tmp_path: Path) -> None:
    fill(tmp_path / "a", 2)
    for number in range(10):
        os.link(tmp_path / "a", tmp_path / f"link{number}")
    assert not over(tmp_path)


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o600, 0o400])
def test_folders_that_cannot_be_read(tmp_path: Path, mode: int) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    fill(inner / "c", 4)
    inner.chmod(mode)
    (tmp_path / "a").chmod(mode)
    assert over(tmp_path)


def test_folders_of_any_depth(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "/".join(["d"] * 40))
    assert not over(tmp_path)
    make_deep(tmp_path, "x" * 200, 100)
    assert over(tmp_path)


def test_too_many_files(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for number in range(MAX_FILES):
        os.link(tmp_path / "a", tmp_path / str(number))
    assert over(tmp_path)


def test_files_without_a_name(tmp_path: Path) -> None:
    assert not over(tmp_path, open_files={1: 1 << 20})
    assert over(tmp_path, open_files={1: 2 << 20, 2: 2 << 20})
    assert not over(tmp_path, mapped={7})
    assert over(tmp_path, mapped={7, 8}), "each may have the size that one file may have"


def test_a_mapped_file_counts_as_it_was_last_seen(tmp_path: Path) -> None:
    usage = DiskUsage(str(tmp_path), 2)
    fill(tmp_path / "a", 1)
    inode = (tmp_path / "a").stat().st_ino
    assert not usage.exceeds_limit({}, set(), lambda: None)
    (tmp_path / "a").unlink()
    fill(tmp_path / "b", 1)
    assert not usage.exceeds_limit({}, {inode}, lambda: None)
    assert usage.pause < 0.025, "the closer to the limit, the sooner the next look"


def test_links_lead_nowhere(tmp_path: Path) -> None:
    fill(tmp_path / "target", 4)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").symlink_to(tmp_path / "target")
    (tmp_path / "folder" / "up").symlink_to(tmp_path)
    assert not over(tmp_path / "folder")


def test_any_tree_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "closed" / "inner").mkdir(parents=True)
    make_deep(folder, "x" * 200, 1500)
    (folder / "closed" / "inner").chmod(0)
    (folder / "closed").chmod(0)
    remove(str(folder))
    assert not folder.exists()


def make_deep(folder: Path, name: str, depth: int) -> None:
    """Folders below each other, with a path longer than the kernel takes."""
    place = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=place)
        inner = os.open(name, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
