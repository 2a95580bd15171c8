"""A folder in Hugging Face form: the tensors in its safetensors files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from verl.model_merger.stored import FileTensor, Stored
from verl.utils.torch_archive import dimensions
from verl.workers.engine.common.safetensors_files import DTYPE_NAMES

_MAX_HEADER = 100_000_000  # of the format
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def folder_tensors(folder: Path, pattern: str = "*.safetensors") -> dict[str, Stored]:
    """By name, of all files, or of those that an index lists: others beside them (Mistral's `consolidated`) are the
    same weights under other names. ValueError where there are none."""
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
    kept = set(listed.values())
    files = sorted(path for path in folder.glob(pattern) if not kept or path.name in kept)
    if not files and not kept:
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:2]) or "nothing of the kind"
        raise ValueError(f"{folder}: no safetensors files (found: {others}). Give a folder that save_pretrained wrote.")
    found: dict[str, Stored] = {}
    for path in files:
        found |= _file_tensors(path)
    missing = sorted({file for name, file in listed.items() if name not in found})
    if missing:
        raise ValueError(f"{folder}: {', '.join(missing[:4])} missing or not whole. Copy the folder again.")
    return found


def _file_tensors(path: Path) -> dict[str, FileTensor]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        available = path.stat().st_size - 8 - size
        try:
            if size > _MAX_HEADER or available < 0:
                raise ValueError(f"its header has {size} bytes")
            header = json.loads(file.read(size))
            tensors = {
                name: _tensor(path, 8 + size, available, each)
                for name, each in header.items()
                if name != "__metadata__"
            }
            if sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values()) > available:
                raise ValueError("its tensors are larger than the file")
            return tensors
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: is no whole safetensors file ({error}).") from error


def _tensor(path: Path, begin: int, available: int, entry: Any) -> FileTensor:
    start, stop = dimensions(entry["data_offsets"])
    shape, dtype = dimensions(entry["shape"]), _DTYPES[entry["dtype"]]
    if not start <= stop <= available or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {list(shape)} has bytes {start} to {stop}")
    return FileTensor(path, begin + start, shape, dtype)
