"""Data files from one path, several, a folder (also one downloaded from a hub), a URL or a hub name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from verl.utils.fs import copy_to_local

# In this order of preference where a folder holds the same data in several formats.
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json")
# Files with these suffixes that describe a dataset folder and have no rows.
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SPLITS = {"train": "train", "test": "test", "validation": "validation", "val": "validation", "dev": "validation"}


def find_files(data_files: str | os.PathLike[str] | Sequence[str], split: str | None = None) -> list[str]:
    """Return the local data files of `data_files`, in a stable order.

    The splits of a folder are those of its dataset card, as on the hub, or follow from its file names. `split`
    ("train", "test", "validation") selects one of several; without it, several splits are an error: training must not
    use test rows.
    """
    names = [data_files] if isinstance(data_files, str | os.PathLike) else list(data_files)
    if not names:
        raise ValueError("data.train_files: no file is given. Set it, e.g. $HOME/data/gsm8k/train.parquet.")
    files: list[str] = []
    for name in names:
        local = copy_to_local(name, repo_type="dataset", key="data")
        files += _files_of_folder(Path(local), split) if os.path.isdir(local) else [_check_format(local)]
    return files


def _check_format(file: str) -> str:
    if not file.endswith(SUFFIXES):
        raise ValueError(f"{file}: the format is not supported. Give one of {', '.join(SUFFIXES)} or a folder of them.")
    return file


def _files_of_folder(folder: Path, split: str | None) -> list[str]:
    by_split = _splits_of_card(folder) or _splits_of_names(folder)
    files = _select_split(folder, by_split, split) if len(by_split) > 1 else next(iter(by_split.values()))
    return [_check_format(str(path)) for path in files]


def _splits_of_card(folder: Path) -> dict[str, list[Path]]:
    """The splits in the dataset card; empty if it has none."""
    from huggingface_hub import metadata_load

    card = folder / "README.md"
    parts = (metadata_load(card) or {}).get("configs") if card.is_file() else None
    if not parts:
        return {}
    import datasets

    try:
        data_files = datasets.load_dataset_builder(str(folder)).config.data_files or {}
    except (ValueError, FileNotFoundError, RuntimeError) as error:  # RuntimeError: the folder has a script
        names = ", ".join(str(part.get("config_name")) for part in parts)
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{folder}: its card lists the parts {names} and none can be selected ({reason}). Name the files to use."
        ) from error
    by_split: dict[str, list[Path]] = {}
    for name, files in data_files.items():
        paths = [_inside(folder, str(file)) for file in files]
        by_split.setdefault(_parse_split(str(name)) or str(name), []).extend(paths)
    return by_split


def _inside(folder: Path, file: str) -> Path:
    """A file in the card; ValueError if it is outside of the folder."""
    path = Path(os.path.normpath(file))
    if not path.is_relative_to(os.path.normpath(folder.absolute())):
        raise ValueError(f"{folder}: its card names {file}, outside of the folder. Name the files to use.")
    return path


def _splits_of_names(folder: Path) -> dict[str, list[Path]]:
    visible = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in _METADATA_FILES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    by_suffix = ([path for path in visible if path.suffix == suffix] for suffix in SUFFIXES)
    files = next(filter(None, by_suffix), [])
    if not files:
        raise ValueError(f"{folder}: the folder has no {', '.join(SUFFIXES)} file. Check the path.")
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path, folder), []).append(path)
    return by_split


def _select_split(folder: Path, by_split: dict[str, list[Path]], split: str | None) -> list[Path]:
    # Without a validation split, the test split is used for validation, and vice versa.
    candidates = {"test": ("test", "validation"), "validation": ("validation", "test")}.get(split or "", (split or "",))
    selected = next((by_split[name] for name in candidates if name in by_split), None)
    if selected is None:
        names = ", ".join(path.name for paths in by_split.values() for path in paths[:2])
        raise ValueError(f"{folder}: the folder has several splits ({names}). Name the file to use.")
    return selected


def _split_of(path: Path, folder: Path) -> str:
    """The split in a file's name (`train-00000-of-00002.parquet`) or folder (`train/part-0.parquet`), or ""."""
    relative = path.relative_to(folder)
    for part in reversed((*relative.parts[:-1], relative.stem)):
        if split := _parse_split(part):
            return split
    return ""


def _parse_split(name: str) -> str:
    word = re.match(r"[a-z]+", name.lower())
    return _SPLITS.get(word.group(), "") if word else ""
