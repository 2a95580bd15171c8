"""Data files and their rows: `find_files` finds the files, `Rows` reads the rows of all files as one sequence of dicts.

`find_files` accepts paths, folders (also ones downloaded from a hub), URLs and hub names. Files keep their own columns
and types: nothing is converted to a common schema, so `ground_truth` may be a string in one file and a list in another.
Large files are memory-mapped (parquet through an uncompressed copy in the cache), so processes of one node share them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.fs import cache_root, copy_to_local, create_once

logger = logging.getLogger(__name__)

GROUND_TRUTH = "ground_truth"
MAP_ABOVE_BYTES = 64 * 1024**2


class DataFile(Protocol):
    """The rows of one file."""

    file: str
    columns: list[str]

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return rows start:stop with all or some columns; columns that a row lacks are left out."""

    def where(self, row: int) -> str:
        """Return file and position of a row, for messages."""


class Rows:
    """The rows of several files, one after the other."""

    def __init__(self, files: Iterable[str | DataFile]) -> None:
        """`files`: names or results of `open_data_file`."""
        self.data_files = [open_data_file(file) if isinstance(file, str) else file for file in files]
        self._starts = np.cumsum([0, *(len(data_file) for data_file in self.data_files)])
        self.columns = list(dict.fromkeys(name for data_file in self.data_files for name in data_file.columns))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        data_file, number = self._locate(row)
        return data_file.rows(number, number + 1)[0]

    def where(self, row: int) -> str:
        data_file, number = self._locate(row)
        return data_file.where(number)

    def file_of(self, row: int) -> DataFile:
        return self._locate(row)[0]

    def batches(self, columns: Sequence[str], size: int = 1024) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield the number of the first row and up to `size` rows (some columns), over all rows in order."""
        for first, data_file in zip(self._starts, self.data_files, strict=False):
            for start in range(0, len(data_file), size):
                yield int(first) + start, data_file.rows(start, min(start + size, len(data_file)), columns)

    def versions(self) -> list[list[Any]]:
        """Return path, size and modification time of each file."""
        return [_version(data_file.file) for data_file in self.data_files]

    def _locate(self, row: int) -> tuple[DataFile, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self.data_files[number], row - int(self._starts[number])


def open_data_file(file: str) -> DataFile:
    """Open a file by its suffix. ValueError, with the position and the remedy: it cannot be read."""
    return ArrowFile(file) if file.endswith((".parquet", ".arrow")) else JsonFile(file)


@contextmanager
def arrow_errors(file: str) -> Iterator[None]:
    """Turn errors of pyarrow about the content of a file into a ValueError with the file and the remedy."""
    try:
        yield
    except (pa.ArrowException, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the operating system, not about the content
            raise
        raise ValueError(
            f"{file}: it cannot be read ({_reason(error)}). Write it again; it may be truncated."
        ) from error


class ArrowFile:
    """A parquet or arrow file."""

    def __init__(self, file: str, table: pa.Table | None = None) -> None:
        """`table`: rows of the file, if they have been read already."""
        self.file = file
        if table is None:
            with arrow_errors(file):
                table = read_arrow(file) if file.endswith(".arrow") else _read_parquet(file)
        self.table = table
        self.columns = list(self.table.column_names)

    def __reduce__(self) -> Any:
        return ArrowFile, (self.file,)

    def __len__(self) -> int:
        return self.table.num_rows

    def rows(self, start: int, stop: int, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        table = self.table if columns is None else self.table.select([c for c in columns if c in self.columns])
        try:
            rows = table.slice(start, stop - start).to_pylist()
        except (ValueError, OverflowError, pa.ArrowException) as error:  # such as text that is not UTF-8
            if stop - start > 1:
                return [row for number in range(start, stop) for row in self.rows(number, number + 1, columns)]
            raise ValueError(
                f"{self.where(start)}: it cannot be read ({_reason(error)}). Correct or remove it."
            ) from error
        # A table without columns has lost its number of rows.
        return rows if table.column_names else [{} for _ in range(start, stop)]

    def where(self, row: int) -> str:
        return f"{self.file} row {row}"


class JsonFile:
    """Objects of a JSON file, one per line or in one array; parsed on access, from text that processes share."""

    def __init__(self, file: str) -> None:
        self.file = file
        is_array = is_json_array(file)
        # Arrays, not lists: forked processes share them, since their entries have no reference counts.
        self._text, self._spans, self._numbers, self.columns = (_json_array if is_array else _json_lines)(file)
        self._unit = "row" if is_array else "line"

    def __reduce__(self) -> Any:
        return JsonFile, (self.file,)

    def __len__(self) -> int:
        return len(self._spans)

    def rows(self, start: int, stop: int, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        rows = [json.loads(self._text[first:last]) for first, last in self._spans[start:stop]]
        return rows if columns is None else [{name: row[name] for name in columns if name in row} for row in rows]

    def where(self, row: int) -> str:
        return f"{self.file} {self._unit} {self._numbers[row]}"


_JsonText = tuple[bytes | mmap.mmap, np.ndarray, np.ndarray, list[str]]
"""The text, int64 [rows, 2] start and end of each row in it, [rows] its line or row number, the columns."""


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """Parse one line. ValueError, with `where` and the remedy: it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({_reason(error)}). Correct or remove it.") from error
    return _object(row, where)


