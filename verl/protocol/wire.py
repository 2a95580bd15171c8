"""What a batch is between processes and on disk: its tensors as bytes or in a file that cannot run code."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from tensordict import TensorDict

from verl.protocol.columns import TensorColumns
from verl.utils.nested import tensor_from_wire, tensor_to_wire
from verl.utils.plain_store import load_plain, save_plain

Parts = tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]
_FILE_FORMAT = "verl.DataProto/1"


def to_state(td: TensorDict | None, arrays: dict[str, np.ndarray], meta: dict[str, Any], borrowed: bool) -> Any:
    """Tensors as flat byte arrays, which pickle protocol 5 (Ray, multiprocessing) moves out-of-band."""
    state = _parts(td, arrays, meta)
    state["tensors"] = {key: tensor_to_wire(value) for key, value in state["tensors"].items()}
    for data, _, _ in state["tensors"].values() if borrowed else ():
        data.flags.writeable = False  # torch does not carry this on
    return state


def from_state(state: dict[str, Any]) -> tuple[Parts, bool]:
    """The batch, and whether its tensors alias memory that is not ours to write."""
    wires = state["tensors"]
    arrays = {key: a if a.flags.writeable else a.copy() for key, a in state["non_tensor_batch"].items()}
    td = _tensordict({key: tensor_from_wire(wire) for key, wire in wires.items()}, state["batch_size"])
    return (td, arrays, state["meta_info"]), any(not wire[0].flags.writeable for wire in wires.values())


def save(parts: Parts, path: str | os.PathLike) -> None:
    """Write to one file, atomically."""
    save_plain({"format": _FILE_FORMAT, **_parts(*parts)}, path, what="DataProto")


def load(path: str | os.PathLike) -> Parts:
    """Read what `save` wrote."""
    content = load_plain(path)
    if not isinstance(content, dict) or content.get("format") != _FILE_FORMAT:
        raise ValueError(f"{path}: not a DataProto file (no {_FILE_FORMAT!r} mark). Write it with save_to_disk.")
    return _tensordict(content["tensors"], content["batch_size"]), content["non_tensor_batch"], content["meta_info"]


def _parts(td: TensorDict | None, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> dict[str, Any]:
    size, tensors = (None, {}) if td is None else (list(td.batch_size), dict(td.items()))
    return {"batch_size": size, "tensors": tensors, "non_tensor_batch": dict(arrays), "meta_info": meta}


def _tensordict(tensors: dict[str, Any], batch_size: list[int] | None) -> TensorDict | None:
    return None if batch_size is None else TensorColumns(tensors, batch_size=batch_size)
