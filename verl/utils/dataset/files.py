"""Which local files a user means: one path, several, a folder (also one downloaded from a hub), a URL or a hub name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from verl.utils.fs import copy_to_local

# In this order of preference where a folder holds the same data in several formats.
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json")
# Files of that kind which describe a dataset folder instead of holding rows.
_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SPLITS = {"train": "train", "test": "test", "validation": "validation", "val": "validation", "dev": "validation"}


def find_files(data_files: str | os.PathLike[str] | Sequence[str], split: str | None = None) -> list[str]:
    """The data files behind `data_files`, in a stable order.

    A folder's splits and parts are those of its dataset card, as on the hub, or what its file names say. `split`
    ("train", "test", "validation") chooses among several; without it they are an error: nobody trains on test rows.
    """
    names = [data_files] if isinstance(data_files, str | os.PathLike) else list(data_files)
    if not names:
        raise ValueError("data.train_files: no file is given. Set it, e.g. $HOME/data/gsm8k/train.parquet.")
    found: list[str] = []
    for name in names:
        local = copy_to_local(name, repo_type="dataset", key="data")
        found += _files_of_folder(Path(local), split) if os.path.isdir(local) else [_known_format(local)]
    return found


def _known_format(file: str) -> str:
    if not file.endswith(SUFFIXES):
        raise ValueError(
            f"{file}: not a format that can be read. Give one of {', '.join(SUFFIXES)} or a folder of them."
        )
    return file


def _files_of_folder(folder: Path, split: str | None) -> list[str]:
    by_split = _splits_of_card(folder) or _splits_of_names(folder)
    files = _choose(folder, by_split, split) if len(by_split) > 1 else next(iter(by_split.values()))
    return [_known_format(str(path)) for path in files]


def _splits_of_card(folder: Path) -> dict[str, list[Path]]:
    """What the dataset card says about splits; empty where it says nothing."""
    from huggingface_hub import metadata_load

    card = folder / "README.md"
    parts = (metadata_load(card) or {}).get("configs") if card.is_file() else None
    if not parts:
        return {}
    import datasets

    try:
        found = datasets.load_dataset_builder(str(folder)).config.data_files or {}
    except (ValueError, FileNotFoundError, RuntimeError) as error:  # RuntimeError: the folder has a script
        names = ", ".join(str(part.get("config_name")) for part in parts)
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{folder}: its card lists the parts {names} and none can be chosen ({reason}). Name the files you mean."
        ) from error
    by_split: dict[str, list[Path]] = {}
    for name, files in found.items():
        paths = [_inside(folder, str(file)) for file in files]
        by_split.setdefault(_known_split(str(name)) or str(name), []).extend(paths)
    return by_split


def _inside(folder: Path, file: str) -> Path:
    """A file that the card names, which must be one of the folder's."""
    path = Path(os.path.normpath(file))
    if not path.is_relative_to(os.path.normpath(folder.absolute())):
        raise ValueError(f"{folder}: its card names {file}, outside of the folder. Name the files you mean.")
    return path


def _splits_of_names(folder: Path) -> dict[str, list[Path]]:
    visible = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in _ABOUT
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    files = next((found for suffix in SUFFIXES if (found := [p for p in visible if p.suffix == suffix])), [])
    if not files:
        raise ValueError(f"{folder}: the folder holds no {', '.join(SUFFIXES)} file. Check the path.")
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path, folder), []).append(path)
    return by_split


def _choose(folder: Path, by_split: dict[str, list[Path]], split: str | None) -> list[Path]:
    # A set without a validation split is validated on its test split, and the other way round.
    wanted = {"test": ("test", "validation"), "validation": ("validation", "test")}.get(split or "", (split or "",))
    chosen = next((by_split[name] for name in wanted if name in by_split), None)
    if chosen is None:
        names = ", ".join(path.name for paths in by_split.values() for path in paths[:2])
        raise ValueError(f"{folder}: the folder holds several splits ({names}). Name the file you mean.")
    return chosen


def _split_of(path: Path, folder: Path) -> str:
    """The split that a file's name (`train-00000-of-00002.parquet`) or folder (`train/part-0.parquet`) says, or ""."""
    relative = path.relative_to(folder)
    for part in reversed((*relative.parts[:-1], relative.stem)):
        if found := _known_split(part):
            return found
    return ""


def _known_split(name: str) -> str:
    word = re.match(r"[a-z]+", name.lower())
    return _SPLITS.get(word.group(), "") if word else ""
