"""The paths that programs may read."""

from pathlib import Path

import pytest

from verl.sandbox.filesystem import readable_paths


@pytest.mark.parametrize("order", [("", "inner"), ("inner", "")])
def test_a_path_inside_another_is_left_out_in_any_order(tmp_path: Path, order: tuple[str, str]) -> None:
    (tmp_path / "inner").mkdir()
    paths = readable_paths([str(tmp_path / name) for name in order], "/nonexistent")
    assert [path for path in paths if path.startswith(str(tmp_path))] == [str(tmp_path)]


def test_temporary_folders_and_missing_paths_are_left_out(tmp_path: Path) -> None:
    paths = readable_paths([str(tmp_path), str(tmp_path / "missing"), "/tmp"], str(tmp_path))
    assert not {str(tmp_path), str(tmp_path / "missing"), "/tmp"} & set(paths)