def is_json_array(file: str) -> bool:
    """Return whether a JSON file has one array, instead of one object per line."""
    return _first_character(file) == "["


def _json_lines(file: str) -> _JsonText:
    numbers: list[int] = []
    spans: list[tuple[int, int]] = []
    columns: dict[str, None] = {}
    position = 0
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                columns.update(dict.fromkeys(json_object(line, f"{file} line {number}")))
                spans.append((position, position + len(line)))
                numbers.append(number)
            position += len(line)
        text = mmap.mmap(lines.fileno(), 0, access=mmap.ACCESS_READ) if position else b""
    return text, np.array(spans, dtype=np.int64).reshape(-1, 2), np.array(numbers, dtype=np.int64), list(columns)


def _json_array(file: str) -> _JsonText:
    try:
        rows: list[Any] = json.loads(Path(file).read_bytes())
        texts = [json.dumps(row).encode() for row in rows]
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file}: not valid JSON ({_reason(error)}). Correct it, or write one object per line."
        ) from error
    columns = dict.fromkeys(name for i, row in enumerate(rows) for name in _object(row, f"{file} row {i}"))
    ends = np.cumsum([0, *map(len, texts)])
    return b"".join(texts), np.stack([ends[:-1], ends[1:]], axis=1), np.arange(len(rows)), list(columns)


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a {type(row).__name__}, not an object. Write one object per row.")
    return row


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return the value at a key; dots select nested fields (`extra_info.question`). None: there is none."""
    value: Any = row
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def ground_truth_of(row: Mapping[str, Any], key: str = GROUND_TRUTH) -> Any:
    """Return the ground truth of a row, from `reward_model` or `key`; None if there is none."""
    reward = row.get("reward_model")
    truth = reward.get(GROUND_TRUTH) if isinstance(reward, dict) else None
    return value_at(row, key) if truth is None else truth


def bool_at(row: Mapping[str, Any], key: str) -> bool | None:
    """Return the boolean at a key. ValueError for other values than a boolean, 0 or 1: the text "false" is truthy."""
    value = value_at(row, key)
    if value is not None and value not in (0, 1):
        raise ValueError(f"{key!r} is {value!r}. Write true or false.")
    return None if value is None else bool(value)


def _first_character(file: str) -> str:
    with open(file, encoding="utf-8", errors="replace") as text:
        while chunk := text.read(4096):
            if chunk.strip():
                return chunk.lstrip("\ufeff \t\r\n")[:1]
    return ""


def _read_parquet(file: str) -> pa.Table:
    groups = pq.read_metadata(file).to_dict()["row_groups"]
    # The size in memory, which may be many times that on disk.
    size = sum(group["total_byte_size"] for group in groups)
    if size < MAP_ABOVE_BYTES:
        return pq.ParquetFile(file).read()
    try:
        return read_arrow(_uncompressed_copy(file))
    except OSError as error:
        logger.warning("%s: no space for a memory-mapped copy (%s); reading it into memory", file, error)
        return pq.ParquetFile(file).read()


def read_arrow(file: str) -> pa.Table:
    """Return the table of an arrow file, memory-mapped."""
    source = pa.memory_map(file)
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:
        # `datasets` writes the stream form of the format.
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


def _uncompressed_copy(file: str) -> str:
    """The parquet file as an arrow file in the cache, created once per node and version of the file."""

    def write(partial: Path) -> None:
        source = pq.ParquetFile(file)
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, source.schema_arrow) as writer:
            for batch in source.iter_batches():
                writer.write_batch(batch)

    digest = hashlib.sha256(repr(_version(file)).encode()).hexdigest()[:20]
    return create_once(cache_root() / "datasets" / f"{digest}.arrow", write)


def _version(file: str) -> list[Any]:
    stat = os.stat(file)
    return [os.path.realpath(file), stat.st_size, stat.st_mtime_ns]


# ---------------------------------------------------------------- finding the files

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
    alternatives = {"test": ("test", "validation"), "validation": ("validation", "test"), None: ()}
    candidates = alternatives.get(split, (split,))
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
